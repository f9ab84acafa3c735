"""Rank 0's choice of g, the rows drafted and verified per step (no torch).

A wide block brings more tokens and costs more time, and both depend on what is running: the
policy takes the g with the most tokens/s, batch · tokens per step / cost of the step. g = 1 is
speculation off. What is not run is not measured, so a neighbour is tried now and then.
Every decision follows from counters and past steps alone, never from a clock or from chance.
"""

from __future__ import annotations

import dataclasses
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
"""Why a step has its g: no choice before it; too soon after a change to change again; still the
best, or not beaten by enough; a better one was found; another one is measured for a few steps."""


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
    """The policy as of its last decision, for the metrics.

    Attributes:
        rows: g that is held; an exploration leaves it alone.
        batch: requests that were decided for.
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
        hold: steps that a choice is kept at least. A batch that moved by more than one bucket
            may end it.
        explore_every: steps between two explorations.
        explore_steps: most steps of an exploration.
        explore_blocks: blocks after which an exploration has seen enough.
    """

    def __init__(
        self,
        costs: CostTable,
        acceptance: Acceptance | None = None,
        *,
        margin: float = 0.03,
        hold: int = 16,
        explore_every: int = 256,
        explore_steps: int = 8,
        explore_blocks: int = 32,
    ) -> None:
        self.costs = costs
        self.acceptance = acceptance or Acceptance(costs.ladder)
        self._margin = margin
        self._hold = hold
        self._explore_every = explore_every
        self._explore_steps = explore_steps
        self._explore_blocks = explore_blocks
        self._step = 0
        self._chosen_at = 0
        self._chosen_bucket: int | None = None
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
        """
        ladder = self.costs.ladder
        tokens = {rows: self.acceptance.tokens_per_step(rows) for rows in ladder}
        rates = {
            rows: batch * tokens[rows] / self.costs.cost(batch, rows, mean_context)
            for rows in ladder
        }
        reason = self._choose(self.costs.bucket(batch), rates)
        rows = self._stats.rows
        if reason != "switch" and self._exploring(batch, mean_context, rates[rows]):
            rows, reason = self._trial, "explore"
        self._stats.batch, self._stats.mean_context = batch, mean_context
        self._stats.tokens_per_step, self._stats.tokens_per_second = tokens, rates
        self._used_at[rows] = self._step
        self._step += 1
        return Decision(rows, rates[rows], reason)

    def observe(self, rows: int, accepted: Sequence[int]) -> None:
        """Take in a step's outcome: its g, and per request the draft tokens accepted."""
        self.acceptance.observe(rows, accepted)

    def stats(self) -> PolicyStats:
        """The last decision and the counts so far."""
        return msgspec.structs.replace(self._stats)

    def _choose(self, bucket: int, rates: Mapping[int, float]) -> Reason:
        """Update the g that is held."""
        best = max(rates, key=lambda rows: (rates[rows], -rows))
        if self._chosen_bucket is None:
            self._take(best, bucket)
            return "first"
        moved = abs(bucket - self._chosen_bucket) > 1
        if self._step - self._chosen_at < self._hold and not moved:
            return "hold"
        if rates[best] > (1 + self._margin) * rates[self._stats.rows]:
            self._take(best, bucket)
            self._stats.switches += 1
            return "switch"
        self._chosen_bucket = bucket
        return "keep"

    def _take(self, rows: int, bucket: int) -> None:
        self._stats.rows = rows
        self._chosen_at = self._step
        self._chosen_bucket = bucket
        self._trial_left = 0  # a neighbour of the old choice

    def _exploring(self, batch: int, context: float, rate: float) -> bool:
        """Whether this step measures another g, `_trial`, in place of the one held."""
        if self._trial_left == 0 and self._step >= self._next_trial:
            self._next_trial = self._step + self._explore_every
            candidates = self._candidates(batch, context, rate)
            if candidates:
                self._trial = min(candidates, key=lambda rows: (self._used_at[rows], -rows))
                enough = -(-self._explore_blocks // batch)
                self._trial_left = min(enough, self._explore_steps)
                self._stats.explorations += 1
        if self._trial_left == 0:
            return False
        self._trial_left -= 1
        return True

    def _candidates(self, batch: int, context: float, rate: float) -> list[int]:
        """The nearest g on either side that would win if everything were accepted.

        A g that ran lately is left out, since it has nothing new to say.
        """
        ladder = self.costs.ladder
        at = ladder.index(self._stats.rows)
        sides = (ladder[at + 1 :], [rows for rows in ladder[:at][::-1] if rows > 1])
        hopeful = (
            [r for r in side if batch * r / self.costs.cost(batch, r, context) > rate]
            for side in sides
        )
        lately = self._step - self._explore_every // 2
        return [side[0] for side in hopeful if side and self._used_at[side[0]] <= lately]
