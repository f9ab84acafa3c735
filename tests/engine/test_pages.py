"""No page is lost or shared by mistake, and pages of a shared prefix never change."""

from __future__ import annotations

import random

import pytest

from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.limits import Limits
from dflash_serve.scheduler.plan import DecodeResult, StepPlan, StepResult
from dflash_serve.scheduler.scheduler import Scheduler
from tests.engine.direct import Direct
from tests.engine.harness import PAGE, engine_config
from tests.engines import ids_of
from tests.tiny import TinyPair

VOCAB, ROWS = 50, 8


def random_submits(count: int, generator: random.Random, vocab: int = VOCAB) -> list[Submit]:
    """Requests of random lengths; some share beginnings, some have stop ids."""
    shared = [generator.randrange(vocab) for _ in range(40)]
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=shared[: generator.randrange(0, 40)]
            + [generator.randrange(vocab) for _ in range(generator.randrange(1, 30))],
            params=SamplingParams(
                max_tokens=generator.randrange(1, 41),
                seed=i,
                temperature=float(i % 2),
                stop_token_ids=(generator.randrange(vocab),) if i % 3 == 0 else (),
                ignore_eos=i % 5 == 0,
            ),
        )
        for i in range(count)
    ]


def random_result(plan: StepPlan, generator: random.Random) -> StepResult:
    """What a runner might answer; now and then a NaN."""
    return StepResult(
        sampled=[
            (generator.randrange(-1 if generator.random() < 0.05 else 0, VOCAB))
            if chunk.sample
            else None
            for chunk in plan.prefill
        ],
        decoded=[
            DecodeResult(
                picked=[generator.randrange(VOCAB) for _ in range(plan.rows)],
                accepted=generator.randrange(plan.rows),
                fault=generator.random() < 0.002,
            )
            for _ in plan.decode
        ],
    )


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_thousand_random_requests_leave_the_pool_complete(chunk: int, prefix_cache: bool) -> None:
    generator = random.Random(11)
    limits = Limits(
        max_running=8,
        max_model_len=112,
        page_size=PAGE,
        num_pages=1 + 18,
        prefill_chunk=chunk,
        verify_rows=ROWS,
        vocab_size=VOCAB,
        eos=frozenset({3}),
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(limits)
    waiting = random_submits(1000, generator)
    live: set[str] = set()
    ended: dict[str, str] = {}
    while waiting or not scheduler.idle:
        while waiting and len(live) < 12:
            live.add(waiting[-1].request_id)
            scheduler.submit(waiting.pop())
        if generator.random() < 0.05:
            scheduler.abort(generator.choice(sorted(live)))
        plan = scheduler.plan()
        scheduler.commit(plan, random_result(plan, generator))
        scheduler.pool.check()
        for event in scheduler.take_events():
            if event.finish_reason is not None:
                assert event.request_id not in ended, "ended twice"
                ended[event.request_id] = event.finish_reason
                live.discard(event.request_id)
    assert len(ended) == 1000
    assert set(ended.values()) == {"stop", "length", "abort", "error"}
    assert scheduler.stats.preemptions > 0
    assert scheduler.pool.used == 0
    assert scheduler.pool.available == scheduler.pool.usable
    snapshot = scheduler.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)


def test_random_requests_of_a_real_engine_leave_the_pool_complete(pair: TinyPair) -> None:
    engine = Direct(engine_config(pair, pages=26, max_model_len=128, prefill_chunk=24))
    submits = random_submits(60, random.Random(3))
    events = engine.run(submits)
    assert engine.scheduler.stats.preemptions > 0
    assert engine.scheduler.stats.prefix_hits > 0
    plain = Direct(engine_config(pair, draft=False)).run(submits)
    for submit in submits:
        assert ids_of(events[submit.request_id]) == ids_of(plain[submit.request_id])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_shared_prefix_pages_never_change(pair: TinyPair, offset: int) -> None:
    generator = random.Random(offset)
    prefix = [generator.randrange(2, 290) for _ in range(4 * PAGE + offset)]
    engine = Direct(engine_config(pair, max_running=8))
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    first = Submit(request_id="first", prompt_ids=prefix, params=params)
    (alone,) = engine.run([first]).values()
    pages = sorted(engine.scheduler.pool._key_of)
    before = engine.page_digests(pages)
    assert len(pages) >= len(prefix) // PAGE
    sharers = [
        Submit(
            request_id=f"s{i}",
            prompt_ids=prefix + [i + 2] * (i % 3),
            params=SamplingParams(max_tokens=24, seed=i, temperature=i % 2, ignore_eos=True),
        )
        for i in range(8)
    ]
    for submit in sharers:
        engine.scheduler.submit(submit)
    while not engine.scheduler.idle:
        engine.step()
        assert engine.page_digests(pages) == before
    assert engine.scheduler.stats.prefix_hits >= 8 * ((len(prefix) - 1) // PAGE) * PAGE
    again = engine.run([Submit(request_id="again", prompt_ids=prefix, params=params)])
    assert ids_of(again["again"]) == ids_of(alone)
    assert engine.page_digests(pages) == before
