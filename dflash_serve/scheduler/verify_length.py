"""Rank 0's choice of g, the rows drafted and verified per step (no torch).

A wide block brings more tokens and costs more time, and both depend on what is running: the
policy takes the g with the most tokens/s, batch · tokens per step / cost of the step. g = 1 is
speculation off. What is not run is not measured, so a neighbour is tried now and then.
Every decision follows from counters and past steps alone, never from a clock or from chance.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from dflash_serve.scheduler.acceptance import Acceptance

__all__ = [
    "CostTable",
    "Decision",
    "PolicyStats",
    "Reason",
    "VerifyLengthPolicy",
    "verify_ladder",
]

_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16)

Reason = Literal["first", "hold", "keep", "switch", "explore"]
"""Why a step has its g: the first choice; between two looks at it; looked at and not beaten by
enough; a better one was found; another one is measured for a few steps."""


def verify_ladder(block: int) -> tuple[int, ...]:
    """Values of g for a draft with a block of `block` rows, ascending; the block is the last."""
    if block < 1:
        raise ValueError(f"block is {block}; it must be at least 1")
    return (*(rung for rung in _RUNGS if rung < block), block)


class CostTable:
    """Seconds of a decode step by batch bucket and g.

    Timings carry noise, while a step with more requests or more rows is never cheaper: each
    entry is raised to the largest of those with no more of either.

    Args:
        seconds: of a step, for every pair of (batch bucket, g).
        context: tokens per request that the entries were timed at.
        context_seconds: what one more token of context per request adds, per request: the time
            to read its keys and values. 0 leaves the entries as they are.

    Raises:
        ValueError: no entry, a pair missing, or a time that is not positive.
    """

    def __init__(
        self,
        seconds: Mapping[tuple[int, int], float],
        *,
        context: float = 0.0,
        context_seconds: float = 0.0,
    ) -> None:
        self.buckets = tuple(sorted({batch for batch, _ in seconds}))
        self.ladder = tuple(sorted({rows for _, rows in seconds}))
        self._context = context
        self._context_seconds = context_seconds
        pairs = [(batch, rows) for batch in self.buckets for rows in self.ladder]
        missing = [pair for pair in pairs if pair not in seconds]
        if missing or not pairs:
            raise ValueError(f"cost table lacks the (batch, rows) pairs {missing or 'all'}")
        if not min(seconds.values()) > 0:
            raise ValueError(f"cost table holds {min(seconds.values())} s; it must be positive")
        self._seconds = _monotone(seconds, self.buckets, self.ladder)

    @classmethod
    def from_function(
        cls, buckets: Sequence[int], ladder: Sequence[int], seconds: Callable[[int, int], float]
    ) -> CostTable:
        """A table of `seconds(batch, rows)` over every pair."""
        return cls({(batch, rows): seconds(batch, rows) for batch in buckets for rows in ladder})

    def bucket(self, batch: int) -> int:
        """Index of the smallest bucket that holds `batch` requests.

        Raises:
            ValueError: fewer than one request, or more than the largest bucket.
        """
        if not 1 <= batch <= self.buckets[-1]:
            raise ValueError(f"batch is {batch}; the cost table covers 1 to {self.buckets[-1]}")
        return bisect_left(self.buckets, batch)

    def cost(self, batch: int, rows: int, context: float = 0.0) -> float:
        """Seconds of a step with `batch` requests of `context` tokens each on average.

        Contexts shorter than the timed one count as that one.
        """
        seconds = self._seconds[self.buckets[self.bucket(batch)], rows]
        return seconds + self._context_seconds * batch * max(context - self._context, 0.0)


def _monotone(
    seconds: Mapping[tuple[int, int], float], buckets: Sequence[int], ladder: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Running maximum along both axes."""
    raised: dict[tuple[int, int], float] = {}
    for i, batch in enumerate(buckets):
        for j, rows in enumerate(ladder):
            before = [raised[buckets[i - 1], rows]] if i else []
            before += [raised[batch, ladder[j - 1]]] if j else []
            raised[batch, rows] = max(seconds[batch, rows], *before, 0.0)
    return raised


@dataclasses.dataclass(frozen=True)
class Decision:
    """g of one step.

    Attributes:
        rows: g; 1 drafts nothing.
        predicted: tokens/s expected of such steps.
    """

    rows: int
    predicted: float
    reason: Reason


class PolicyStats(msgspec.Struct, kw_only=True):
    """The policy as of its last look at the choice, for the metrics.

    Attributes:
        rows: g that is held; an exploration leaves it alone.
        batch: requests that it was looked at for.
        mean_context: their tokens, on average.
        tokens_per_second: predicted, by g.
        tokens_per_step: predicted for one request, bonus token included, by g.
        switches: changes of the g that is held.
        explorations: times that another g was measured, of a few steps each.
    """

    rows: int
    batch: int = 0
    mean_context: float = 0.0
    tokens_per_second: dict[int, float] = {}
    tokens_per_step: dict[int, float] = {}
    switches: int = 0
    explorations: int = 0


class VerifyLengthPolicy:
    """Picks g for each decode step; `decide` before the step, `observe` after it.

    The two need not alternate: with one step in flight, `observe` may come one `decide` late.

    Args:
        costs: its ladder is the choice of g.
        acceptance: over the same ladder; a fresh one if left out.
        margin: predicted gain that a change must bring.
        hold: steps between two looks at the choice; one comes earlier when the batch has moved
            by more than a bucket.
        explore_every: least steps between two explorations.
        explore_cost: share of the predicted tokens/s that explorations may cost; one that costs
            more waits longer.
        explore_steps: most steps of an exploration.
        explore_blocks: blocks after which an exploration has seen enough.

    Raises:
        ValueError: an acceptance over another ladder than the costs'.
    """

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance | None = None,
        *,
        margin: float = 0.03,
        hold: int = 16,
        explore_every: int = 64,
        explore_cost: float = 0.005,
        explore_steps: int = 8,
        explore_blocks: int = 32,
    ) -> None:
        self.costs = costs
        self.acceptance = acceptance or Acceptance(costs.ladder)
        if self.acceptance.ladder != costs.ladder:
            raise ValueError(
                f"acceptance is over {self.acceptance.ladder}, the costs over {costs.ladder}"
            )
        self._margin = margin
        self._hold = hold
        self._explore_every = explore_every
        self._explore_cost = explore_cost
        self._explore_steps = explore_steps
        self._explore_blocks = explore_blocks
        self._step = 0
        self._judged_at = 0
        self._judged_bucket: int | None = None
        self._trial = 0  # the g explored, while steps of it are left
        self._trial_left = 0
        self._next_trial = explore_every
        self._used_at = dict.fromkeys(costs.ladder, -explore_every)
        self._stats = PolicyStats(rows=costs.ladder[-1])

    def decide(self, batch: int, mean_context: float = 0.0) -> Decision:
        """Choose g for a step.

        Args:
            batch: requests in the step, at least one.
            mean_context: their committed tokens on average.

        Raises:
            ValueError: a batch that the cost table does not cover.
        """
        reason = self._choose(batch, mean_context)
        rows = self._stats.rows
        if reason != "switch" and self._exploring(batch, mean_context):
            rows, reason = self._trial, "explore"
        self._used_at[rows] = self._step
        self._step += 1
        return Decision(rows, self._rate(batch, rows, mean_context), reason)

    def observe(self, rows: int, accepted: Sequence[int]) -> None:
        """Take in a step: its g, and per request the draft tokens accepted; also at g = 1."""
        self.acceptance.observe(rows, accepted)

    def stats(self) -> PolicyStats:
        """The last look at the choice and the counts so far."""
        return msgspec.structs.replace(self._stats)

    def _choose(self, batch: int, context: float) -> Reason:
        """Look at the g that is held, once its time is over."""
        bucket = self.costs.bucket(batch)
        first = self._judged_bucket is None
        moved = self._judged_bucket is not None and abs(bucket - self._judged_bucket) > 1
        if not (first or moved or self._step - self._judged_at >= self._hold):
            return "hold"
        self._judged_at, self._judged_bucket = self._step, bucket
        self._judge(batch, context)
        rates = self._stats.tokens_per_second
        best = max(rates, key=lambda rows: (rates[rows], -rows))
        if first:
            self._stats.rows = best
            return "first"
        if rates[best] <= (1 + self._margin) * rates[self._stats.rows]:
            return "keep"
        self._stats.rows = best
        self._stats.switches += 1
        self._trial_left = 0  # the trial was of a neighbour of the choice before
        return "switch"

    def _judge(self, batch: int, context: float) -> None:
        """Predict every g anew."""
        stats, ladder = self._stats, self.costs.ladder
        stats.batch, stats.mean_context = batch, context
        stats.tokens_per_step = {rows: self.acceptance.tokens_per_step(rows) for rows in ladder}
        stats.tokens_per_second = {rows: self._rate(batch, rows, context) for rows in ladder}

    def _rate(self, batch: int, rows: int, context: float) -> float:
        """Tokens/s of all requests, by the last judgement of the tokens per step."""
        tokens = batch * self._stats.tokens_per_step[rows]
        return tokens / self.costs.cost(batch, rows, context)

    def _exploring(self, batch: int, context: float) -> bool:
        """Whether this step measures another g, `_trial`, in place of the one held."""
        if self._trial_left == 0 and self._step >= self._next_trial:
            self._next_trial = self._step + self._explore_every
            trial = self._candidate(batch, context)
            if trial is not None:
                self._explore(trial, batch, context)
        if self._trial_left == 0:
            return False
        self._trial_left -= 1
        return True

    def _explore(self, trial: int, batch: int, context: float) -> None:
        """Begin an exploration, and put the next one off until this one has paid for itself."""
        steps = min(-(-self._explore_blocks // batch), self._explore_steps)
        held = self._rate(batch, self._stats.rows, context)
        loss = max(0.0, 1 - self._rate(batch, trial, context) / held)
        pause = math.ceil(steps * loss / self._explore_cost)
        self._next_trial = self._step + max(self._explore_every, pause)
        self._trial, self._trial_left = trial, steps
        self._stats.explorations += 1

    def _candidate(self, batch: int, context: float) -> int | None:
        """The g to measure next, if any.

        On either side of the one held it is the nearest that would win if everything were
        accepted, and that did not run lately; of the two, the one that ran longer ago.
        """
        ladder, held = self.costs.ladder, self._stats.rows
        rate = self._rate(batch, held, context)
        at = ladder.index(held)
        nearest: list[int] = []
        for side in (ladder[at + 1 :], ladder[:at][::-1]):
            hopeful = (
                rows
                for rows in side
                if rows > 1 and batch * rows / self.costs.cost(batch, rows, context) > rate
            )
            nearest += itertools.islice(hopeful, 1)
        lately = self._step - self._explore_every // 2
        waiting = [rows for rows in nearest if self._used_at[rows] <= lately]
        return min(waiting, key=lambda rows: (self._used_at[rows], -rows), default=None)
