"""One round: load, fault, recovery, rest, and what is to be said of it."""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .clients import Answer, Load, Record
from .cluster import Cluster, until
from .faults import Fault, Stage, Strike
from .leftovers import Snapshot, differences, take, vitals

__all__ = ["Plan", "Round", "run_round"]

FREED_S = 2.0
SERVED_S = 10.0
_BEGUN_TIMEOUT_S = 60.0
_WHOLE_TIMEOUT_S = 180.0
_AFTER_S = 1.0
_GCS_GROWTH_MIB = 64
_SETTLE_S = 10.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all rounds share.

    Attributes:
        bodies: what the clients ask.
        expected: what they get when nothing happens.
        clients: how many at a time.
        say: shows what is going on.
    """

    bodies: Sequence[dict[str, Any]]
    expected: Sequence[Answer]
    clients: int
    say: Callable[[str], None]


@dataclasses.dataclass
class Round:
    """The figures of one round; seconds from the fault on.

    Attributes:
        ends: requests by how they ended for their client.
        accepted: requests that got a status line.
        resumed: times a request went on after its engine had failed, by the ingress's count.
        hit: streams under way at the fault.
        pauses_s: longest times without an event of the streams that were resumed, or of all that
            were under way where none was.
        differ: finished requests whose text or ids are not those of the undisturbed run.
        whole_s: until every process and every replica was back.
        freed_s: until no page was held and no request was left in a replica.
        served_s: until a new request was answered.
        restarts: gangs that had been started again, over all replicas, after the round.
        left: leftovers that did not go within ten seconds.
        broken: promises that were not kept.
        details: ends that were not wanted, and where texts differ.
        answered_meanwhile: new requests answered while a part was away that serving must do
            without.
        gcs_grown_mib: memory that the head's GCS has gained, where the fault looks at it.
        machine_load: the one-minute load average.
    """

    fault: str
    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    accepted: int = 0
    resumed: int = 0
    hit: int = 0
    pauses_s: list[float] = dataclasses.field(default_factory=list)
    differ: int = 0
    whole_s: float | None = None
    freed_s: float | None = None
    served_s: float | None = None
    restarts: int = 0
    left: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    details: list[str] = dataclasses.field(default_factory=list)
    vitals: dict[str, Any] = dataclasses.field(default_factory=dict)
    answered_meanwhile: int | None = None
    gcs_grown_mib: int | None = None
    machine_load: float = 0.0


def run_round(cluster: Cluster, fault: Fault, plan: Plan, rng: random.Random) -> Round:
    """Put a fault in under load and watch what comes of it.

    Raises:
        TimeoutError: the load did not begin: what went wrong lies before this round.
    """
    result = Round(fault.name)
    plan.say("rest")
    before, resumed, restarts = take(cluster), cluster.resumed(), _restarts(cluster)
    load = Load(cluster.url, plan.bodies, plan.clients)
    try:
        plan.say("load")
        until(lambda: len(load.running()) == plan.clients, "all streams run", _BEGUN_TIMEOUT_S)
        time.sleep(rng.uniform(0.0, 1.5))
        plan.say("fault")
        strike = _strike(fault, Stage(cluster, load, rng), result)
        plan.say("recovery")
        _await_whole(cluster, strike, result)
        time.sleep(_AFTER_S)
    finally:
        plan.say("the last requests")
        load.release()
        records = load.finish()
    _judge_requests(result, records, strike, plan.expected)
    # A new ingress counts from zero.
    result.resumed = cluster.resumed() - (0 if fault.new_ingress else resumed)
    result.pauses_s = sorted(result.pauses_s, reverse=True)[: result.resumed or None]
    result.restarts = _restarts(cluster) - restarts
    plan.say("leftovers")
    result.left = _leftovers(cluster, before)
    result.vitals = vitals(cluster)
    result.machine_load = os.getloadavg()[0]
    result.broken = _broken(fault, result)
    return result


def _strike(fault: Fault, stage: Stage, result: Round) -> Strike:
    """Put the fault in; where streams end with it, time the way back before new ones begin."""
    if fault.promise == "front":
        stage.load.hold()
    strike = fault.strike(stage)
    if fault.promise in ("front", "leave"):
        with ThreadPoolExecutor() as pool:  # at the same time: neither waits for the other
            served = pool.submit(_time, strike, stage.serves, "an answer")
            result.freed_s = _time(strike, lambda: _idle(stage.cluster), "no page is held")
            result.served_s = served.result()
        stage.load.release()
    return strike


def _await_whole(cluster: Cluster, strike: Strike, result: Round) -> None:
    from dflash_serve.serve.processes import is_running

    def whole() -> bool:
        return not any(is_running(pid) for pid in strike.doomed) and cluster.missing() is None

    result.whole_s = _time(strike, whole, "the deployment is whole", _WHOLE_TIMEOUT_S)
    if result.whole_s is None:
        alive = [pid for pid in strike.doomed if is_running(pid)]
        result.details.append(f"not whole: {cluster.missing()}; still alive: {alive}")


def _time(
    strike: Strike, condition: Callable[[], bool], what: str, timeout_s: float = 60.0
) -> float | None:
    try:
        until(condition, what, timeout_s)
    except TimeoutError:
        return None
    return time.monotonic() - strike.at


def _idle(cluster: Cluster) -> bool:
    statuses = cluster.statuses()
    return len(statuses) == cluster.replicas and not any(
        s.outstanding or s.stats.running or s.stats.waiting or s.stats.pages_used for s in statuses
    )


def _restarts(cluster: Cluster) -> int:
    return sum(s.restarts for s in cluster.statuses())


def _judge_requests(
    result: Round, records: Sequence[Record], strike: Strike, expected: Sequence[Answer]
) -> None:
    result.ends = dict(Counter(str(r.end) for r in records))
    result.accepted = sum(r.accepted is not None for r in records)
    hit = [r for r in records if r.running_at(strike.at)]
    result.hit = len(hit)
    result.pauses_s = [r.pause_after(strike.at) for r in hit if r.end == "finished"]
    result.answered_meanwhile = strike.answered
    result.gcs_grown_mib = strike.grown_mib
    for record in records:
        if record.end in ("cut", "failed", "refused"):
            result.details.append(f"{record.end}: {record.detail}")
        elif record.end == "finished" and record.answer != expected[record.body]:
            result.differ += 1
            result.details.append(_difference(record, expected[record.body]))


def _difference(record: Record, expected: Answer) -> str:
    assert record.answer is not None
    pairs = enumerate(zip(record.answer.ids, expected.ids, strict=False))
    first = next((n for n, (a, b) in pairs if a != b), None)
    return (
        f"body {record.body}: {len(record.answer.ids)} ids instead of {len(expected.ids)}, "
        f"the first other one at {first}; ended by {record.answer.finish_reason} instead of "
        f"{expected.finish_reason}"
    )


def _leftovers(cluster: Cluster, before: Snapshot) -> list[str]:
    left: list[str] = []

    def clean() -> bool:
        left[:] = differences(before, take(cluster))
        return not left

    try:
        until(clean, "nothing is left", _SETTLE_S, poll_s=0.2)
    except TimeoutError:
        return left
    return []


def _broken(fault: Fault, result: Round) -> list[str]:
    """The promises of `fault` that this round did not keep."""
    ends = result.ends
    lost = {name: ends[name] for name in ("cut", "failed", "refused") if ends.get(name)}
    found = [f"left over: {text}" for text in result.left]
    if result.differ:
        found.append(f"{result.differ} answers differ")
    if result.whole_s is None:
        found.append(f"not whole within {_WHOLE_TIMEOUT_S:.0f} s")
    if fault.promise != "front" and lost:
        found.append(f"lost requests: {lost}")
    if fault.promise in ("front", "leave"):
        found += _late("pages held", result.freed_s, FREED_S)
        found += _late("no answer", result.served_s, SERVED_S)
    if fault.promise == "quiet" and (result.resumed or result.restarts):
        found.append(f"{result.restarts} restarts, {result.resumed} resumed without a fault")
    if (result.gcs_grown_mib or 0) > _GCS_GROWTH_MIB:
        found.append(f"the GCS has grown by {result.gcs_grown_mib} MiB")
    if result.answered_meanwhile == 0:
        found.append("no new request was answered while the fault lasted")
    if fault.pause_s is not None and result.pauses_s:
        found += _late("median pause", statistics.median(result.pauses_s), fault.pause_s)
    return found


def _late(what: str, seconds: float | None, limit_s: float) -> list[str]:
    if seconds is None:
        return [f"{what}: for ever (limit {limit_s:g} s)"]
    return [f"{what}: {seconds:.1f} s (limit {limit_s:g} s)"] if seconds > limit_s else []
