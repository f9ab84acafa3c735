"""The faults, and what is promised of each."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Literal

import httpx

from dflash_serve.serve.processes import is_running

from .clients import Load
from .cluster import HANG_TIMEOUT_S, MODEL, TP, Cluster, until
from .rank import order
from .redis import gcs_mib, gcs_pid, kill_gcs, restart_redis, return_gcs

__all__ = ["FAULTS", "Fault", "Stage", "Strike"]

RESTART_PAUSE_S = 10.0
_HANG_PAUSE_S = HANG_TIMEOUT_S + 10.0
_QUIET_S = 15.0
_LEAVE_WITHIN_S = 1.5
_BETWEEN_S = 1.0
_GCS_AWAY_S = (2.0, 6.0)
"""Least and most seconds until the head's supervisor has started another GCS."""
_GCS_ANSWER_S = 10.0
_SCALE_TIMEOUT_S = 120.0
_REDIS_RESTARTS = 3
_REDIS_AWAY_S = (0.5, 2.0)
_REDIS_REST_S = 5.0

Promise = Literal["engine", "front", "leave", "quiet"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a fault may act on."""

    cluster: Cluster
    load: Load
    rng: random.Random

    def serves(self) -> bool:
        """Whether a new request, a short one, is answered."""
        body = {"model": MODEL, "prompt": [self.rng.randrange(2, 200)], "max_tokens": 2}
        url = f"{self.cluster.url}/v1/completions"
        try:
            answer = httpx.post(url, json=body, timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


@dataclasses.dataclass(frozen=True)
class Strike:
    """A fault that has been put in.

    Attributes:
        at: when, in `time.monotonic`.
        doomed: processes that must be gone before the deployment counts as whole again.
        answered: new requests answered while a part was away that serving must do without.
        grown_mib: what the GCS has grown by, where a fault looks at it.
    """

    at: float
    doomed: tuple[int, ...] = ()
    answered: int | None = None
    grown_mib: int | None = None


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
        often: whether it is one of the deaths and hangs of ranks and replicas that are repeated
            most.
        redis: whether the head's state must be in Redis.
        new_ingress: whether another ingress takes the place of the one there was.
    """

    name: str
    what: str
    promise: Promise
    strike: Callable[[Stage], Strike]
    replicas: int = 2
    pause_s: float | None = None
    often: bool = False
    redis: bool = False
    new_ingress: bool = False


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


def _kill_controller_and_replica(stage: Stage) -> Strike:
    """In the same moment: whoever recovers must find what nobody alive lists."""
    controller = stage.cluster.one("controller")
    hit = _kill_replica(stage)
    also = _kill([controller])
    return Strike(hit.at, (*hit.doomed, *also.doomed))


def _kill_one(kind: str) -> Callable[[Stage], Strike]:
    return lambda stage: _kill([stage.cluster.one(kind)])


def _lose_gcs(stage: Stage) -> Strike:
    """The head's GCS, and back some seconds later."""
    now = time.monotonic()
    pid = kill_gcs()
    deadline = now + stage.rng.uniform(*_GCS_AWAY_S)
    answered = 0
    while answered == 0 or time.monotonic() < deadline:
        if time.monotonic() > deadline + _GCS_ANSWER_S:
            break
        answered += stage.serves()
        time.sleep(0.1)
    return_gcs()
    return Strike(now, (pid,), answered)


def _lose_gcs_then_replica(stage: Stage) -> Strike:
    """A replica dies as soon as the GCS is back: Ray must still know how to start another."""
    first = _lose_gcs(stage)
    then = _kill_replica(stage)
    return Strike(then.at, (*first.doomed, *then.doomed), first.answered)


def _restart_redis(stage: Stage) -> Strike:
    """The Redis that holds the head's state, several times; a GCS that ends with it returns."""
    now, before, pid = time.monotonic(), gcs_mib(), gcs_pid()
    answered = 0
    for _ in range(_REDIS_RESTARTS):
        restart_redis(stage.rng.uniform(*_REDIS_AWAY_S))
        time.sleep(_REDIS_REST_S)
        answered += stage.serves()
        if not is_running(gcs_pid()):
            return_gcs()
    gone = () if gcs_pid() == pid else (pid,)
    return Strike(now, gone, answered, gcs_mib() - before)


def _roll_out(stage: Stage) -> Strike:
    """A changed engine setting: another version of the ingress and of every replica."""
    old = stage.cluster.processes("rank", "replica", "ingress")
    now = time.monotonic()
    stage.cluster.change()
    return Strike(now, tuple(process.pid for process in old))


def _scale(stage: Stage) -> Strike:
    """To three replicas and, when all serve, back to one."""
    now = time.monotonic()
    stage.cluster.scale(3)
    until(lambda: stage.cluster.missing() is None, "three replicas", _SCALE_TIMEOUT_S)
    time.sleep(_BETWEEN_S)
    stage.cluster.scale(1)
    return Strike(now)


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
    *,
    often: bool = False,
    redis: bool = False,
) -> Fault:
    return Fault(name, what, "engine", strike, replicas, pause_s, often, redis)


def _one(name: str, what: str, rank: int, number: signal.Signals) -> Fault:
    """A rank's death or hang where no other replica can take over."""
    pause_s = _HANG_PAUSE_S if number == _STOP else RESTART_PAUSE_S
    return _engine(name, what, _signal_rank(rank, number), pause_s, replicas=1, often=True)


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP

FAULTS = (
    Fault("quiet", "nothing, hang timeout 3 s", "quiet", _nothing, replicas=1),
    _one("rank0", "kill rank 0, no other replica", 0, _KILL),
    _one("rank1", "kill rank 1, no other replica", 1, _KILL),
    _one("stop0", "stop rank 0", 0, _STOP),
    _one("stop1", "stop rank 1", 1, _STOP),
    _engine("again", "kill a rank, then a new one as it loads", _kill_successor, None, replicas=1),
    _engine("raise", "a rank raises in a step", _misbehave("raise"), replicas=1),
    _engine("lie", "a rank commits another token", _misbehave("lie"), replicas=1),
    _engine("lone", "kill the only replica", _kill_replica, None, replicas=1),
    Fault("leave", "clients disconnect at random", "leave", _leave, replicas=1),
    _engine("gang", "kill all ranks, 1 replica of 2", _kill_gang),
    _engine("stop", "stop rank 0, 1 replica of 2", _signal_rank(0, _STOP), _HANG_PAUSE_S),
    _engine("replica", "kill the replica, 1 of 2", _kill_replica, often=True),
    _engine("controller", "kill the Serve controller", _kill_one("controller")),
    _engine("both", "kill controller and replica at once", _kill_controller_and_replica, None),
    _engine("gcs", "kill the head's GCS, state in Redis", _lose_gcs, redis=True),
    _engine("gcsback", "kill a replica as the GCS is back", _lose_gcs_then_replica, redis=True),
    _engine("redis", "restart Redis, 3 times", _restart_redis, None, redis=True),
    Fault("rollout", "roll out a changed setting", "engine", _roll_out, new_ingress=True),
    _engine("scale", "scale 1, 3, 1", _scale, None, replicas=1),
    Fault("ingress", "kill the ingress", "front", _kill_one("ingress"), new_ingress=True),
    Fault("proxy", "kill the HTTP proxy", "front", _kill_one("proxy")),
)
