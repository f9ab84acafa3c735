"""The front end of an engine that runs in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.drafters import DecodeBlock, DFlashDrafter
from dflash_serve.engine.inproc import InprocExecutor
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.engine.rank import OnReady
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import EngineDeadError, EngineStalledError, RequestError
from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.plan import StepPlan, StepResult
from tests.engines import ids_of, requests, start
from tests.executors.waiting import until

PROMPT = [5, 6, 7, 8]


@contextmanager
def running(config: EngineConfig, on_ready: OnReady | None = None) -> Iterator[EngineClient]:
    engine = start(config, on_ready)
    try:
        yield engine
    finally:
        engine.shutdown()


def endless(name: str) -> Submit:
    """A request that would run for the whole context."""
    params = SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    return Submit(request_id=name, prompt_ids=PROMPT, params=params)


def freed(engine: EngineClient) -> bool:
    stats = engine.stats
    busy = engine.outstanding or stats.running or stats.waiting or stats.pages_used
    return not busy


class Gate:
    """Stops a runner before its next step until it is opened again."""

    def __init__(self, *, opened: bool) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        if opened:
            self.opened.set()

    def install(self, runner: Runner) -> None:
        launch = runner.launch

        def wait_and_launch(plan: StepPlan) -> Pending:
            self.reached.set()
            self.opened.wait()
            return launch(plan)

        runner.launch = wait_and_launch  # type: ignore[method-assign]


async def test_leaving_a_stream_early_frees_its_pages(config: EngineConfig) -> None:
    with running(config) as engine:
        async with aclosing(engine.stream(endless("r"))) as events:
            async for _ in events:
                break
        until(lambda: freed(engine))
        assert engine.stats.finished == {"abort": 1}


async def test_cancelling_a_streaming_task_frees_its_pages(config: EngineConfig) -> None:
    gate = Gate(opened=False)
    with running(config, gate.install) as engine:

        async def consume() -> None:
            async for _ in engine.stream(endless("r")):
                pass

        task = asyncio.create_task(consume())
        await asyncio.to_thread(gate.reached.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        until(lambda: freed(engine))
        assert engine.stats.finished == {"abort": 1}


async def test_a_stream_yields_what_collect_returns(config: EngineConfig) -> None:
    with running(config) as engine:
        request = requests([PROMPT])[0]
        streamed = [event async for event in engine.stream(request)]
        collected = engine.collect([request])[request.request_id]
        assert ids_of(streamed) == ids_of(collected)
        assert [e.finish_reason for e in streamed][-1] == "length"


def test_a_ready_engine_shows_its_pages_before_the_first_request(config: EngineConfig) -> None:
    with running(config) as engine:
        assert engine.stats.pages_total == engine.info.num_pages - 1


def test_abort_of_an_unknown_request_is_ignored(config: EngineConfig) -> None:
    with running(config) as engine:
        engine.abort("nobody")
        outcome = engine.collect(requests([PROMPT], max_tokens=5))
        engine.abort("r0")
        engine.abort("r0")
        assert len(ids_of(outcome["r0"])) == 5
        assert len(ids_of(engine.collect(requests([PROMPT], max_tokens=5))["r0"])) == 5


def test_abort_ends_a_request_with_that_reason(config: EngineConfig) -> None:
    with running(config) as engine:
        seen: list[TokenEvent] = []

        def abort_at_once(event: TokenEvent) -> None:
            seen.append(event)
            engine.abort(event.request_id)

        engine.collect([endless("r")], abort_at_once)
        assert seen[-1].finish_reason in ("abort", "length")
        until(lambda: freed(engine))


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(config: EngineConfig) -> None:
    gate = Gate(opened=False)
    with running(config, gate.install) as engine:
        results: list[list[int]] = []
        first = requests([PROMPT], max_tokens=6)
        thread = threading.Thread(
            target=lambda: results.append(ids_of(engine.collect(first)["r0"]))
        )
        thread.start()
        gate.reached.wait()
        with pytest.raises(RequestError, match="in flight"):
            engine.collect(first)
        gate.opened.set()
        thread.join()
        assert len(results[0]) == 6


def test_a_step_that_never_returns_ends_the_engine_with_its_stacks(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(opened=True)
    with running(dataclasses.replace(config, hang_timeout_s=0.3), gate.install) as engine:
        engine.check_health()
        gate.opened.clear()
        text = (
            r"no step has completed for \d+\.\d s \(limit 0\.3 s\): rank 0 has been in step \d+ for"
        )
        with pytest.raises(EngineDeadError, match=text):
            engine.collect(requests([PROMPT]))
        with pytest.raises(EngineDeadError, match=text):
            engine.check_health()
        gate.opened.set()
    until(lambda: not [t for t in threading.enumerate() if t.name == "engine-loop"])
    assert "wait_and_launch" in caplog.text


def test_a_front_end_without_reports_is_unhealthy_and_then_ends_the_engine(
    config: EngineConfig,
) -> None:
    gate = Gate(opened=True)
    engine = EngineClient(InprocExecutor(config, gate.install), hang_timeout_s=0.5)
    try:
        gate.opened.clear()
        thread = threading.Thread(target=lambda: gate.reached.wait() and end.append(health()))

        def health() -> str:
            until(lambda: engine.step_age_s > 0.5)
            with pytest.raises((EngineStalledError, EngineDeadError), match=r"0\.5 s") as caught:
                engine.check_health()
            return str(caught.value)

        end: list[str] = []
        thread.start()
        with pytest.raises(EngineDeadError, match=r"rank 0 has reported nothing for .* 1 requests"):
            engine.collect(requests([PROMPT]))
        thread.join()
        assert end
        gate.opened.set()
    finally:
        engine.shutdown()
    until(lambda: not [t for t in threading.enumerate() if t.name == "engine-loop"])


def test_an_idle_engine_is_healthy_however_long_nothing_happens(config: EngineConfig) -> None:
    with running(dataclasses.replace(config, hang_timeout_s=3.0)) as engine:
        engine.collect(requests([PROMPT], max_tokens=3))
        silence_ends = time.monotonic() + 3.5
        until(lambda: time.monotonic() > silence_ends)
        engine.check_health()


def test_an_idle_engine_uses_no_cpu(config: EngineConfig) -> None:
    with running(config) as engine:
        engine.collect(requests([PROMPT], max_tokens=3))
        until(lambda: freed(engine))
        began = time.process_time()
        threading.Event().wait(2.0)
        assert time.process_time() - began < 0.3


def test_shutdown_ends_what_is_in_flight_and_refuses_what_comes(config: EngineConfig) -> None:
    gate = Gate(opened=True)
    engine = start(config, gate.install)
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            engine.collect([endless("r")])
        except EngineDeadError as error:
            errors.append(error)

    gate.opened.clear()
    thread = threading.Thread(target=collect)
    thread.start()
    gate.reached.wait()
    threading.Timer(0.2, gate.opened.set).start()
    engine.shutdown()
    engine.shutdown()
    thread.join()
    assert "shut down" in str(errors[0])
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.collect(requests([PROMPT]))
    with pytest.raises(EngineDeadError):
        engine.check_health()
    assert not [t for t in threading.enumerate() if t.name in ("engine-loop", "engine-reports")]


def test_a_step_that_raises_kills_the_engine_with_its_text(config: EngineConfig) -> None:
    def install(runner: Runner) -> None:
        def fail(plan: StepPlan) -> Pending:
            raise RuntimeError(f"step {plan.step} broke")

        runner.launch = fail  # type: ignore[method-assign]

    with running(config, install) as engine:
        with pytest.raises(EngineDeadError, match=r"RuntimeError: step .* broke"):
            engine.collect(requests([PROMPT]))
        with pytest.raises(EngineDeadError, match="broke"):
            engine.check_health()


@pytest.mark.parametrize("page_size", [1, 4, 7, 8, 9, 16])
def test_a_whole_step_runs_before_ready_and_leaves_no_trace(
    config: EngineConfig, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    filled: list[bool] = []
    execute = Runner.execute

    def record(runner: Runner, plan: StepPlan) -> StepResult:
        plans.append(plan)
        return execute(runner, plan)

    def look(runner: Runner) -> None:
        assert runner.pair.draft_kv is not None
        for pool in (runner.pair.target_kv, runner.pair.draft_kv):
            filled.extend(bool(pages.any()) for both in pool.layers for pages in both)

    monkeypatch.setattr(Runner, "execute", record)
    with running(dataclasses.replace(config, page_size=page_size), look):
        assert [(plan.decode, plan.rows, len(plan.prefill)) for plan in plans] == [([0], 8, 1)]
    assert filled
    assert not any(filled)


def test_a_pair_that_cannot_run_never_becomes_ready(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_drafter: DFlashDrafter, _block: DecodeBlock) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(DFlashDrafter, "propose", fail)
    with pytest.raises(EngineDeadError, match="shapes cannot be multiplied"):
        start(config)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bfloat16_runs_and_gives_ids_in_range(config: EngineConfig, temperature: float) -> None:
    with running(dataclasses.replace(config, dtype="bfloat16")) as engine:
        assert engine.info.dtype == "bfloat16"
        prompts = [PROMPT, [9] * 30, [11]]
        submits = requests(prompts, max_tokens=20, temperature=temperature)
        outcome = engine.collect(submits)
    for events in outcome.values():
        assert len(ids_of(events)) == 20
        assert all(event.error is None for event in events)
        assert all(0 <= token < 320 for token in ids_of(events))
