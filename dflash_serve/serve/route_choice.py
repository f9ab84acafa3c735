"""Which replica a request goes to: data in, a choice out (no Ray).

A request goes to the replica that served its session last, else to the one that was sent the
longest beginning of it, unless that replica is overloaded; what is left goes to the less loaded of
two drawn at random. Every front end has a chooser of its own and learns from what it sends.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from dflash_serve.serve.route_prefix import BYTES_PER_TOKEN, Asked, PrefixIndex, SessionTable

__all__ = ["Choice", "Chooser", "LoadReport", "ReplicaView", "RouteRules"]

Reason = Literal["session", "prefix", "load", "turn"]

_AS_GOOD = 0.9
"""Replicas with this share of the longest overlap are as good as the one that has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouteRules:
    """How to choose; `RoutingSettings` describes the fields.

    Raises:
        TypeError: a field is missing.
    """

    policy: Literal["prefix", "two_choices", "round_robin"]
    overload_requests: float
    overload_factor: float
    kv_full: float
    min_overlap_bytes: int
    block_bytes: int
    request_blocks: int
    replica_blocks: int
    sessions: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica said of itself, a moment ago.

    Attributes:
        requests: submitted to its engine and not finished.
        tokens: of running requests, in cache pages, and of prompts without an answer yet.
        kv_tokens: tokens its cache pages hold.
        kv_use: share of the pages that requests hold, 0 to 1.
        starts: how often its ranks were started again; each start begins with an empty cache.
    """

    requests: int
    tokens: int
    kv_tokens: int
    kv_use: float
    starts: int

    @classmethod
    def read(cls, stats: Mapping[str, Any]) -> LoadReport | None:
        """The report in a replica's routing stats; None where there is none (yet)."""
        try:
            return cls(**stats)
        except TypeError:
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as a front end sees it now.

    Attributes:
        name: its id.
        ongoing: requests it holds by this front end's own count, the replica's count whenever it
            has answered; None when nothing is known.
        report: its last report.
        able: whether it may have room, as far as is known.
    """

    name: str
    ongoing: int | None = None
    report: LoadReport | None = None
    able: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Replicas to try, best first, and what decided about the first."""

    order: tuple[str, ...]
    reason: Reason


class Chooser:
    """Chooses replicas and remembers what it sent where.

    Args:
        rules: how to choose.
        rng: draws the two replicas that are compared.
    """

    def __init__(self, rules: RouteRules, rng: random.Random | None = None) -> None:
        self.rules = rules
        self.index = PrefixIndex(rules.replica_blocks)
        self.sessions = SessionTable(rules.sessions)
        self._rng = rng or random.Random()
        self._known: set[str] = set()
        self._starts: dict[str, int] = {}
        self._turn = -1

    def choose(self, asked: Asked, replicas: Sequence[ReplicaView]) -> Choice:
        """Where to send a request.

        Args:
            replicas: the candidates, at least one. Those that can take nothing are passed by
                while there are others.
        """
        pool = [view for view in replicas if view.able] or list(replicas)
        if self.rules.policy == "round_robin":
            return self._next_in_turn(pool)
        loads = relative_loads(pool)
        first = self._two_choices(pool, loads)
        reason: Reason = "load"
        if self.rules.policy == "prefix":
            self._note_reports(replicas)
            fit = self._fit(pool, loads)
            session = self._of_session(asked, fit)
            favourite = session or self._of_prefix(asked, fit, loads)
            if favourite is not None:
                first, reason = favourite, "session" if session else "prefix"
        rest = sorted((v.name for v in pool if v.name != first), key=loads.__getitem__)
        return Choice((first, *rest), reason)

    def sent(self, asked: Asked, replica: str) -> None:
        """Note that a replica took a request."""
        if self.rules.policy != "prefix":
            return
        self._known.add(replica)
        self.index.learn(replica, asked.blocks)
        if asked.session is not None:
            self.sessions.served(asked.session, replica)

    def retain(self, names: Collection[str]) -> None:
        """Forget every replica that is not among `names`."""
        for name in self._known.difference(names):
            self.forget(name)

    def forget(self, name: str) -> None:
        """Forget a replica that is gone."""
        self.index.forget(name)
        self.sessions.forget(name)
        self._starts.pop(name, None)
        self._known.discard(name)

    # -- internals --------------------------------------------------------------------------

    def _next_in_turn(self, pool: Sequence[ReplicaView]) -> Choice:
        self._turn += 1
        names = sorted(view.name for view in pool)
        turn = self._turn % len(names)
        return Choice((*names[turn:], *names[:turn]), "turn")

    def _note_reports(self, replicas: Sequence[ReplicaView]) -> None:
        for view in replicas:
            report = view.report
            if report is None:
                continue
            self._known.add(view.name)
            if self._starts.setdefault(view.name, report.starts) != report.starts:
                self.forget(view.name)
                self._known.add(view.name)
                self._starts[view.name] = report.starts
            if report.kv_tokens:
                cached = report.kv_tokens * BYTES_PER_TOKEN // self.rules.block_bytes
                self.index.limit(view.name, cached)

    def _two_choices(self, pool: Sequence[ReplicaView], loads: Mapping[str, float]) -> str:
        """The less loaded of two; about equally loaded, the one that was sent less to keep."""

        def worse(view: ReplicaView) -> tuple[bool, float, int]:
            load, kept = loads[view.name], 0
            if self.rules.policy == "prefix":  # new beginnings spread over the caches
                load, kept = round(load), self.index.size(view.name)
            return self._is_full(view), load, kept

        return min(self._rng.sample(pool, min(2, len(pool))), key=worse).name

    def _is_full(self, view: ReplicaView) -> bool:
        return view.report is not None and view.report.kv_use >= self.rules.kv_full

    def _fit(self, pool: Sequence[ReplicaView], loads: Mapping[str, float]) -> list[str]:
        """Replicas that are not overloaded by comparison with the others."""
        limit = min(loads.values()) * self.rules.overload_factor + self.rules.overload_requests
        some_are_not_full = not all(map(self._is_full, pool))
        return [
            view.name
            for view in pool
            if loads[view.name] <= limit and not (some_are_not_full and self._is_full(view))
        ]

    def _of_session(self, asked: Asked, fit: Sequence[str]) -> str | None:
        if asked.session is None:
            return None
        name = self.sessions.replica(asked.session)
        return name if name in fit else None

    def _of_prefix(
        self, asked: Asked, fit: Sequence[str], loads: Mapping[str, float]
    ) -> str | None:
        """The replica with the longest overlap; of several as good, the least loaded."""
        overlaps = {name: self.index.overlap(name, asked.blocks) for name in fit}
        longest = max(overlaps.values(), default=0)
        if longest == 0 or longest * self.rules.block_bytes < self.rules.min_overlap_bytes:
            return None
        good = [name for name, blocks in overlaps.items() if blocks >= _AS_GOOD * longest]
        return min(good, key=lambda name: (loads[name], self._rng.random()))


def relative_loads(pool: Sequence[ReplicaView]) -> dict[str, float]:
    """Load of each replica, counted in requests of the usual size.

    Tokens as last reported, over the mean of a request; corrected by the requests that came and
    went since, which the front end knows of at once. Requests alone where nothing is reported.
    """
    reports = [view.report for view in pool if view.report is not None]
    requests = sum(report.requests for report in reports)
    tokens = sum(report.tokens for report in reports)
    usual = tokens / requests if requests else 0.0
    return {view.name: _load(view, usual) for view in pool}


def _load(view: ReplicaView, usual: float) -> float:
    report = view.report
    if report is None:
        return float(view.ongoing or 0)
    ongoing = report.requests if view.ongoing is None else view.ongoing
    reported = report.tokens / usual if usual else float(report.requests)
    return max(0.0, reported + ongoing - report.requests)
