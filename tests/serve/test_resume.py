"""Requests whose engine fails: over scripted engines, with the real text side, without Ray."""

import asyncio
import contextlib

import pytest

from dflash_serve.api.protocol import Delta
from dflash_serve.api.replica import TextEngine
from dflash_serve.api.responses import Usage, merge
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from dflash_serve.observe.resumes import ResumeMetrics
from dflash_serve.serve.journal import ResumeLimits
from dflash_serve.serve.resume import Resumer
from tests.api.fakes import MODEL, FakeEngine, completion, save_tokenizer

# Characters of two to four bytes: outside the tokenizer's corpus, so a token holds one byte.
TEXT = "Le cœur a 100 € — 狐狸 🦊🦊 jumps STOPPED over the STOP lazy dog"
STOPS = ("STOP l", "never")


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    from dflash_serve.api.codec import TextCodec

    return TextCodec.load(str(save_tokenizer(tmp_path_factory.mktemp("checkpoint"))))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dflash_serve.serve.resume._FIRST_DELAY_S", 0.0001)
    monkeypatch.setattr("dflash_serve.serve.resume._LAST_DELAY_S", 0.001)


class Cluster:
    """Engines one after another: each submission goes to the next, or meets an error."""

    def __init__(self, codec, *engines):
        self.engines = list(engines)
        self.used = []
        self.requests = []
        self.metrics = ResumeMetrics([MODEL])
        self._codec = codec

    async def attempt(self, request):
        self.requests.append(request)
        engine = self.engines.pop(0)
        if isinstance(engine, Exception):
            raise engine
        self.used.append(engine)
        async with contextlib.aclosing(
            TextEngine(engine, self._codec, MODEL).generate(request)
        ) as deltas:
            async for delta in deltas:
                if request.emitted_ids:  # a later engine may have what the first had not
                    delta.cached_tokens = 10
                yield delta

    def generate(self, request, attempts=5, wait_s=5.0, total_s=10.0):
        return self.resumer(attempts, wait_s, total_s).generate(request)

    def resumer(self, attempts=5, wait_s=5.0, total_s=10.0):
        limits = ResumeLimits(attempts=attempts, wait_s=wait_s, total_s=total_s)
        return Resumer(self.attempt, limits, self.metrics)

    def count(self, name):
        lines = self.metrics.page().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


async def whole(deltas):
    total = Delta()
    async for delta in deltas:
        merge(total, delta)
    return total


async def answer(deltas):
    """What a client of a stream sees: text, ids, reason, usage."""
    total, usage = Delta(), Usage()
    async for delta in deltas:
        usage.add(delta)
        merge(total, delta)
    return total.text, total.token_ids, total.finish_reason, usage.openai()


def engine(codec, block, text=TEXT, **options):
    return FakeEngine(codec.encode(text), block, **options)


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("stop", [(), STOPS])
@pytest.mark.parametrize("max_tokens", [0, 31])
async def test_failure_at_any_event_changes_nothing_for_the_client(codec, block, stop, max_tokens):
    request = completion(stop=stop, max_tokens=max_tokens)
    alone = await answer(Cluster(codec, engine(codec, block)).generate(request))
    events = -(-len(codec.encode(TEXT)) // block)
    for point in range(events):
        cluster = Cluster(codec, engine(codec, block, die_after=point), engine(codec, block))
        assert await answer(cluster.generate(request)) == alone, f"death before event {point}"
        for used in cluster.used:
            assert not used.running


async def test_many_failures_in_a_row_change_nothing(codec):
    request = completion(stop=STOPS)
    alone = await answer(Cluster(codec, engine(codec, 1)).generate(request))
    # Long enough to get past what each failure makes the next engine compute again.
    cluster = Cluster(codec, *[engine(codec, 1, die_after=9) for _ in range(40)])
    assert await answer(cluster.generate(request, attempts=40)) == alone
    assert cluster.count("dflash_requests_resumed_total") == len(cluster.used) - 1
    assert cluster.count("dflash_resume_attempts_total") == len(cluster.used) - 1
    assert cluster.count("dflash_resume_pause_seconds_count") == len(cluster.used) - 1
    assert cluster.count("dflash_requests_failed_after_resume_total") == 0


async def test_what_is_submitted_again_is_prompt_and_output_as_ids(codec):
    cluster = Cluster(codec, engine(codec, 4, die_after=3), engine(codec, 4))
    total = await whole(cluster.generate(completion("The fox", seed=7)))
    first, second = cluster.requests
    assert second.request_id != first.request_id
    assert second.prompt == codec.encode("The fox") == total.prompt_ids
    assert second.emitted_ids == total.token_ids[:12]
    assert (second.params, second.stop, second.model) == (first.params, first.stop, first.model)


async def test_a_failure_before_the_first_token_sends_the_request_as_it_was(codec):
    cluster = Cluster(codec, engine(codec, 4, die_after=0), engine(codec, 4))
    await whole(cluster.generate(completion("The fox")))
    assert cluster.requests[1].prompt == "The fox"
    assert cluster.requests[1].emitted_ids == []


async def test_held_back_text_is_computed_again_and_not_lost(codec):
    """Death right after the ids of "STOP" came, which are held back, and what follows differs."""
    ids = codec.encode(TEXT)
    held = next(n for n in range(len(ids)) if codec.decode(ids[: n + 1]).endswith("jumps STO"))
    cluster = Cluster(codec, engine(codec, 1, die_after=held + 1), engine(codec, 1))
    total = await whole(cluster.generate(completion(stop=STOPS)))
    assert len(cluster.requests[1].emitted_ids) < held + 1, "nothing was held back"
    assert total.text == TEXT[: TEXT.index("STOP l")]
    assert total.finish_reason == "stop"


async def test_death_after_the_last_id_but_before_its_reason(codec):
    class Mute(FakeEngine):
        async def stream(self, submit):
            async for event in super().stream(submit):
                if event.finish_reason is not None:
                    event.finish_reason = None
                    yield event
                    raise EngineDeadError("died before it could say why it stopped")
                yield event

    class Done(FakeEngine):
        def _events(self, submit):
            from dflash_serve.engine.messages import TokenEvent

            return [TokenEvent(request_id=submit.request_id, finish_reason="length")]

    request = completion(max_tokens=6)
    cluster = Cluster(codec, Mute(codec.encode(TEXT), 3), Done([]))
    total = await answer(cluster.generate(request))
    alone = await answer(Cluster(codec, engine(codec, 3)).generate(request))
    assert total == alone


async def test_attempts_are_bounded(codec):
    cluster = Cluster(codec, *[engine(codec, 4, die_after=1) for _ in range(5)])
    deltas = cluster.generate(completion(), attempts=2)
    with pytest.raises(EngineDeadError, match=r"3 engines failed .* resume_attempts allows 2"):
        await whole(deltas)
    assert len(cluster.used) == 3
    assert cluster.count("dflash_requests_failed_after_resume_total") == 1


async def test_nobody_to_take_it_is_waited_for_and_is_no_attempt(codec):
    nobody = [UnavailableError("being started") for _ in range(30)]
    full = [OverloadedError("full") for _ in range(5)]
    cluster = Cluster(codec, engine(codec, 4, die_after=2), *nobody, *full, engine(codec, 4))
    total = await whole(cluster.generate(completion(), attempts=1))
    assert total.text == TEXT


async def test_a_new_request_waits_for_an_engine_too(codec):
    nobody = [UnavailableError("being started") for _ in range(5)]
    cluster = Cluster(codec, *nobody, engine(codec, 4))
    assert (await whole(cluster.generate(completion(), attempts=0))).text == TEXT
    assert cluster.count("dflash_resume_attempts_total") == 0


async def test_waiting_has_an_end(codec):
    nobody = [UnavailableError("being started") for _ in range(10_000)]
    cluster = Cluster(codec, engine(codec, 4, die_after=2), *nobody)
    with pytest.raises(UnavailableError, match=r"queue_timeout_s.*being started"):
        await whole(cluster.generate(completion(), wait_s=0.05))


async def test_the_requests_own_deadline_ends_it(codec):
    cluster = Cluster(codec, engine(codec, 4, die_after=2), engine(codec, 4, hang_after=1))
    with pytest.raises(EngineStalledError, match="request_timeout_s"):
        await whole(cluster.generate(completion(), total_s=0.1))
    assert not cluster.used[1].running


@pytest.mark.parametrize(
    "error",
    [RequestError("no", "prompt"), DFlashError("NaN logits"), OverloadedError("full")],
)
async def test_what_would_come_again_is_not_tried_again(codec, error):
    cluster = Cluster(codec, error, engine(codec, 4))
    with pytest.raises(type(error)):
        await whole(cluster.generate(completion()))
    assert len(cluster.requests) == 1


async def test_a_numerical_fault_after_a_resume_ends_the_request(codec):
    cluster = Cluster(
        codec, engine(codec, 4, die_after=2), engine(codec, 4, error_after=1), engine(codec, 4)
    )
    with pytest.raises(DFlashError, match="NaN logits"):
        await whole(cluster.generate(completion()))
    assert len(cluster.used) == 2
    assert cluster.count("dflash_requests_failed_after_resume_total") == 1


@pytest.mark.parametrize("after", [0, 3])
async def test_a_client_that_leaves_ends_it_everywhere(codec, after):
    cluster = Cluster(codec, engine(codec, 2, die_after=2), engine(codec, 2, hang_after=2))
    deltas = cluster.generate(completion())
    for _ in range(after):
        await anext(deltas)
    await deltas.aclose()
    assert all(not used.running for used in cluster.used)
    assert len(cluster.used) == (2 if after else 0)


async def test_a_client_that_leaves_in_the_pause_leaves_nothing(codec):
    nobody = [UnavailableError("being started") for _ in range(10_000)]
    cluster = Cluster(codec, engine(codec, 2, die_after=2), *nobody)
    task = asyncio.create_task(whole(cluster.generate(completion())))
    while len(cluster.requests) < 5:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    sent = len(cluster.requests)
    await asyncio.sleep(0.01)
    assert len(cluster.requests) == sent


async def test_the_first_engine_is_left_before_the_second_is_asked(codec):
    """A stream that breaks off without a reason: its engine must not work on unheard."""
    running = []

    class Watched(Cluster):
        async def attempt(self, request):
            running.append([used for used in self.used if used.running])
            async with contextlib.aclosing(super().attempt(request)) as deltas:
                async for delta in deltas:
                    yield delta

    cluster = Watched(codec, engine(codec, 2, die_after=3), engine(codec, 2))
    await whole(cluster.generate(completion()))
    assert running == [[], []]


async def begun(resumer):
    """A stream under way, and its first delta."""
    deltas = resumer.generate(completion())
    return deltas, await anext(deltas)


async def test_a_stopping_server_refuses_new_requests_and_lets_those_under_way_finish(codec):
    cluster = Cluster(codec, engine(codec, 1))
    resumer = cluster.resumer()
    deltas, first = await begun(resumer)
    draining = asyncio.create_task(resumer.drain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="being stopped; send the request to another") as no:
        await whole(resumer.generate(completion()))
    assert no.value.retry_after_s == 10.0
    rest = await whole(deltas)
    assert first.text + rest.text == TEXT
    assert await draining == 0


async def test_what_outlasts_the_grace_ends_with_an_error_and_leaves_the_engine(codec):
    stuck = engine(codec, 1, hang_after=3)
    cluster = Cluster(codec, stuck)
    resumer = cluster.resumer(wait_s=60.0)
    waiting = asyncio.create_task(whole(resumer.generate(completion())))
    while not stuck.running:
        await asyncio.sleep(0.001)
    assert await resumer.drain(0.1) == 1
    with pytest.raises(UnavailableError, match="being stopped"):
        await waiting
    assert not stuck.running


async def test_a_request_without_an_engine_ends_too_when_the_server_stops(codec):
    cluster = Cluster(codec, *[UnavailableError("none") for _ in range(10_000)])
    resumer = cluster.resumer(wait_s=60.0)
    waiting = asyncio.create_task(whole(resumer.generate(completion())))
    while not cluster.requests:
        await asyncio.sleep(0.001)
    assert await resumer.drain(0.05) == 1
    with pytest.raises(UnavailableError, match="being stopped"):
        await waiting
