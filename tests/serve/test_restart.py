"""The engine that outlives its gang, over scripted gangs, without Ray."""

import threading
import time

import pytest

from dflash_serve.engine.messages import EngineStats
from dflash_serve.errors import (
    CheckpointError,
    EngineDeadError,
    EngineStalledError,
    RequestError,
    UnavailableError,
)
from dflash_serve.scheduler.tuning import Tuning
from dflash_serve.serve.restart import RestartingEngine

from .waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dflash_serve.serve.restart._POLL_S", 0.005)
    monkeypatch.setattr("dflash_serve.serve.restart._PAUSE_S", 0.001)


class Gang:
    """An engine client that dies when told to."""

    def __init__(self, finished=0):
        self.stats = EngineStats(finished={"length": finished})
        self.error = None
        self.ended = False
        self.tunings = []

    def tune(self, tuning):
        if tuning.max_running == 99:
            raise RequestError("max_running is 99", "max_running")
        self.tunings.append(tuning)

    def check_health(self):
        if self.error is not None:
            raise self.error

    def stream(self, submit):
        return iter([submit])

    def shutdown(self):
        self.ended = True

    def die(self):
        self.error = EngineDeadError("rank 1 died")


class Starts:
    """Gives out prepared gangs; an exception among them is raised, a lock is waited for."""

    def __init__(self, *gangs):
        self.gangs = list(gangs)
        self.lost = []

    def __call__(self):
        gang = self.gangs.pop(0)
        if isinstance(gang, threading.Event):
            assert gang.wait(30)
            gang = self.gangs.pop(0)
        if isinstance(gang, Exception):
            raise gang
        return gang


@pytest.fixture
def make():
    made = []

    def restarting(starts, deadline_s=30.0, failures=3):
        made.append(
            RestartingEngine(
                starts,
                deadline_s=deadline_s,
                failures_in_a_row=failures,
                on_loss=starts.lost.append,
            )
        )
        return made[-1]

    yield restarting
    for engine in made:
        engine.shutdown()


def test_a_dead_gang_is_ended_and_replaced(make):
    first, second = Gang(), Gang()
    engine = make(Starts(first, second))
    first.die()
    until(lambda: engine.restarts == 1, "the second gang")
    assert first.ended
    assert not second.ended
    assert engine.running
    assert list(engine.stream("a request")) == ["a request"]
    engine.check_health()


def test_meanwhile_health_passes_and_work_is_refused(make):
    first, go = Gang(), threading.Event()
    engine = make(Starts(first, go, Gang()))
    first.die()
    until(lambda: not engine.running, "its death is noticed")
    engine.check_health()
    with pytest.raises(UnavailableError, match="being started again"):
        engine.stream("a request")
    go.set()
    until(lambda: engine.running, "the second gang")


def test_a_death_nobody_has_noticed_yet_refuses_work_too(make, monkeypatch):
    monkeypatch.setattr("dflash_serve.serve.restart._POLL_S", 60.0)
    first = Gang()
    engine = make(Starts(first))
    first.die()
    with pytest.raises(UnavailableError, match="rank 1 died"):
        engine.require_running()
    engine.check_health()


def test_past_the_deadline_health_fails_although_a_start_is_under_way(make):
    first, go = Gang(), threading.Event()
    engine = make(Starts(first, go, Gang()), deadline_s=0.05)
    first.die()
    until(lambda: not engine.running, "its death is noticed")
    time.sleep(0.1)
    with pytest.raises(EngineDeadError, match="start_timeout_s"):
        engine.check_health()
    go.set()


def test_starts_that_fail_are_tried_again_and_counted(make):
    first = Gang()
    starts = Starts(first, EngineDeadError("rank 0 failed"), EngineDeadError("again"), Gang())
    engine = make(starts)
    first.die()
    until(lambda: engine.restarts == 1, "the gang that starts")
    assert starts.lost == []


def test_too_many_failures_in_a_row_are_given_up(make):
    first = Gang()
    starts = Starts(first, *[EngineDeadError(f"start {n} failed") for n in range(9)])
    engine = make(starts, failures=3)
    first.die()
    until(lambda: starts.lost, "it gives up")
    assert "4 gangs failed in a row; the last: start 2 failed" in starts.lost[0]
    with pytest.raises(EngineDeadError, match="in a row"):
        engine.check_health()
    with pytest.raises(UnavailableError, match="in a row"):
        engine.require_running()


def test_gangs_that_finish_requests_are_not_failures_in_a_row(make):
    gangs = [Gang(finished=1) for _ in range(8)]
    starts = Starts(*gangs)
    engine = make(starts, failures=1)
    for number, gang in enumerate(gangs[:-1], start=1):
        gang.die()
        until(lambda n=number: engine.restarts == n and engine.running, "the next gang")
    assert starts.lost == []


def test_gangs_that_die_before_they_finish_anything_are(make):
    gangs = [Gang() for _ in range(3)]
    starts = Starts(*gangs)
    engine = make(starts, failures=2)
    for number, gang in enumerate(gangs, start=1):
        gang.die()
        until(lambda n=number: engine.restarts == n or starts.lost, "the next gang")
    assert len(starts.lost) == 1


def test_none_in_place_when_so_configured(make):
    first = Gang(finished=5)
    starts = Starts(first)
    make(starts, failures=0)
    first.die()
    until(lambda: starts.lost, "it gives up")


@pytest.mark.parametrize("error", [CheckpointError("tensor x is missing"), KeyError("a bug")])
def test_what_no_further_start_can_mend_is_given_up_at_once(make, error):
    first = Gang()
    starts = Starts(first, error)
    make(starts)
    first.die()
    until(lambda: starts.lost, "it gives up")
    assert str(error) in starts.lost[0]


def test_a_stall_is_for_others_to_judge(make):
    first = Gang()
    engine = make(Starts(first))
    first.error = EngineStalledError("no step")
    with pytest.raises(EngineStalledError):
        engine.check_health()
    with pytest.raises(UnavailableError, match="no step"):
        engine.stream("a request")
    time.sleep(0.05)
    assert engine.restarts == 0


def test_shutdown_ends_a_gang_that_comes_up_afterwards(make):
    first, go, second = Gang(), threading.Event(), Gang()
    starts = Starts(first, go, second)
    engine = make(starts)
    first.die()
    until(lambda: not engine.running, "its death is noticed")
    engine.shutdown()
    go.set()
    until(lambda: second.ended, "the late gang is ended")
    assert starts.lost == []


def test_a_first_start_that_fails_is_the_callers():
    with pytest.raises(CheckpointError):
        RestartingEngine(
            Starts(CheckpointError("no")), deadline_s=1, failures_in_a_row=3, on_loss=print
        )


def test_soft_knobs_are_kept_for_the_next_gang_and_those_refused_are_not(make):
    first, second = Gang(), Gang()
    engine = make(Starts(first, second))
    engine.tune(Tuning(speculation=False))
    with pytest.raises(RequestError, match="max_running is 99"):
        engine.tune(Tuning(max_running=99))
    first.die()
    until(lambda: engine.restarts == 1, "the second gang")
    assert first.tunings == second.tunings == [Tuning(speculation=False)]
