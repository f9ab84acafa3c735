"""Ranks that stand still: found within the limit, named, logged, and gone."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.scheduler.plan import StepPlan
from tests.engines import ids_of, requests, start
from tests.executors.ranks import gone, outcome_of, rank_pids
from tests.executors.waiting import until

PROMPTS = [[5, 6, 7, 8], [20] * 11]
LIMIT_S = 3.0
MARGIN_S = 10.0
"""Beyond the limit, on a machine that does other work too; a gloo timeout would take minutes."""


@dataclasses.dataclass(frozen=True)
class Slow:
    """Makes one rank slow: it sleeps before it is ready, and in each of its steps.

    Attributes:
        stuck_after: steps after which it sleeps for ever; None for never.
    """

    rank: int
    ready_s: float = 0.0
    step_s: float = 0.0
    stuck_after: int | None = None

    def install(self, runner: Runner) -> None:
        if runner.pair.group.rank != self.rank:
            return
        time.sleep(self.ready_s)
        launch, done = runner.launch, 0

        def launch_slowly(plan: StepPlan) -> Pending:
            nonlocal done
            done += 1
            stuck = self.stuck_after is not None and done > self.stuck_after
            time.sleep(3600.0 if stuck else self.step_s)
            return launch(plan)

        runner.launch = launch_slowly  # type: ignore[method-assign]


def collect_until_it_hangs(engine: EngineClient, stop: list[int]) -> tuple[str, float]:
    """Stop the processes at the first token; returns the engine's error and the time it took."""
    left, began = list(stop), [time.monotonic()]

    def strike(_event: object) -> None:
        while left:
            began[0] = time.monotonic()
            os.kill(left.pop(), signal.SIGSTOP)

    long = requests(PROMPTS, max_tokens=400)
    thread, errors = outcome_of(lambda: engine.collect(long, strike))
    thread.join(120)
    assert errors, "the engine did not end"
    return str(errors[0]), time.monotonic() - began[0]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_ends_all_within_the_limit_and_is_named(
    victim: int, two_ranks: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = start(dataclasses.replace(two_ranks, max_model_len=500, hang_timeout_s=LIMIT_S))
    try:
        pids = rank_pids()
        text, took = collect_until_it_hangs(engine, [pids[victim]])
        # Rank 0 may be stopped before it has shown that it has work: then the front end finds out.
        assert re.search(r"(no step has completed|reported nothing) for [34]\.\d s", text)
        assert f"rank {victim} has given no sign of life for" in text
        assert LIMIT_S / 2 < took < LIMIT_S + MARGIN_S
        until(lambda: all(gone(pid) for pid in pids.values()))
    finally:
        engine.shutdown()
    log = capfd.readouterr().err
    assert f"the watchdog ends rank {1 - victim}" in log
    assert "thread MainThread:" in log
    assert ("in follow" in log) == (victim == 0)


@pytest.mark.slow
def test_a_step_that_never_returns_has_every_rank_log_and_leave(
    two_ranks: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(two_ranks, hang_timeout_s=LIMIT_S)
    engine = start(config, Slow(rank=1, stuck_after=3).install)
    try:
        pids = rank_pids()
        text, took = collect_until_it_hangs(engine, [])
        assert "rank 0 has been in step" in text
        assert "rank 1 has been in step" in text
        assert took < LIMIT_S + MARGIN_S
        until(lambda: all(gone(pid) for pid in pids.values()))
    finally:
        engine.shutdown()
    log = capfd.readouterr().err
    assert "the watchdog ends rank 0" in log
    assert "the watchdog ends rank 1" in log
    assert "launch_slowly" in log


@pytest.mark.slow
def test_a_lone_rank_stopped_while_idle_is_found_by_the_next_request(config: EngineConfig) -> None:
    engine = start(dataclasses.replace(config, executor="mp", hang_timeout_s=LIMIT_S))
    try:
        engine.collect(requests(PROMPTS, max_tokens=3))
        (pid,) = rank_pids().values()
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(LIMIT_S + 2)
        engine.check_health()  # nothing is pending, so nothing has an age
        text, took = collect_until_it_hangs(engine, [])
        assert "rank 0 has reported nothing for" in text
        assert "rank 0 has given no sign of life for" in text
        assert LIMIT_S < took < LIMIT_S + MARGIN_S
        until(lambda: gone(pid))
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_slow_starts_slow_steps_and_rests_trip_nothing(config: EngineConfig) -> None:
    limited = dataclasses.replace(config, hang_timeout_s=LIMIT_S, prefill_chunk=16)
    engine = start(limited, Slow(rank=0, ready_s=LIMIT_S + 1, step_s=0.5).install)
    try:
        for _ in range(2):
            # The first token comes after eight chunks, longer than the limit.
            outcome = engine.collect(requests([[7] * 128], max_tokens=2))
            assert len(ids_of(outcome["r0"])) == 2
            threading.Event().wait(LIMIT_S + 1)
        engine.check_health()
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_two_ranks_that_are_only_slow_trip_nothing(two_ranks: EngineConfig) -> None:
    config = dataclasses.replace(two_ranks, hang_timeout_s=LIMIT_S, prefill_chunk=32)
    engine = start(config, Slow(rank=1, ready_s=5.0, step_s=1.0).install)
    try:
        for _ in range(2):
            outcome = engine.collect(requests([[7] * 160], max_tokens=2))
            assert len(ids_of(outcome["r0"])) == 2
            threading.Event().wait(LIMIT_S + 2)
        engine.check_health()
    finally:
        engine.shutdown()
