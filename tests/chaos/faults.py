"""The faults, and what is promised of each."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Literal

from .clients import Load
from .cluster import HANG_TIMEOUT_S, TP, Cluster, until
from .rank import order

__all__ = ["FAULTS", "Fault", "Stage", "Strike"]

RESTART_PAUSE_S = 10.0
_HANG_PAUSE_S = HANG_TIMEOUT_S + 10.0
_QUIET_S = 15.0
_LEAVE_WITHIN_S = 1.5
_BETWEEN_S = 1.0

Promise = Literal["engine", "front", "leave", "quiet"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a fault may act on."""

    cluster: Cluster
    load: Load
    rng: random.Random


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault that has been put in.

    Attributes:
        at: when, in `time.monotonic`.
        doomed: processes that must be gone before the deployment counts as whole again.
    """

    at: float
    doomed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of the suite.

    Attributes:
        name: for the command line.
        what: for the table.
        promise: "engine": no accepted request is lost or differs; "front": streams are cut, their
            pages and the service come back soon; "leave": clients go, their pages come back;
            "quiet": nothing happens at all.
        strike: puts it in.
        replicas: how many there are.
        pause_s: most seconds, in the median, until a stream that was hit goes on.
    """

    name: str
    what: str
    promise: Promise
    strike: Callable[[Stage], Strike]
    replicas: int = 2
    pause_s: float | None = None


def _kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> Strike:
    now = time.monotonic()
    for pid in pids:
        os.kill(pid, number)
    return Strike(now, tuple(pids))


def _ranks(stage: Stage) -> list[int]:
    """Processes of the ranks of the replica with most work."""
    return [rank["pid"] for rank in stage.cluster.busiest().config["ranks"]]


def _signal_rank(rank: int, number: signal.Signals) -> Callable[[Stage], Strike]:
    def strike(stage: Stage) -> Strike:
        ranks = _ranks(stage)
        hit = _kill([ranks[rank]], number)
        return Strike(hit.at, tuple(ranks))  # the others end with it

    return strike


def _kill_gang(stage: Stage) -> Strike:
    return _kill(_ranks(stage))


def _kill_successor(stage: Stage) -> Strike:
    """A rank, and one of those that are started in place of its gang, while it loads."""
    old = _ranks(stage)
    before = {p.pid for p in stage.cluster.processes("rank")}
    first = _kill([stage.rng.choice(old)])

    def started() -> list[int]:
        return [p.pid for p in stage.cluster.processes("rank") if p.pid not in before]

    new = until(lambda: pids if len(pids := started()) == TP else None, "new ranks", 60.0)
    time.sleep(stage.rng.uniform(0.0, 2.0))
    victim = stage.rng.choice(new)
    _kill([victim])
    return Strike(first.at, (*old, victim))


def _kill_replica(stage: Stage) -> Strike:
    status = stage.cluster.busiest()
    ranks = [rank["pid"] for rank in status.config["ranks"]]
    hit = _kill([status.config["pid"]])
    return Strike(hit.at, (*hit.doomed, *ranks))


def _kill_one(kind: str) -> Callable[[Stage], Strike]:
    return lambda stage: _kill([stage.cluster.one(kind)])


def _misbehave(how: str) -> Callable[[Stage], Strike]:
    def strike(stage: Stage) -> Strike:
        ranks = _ranks(stage)
        now = time.monotonic()
        order(how, stage.rng.choice(ranks))
        return Strike(now, tuple(ranks))

    return strike


def _leave(stage: Stage) -> Strike:
    """Half of the clients while the others go on, then all."""
    running = stage.load.running()
    stage.rng.shuffle(running)
    stage.load.leave(running[: len(running) // 2], _LEAVE_WITHIN_S, stage.rng)
    time.sleep(_BETWEEN_S)
    stage.load.hold()
    stage.load.leave(stage.load.running(), _LEAVE_WITHIN_S, stage.rng)
    return Strike(time.monotonic())


def _nothing(_stage: Stage) -> Strike:
    now = time.monotonic()
    time.sleep(_QUIET_S)
    return Strike(now)


def _engine(
    name: str,
    what: str,
    strike: Callable[[Stage], Strike],
    pause_s: float | None = RESTART_PAUSE_S,
    replicas: int = 2,
) -> Fault:
    return Fault(name, what, "engine", strike, replicas, pause_s)


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP

FAULTS = (
    Fault("quiet", "nothing, hang timeout 3 s", "quiet", _nothing, replicas=1),
    _engine("rank0", "kill rank 0, no other replica", _signal_rank(0, _KILL), replicas=1),
    _engine("rank1", "kill rank 1, no other replica", _signal_rank(1, _KILL), replicas=1),
    _engine("stop0", "stop rank 0", _signal_rank(0, _STOP), _HANG_PAUSE_S, replicas=1),
    _engine("stop1", "stop rank 1", _signal_rank(1, _STOP), _HANG_PAUSE_S, replicas=1),
    _engine("again", "kill a rank, then a new one as it loads", _kill_successor, None, replicas=1),
    _engine("raise", "a rank raises in a step", _misbehave("raise"), replicas=1),
    _engine("lie", "a rank commits another token", _misbehave("lie"), replicas=1),
    _engine("lone", "kill the only replica", _kill_replica, None, replicas=1),
    Fault("leave", "clients disconnect at random", "leave", _leave, replicas=1),
    _engine("gang", "kill all ranks, 1 replica of 2", _kill_gang),
    _engine("stop", "stop rank 0, 1 replica of 2", _signal_rank(0, _STOP), _HANG_PAUSE_S),
    _engine("replica", "kill the replica, 1 of 2", _kill_replica),
    _engine("controller", "kill the Serve controller", _kill_one("controller")),
    Fault("ingress", "kill the ingress", "front", _kill_one("ingress")),
    Fault("proxy", "kill the HTTP proxy", "front", _kill_one("proxy")),
)
