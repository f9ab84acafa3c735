"""How often the target confirms what the draft proposes, by verify length (no torch).

The draft's block is bidirectional, so the same position is proposed differently in blocks of
different width. Acceptance is therefore kept per width g, and a width that was not measured, or
not lately, borrows from the nearest one that was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

__all__ = ["Acceptance", "expected_tokens"]

_LARGEST_STEP = 0.25  # the share of an average that one step may replace, however many requests
_GUESS = 1.0  # the weight of the initial acceptance, in trials

# Recent trials of the first position against its average, to notice that the content changed.
_RECENT_WINDOW = 16.0
_RECENT_KEPT = 0.25  # at least, after a step with many requests
_RECENT_LEAST = 8.0
_LEAST_VARIANCE = 0.15  # of one trial; a few misses in a row are no news at a high acceptance


def expected_tokens(conditional: Iterable[float]) -> float:
    """Tokens per step, the bonus token included.

    Args:
        conditional: acceptance of each draft position, given that all before it were accepted.
    """
    return 1.0 + sum(itertools.accumulate(conditional, lambda a, b: a * b))


class _Width:
    """Decayed counts of one g: per draft position the trials that reached it, and the hits."""

    def __init__(self, rows: int) -> None:
        self.trials = [0.0] * (rows - 1)
        self.hits = [0.0] * (rows - 1)
        self.seen = 0  # step of its last measurement
        self.recent_trials = 0.0  # of the first position, over a much shorter time
        self.recent_hits = 0.0

    def scale(self, factor: float) -> None:
        """Let the evidence count for less."""
        self.trials = [factor * trials for trials in self.trials]
        self.hits = [factor * hits for hits in self.hits]

    def surprise(self, reached: int, passed: int) -> float:
        """Take in the first position's outcome; how far the recent ones are from the average.

        Returns:
            Standard errors; 0 while there is too little to compare.
        """
        keep = max(1.0 - reached / _RECENT_WINDOW, _RECENT_KEPT)
        self.recent_trials = keep * self.recent_trials + reached
        self.recent_hits = keep * self.recent_hits + passed
        trials, recent = self.trials[0], self.recent_trials
        if min(trials, recent) < _RECENT_LEAST:
            return 0.0
        rate = self.hits[0] / trials
        variance = max(rate * (1 - rate), _LEAST_VARIANCE) * recent * (1 + recent / trials)
        return abs(self.recent_hits - rate * recent) / math.sqrt(variance)


class Acceptance:
    """Running conditional acceptance per draft position, for every g of a ladder.

    Evidence is a decayed count of trials and hits. A position is tried only when every one before
    it was accepted, so a rejection hides the rest of its block and leaves their averages alone.
    When the recent steps of one width contradict its average, the content has changed, for every
    width: then all that was learned before counts for no more than a borrowed estimate.

    Args:
        ladder: values of g; 1 measures nothing and brings one token.
        initial: acceptance assumed before anything was measured. A hopeful value makes
            speculation be tried.
        window: trials after which a position's average has mostly forgotten.
        borrowed: weight of the borrowed estimate beside a width's own, in trials.
        half_life: steps without a measurement after which a width's evidence counts half, once
            a newer measurement, of any width, stands beside it.
        sigmas: standard errors by which recent steps must differ to be a change of content.
    """

    def __init__(
        self,
        ladder: Sequence[int],
        *,
        initial: float = 0.8,
        window: float = 128.0,
        borrowed: float = 4.0,
        half_life: float = 64.0,
        sigmas: float = 4.0,
    ) -> None:
        self.ladder = tuple(sorted(ladder))
        self._initial = initial
        self._window = window
        self._borrowed = borrowed
        self._half_life = half_life
        self._sigmas = sigmas
        self._widths = {rows: _Width(rows) for rows in self.ladder if rows > 1}
        self._step = 0
        self._latest = 0  # step of the last measurement of any width

    def observe(self, rows: int, accepted: Sequence[int]) -> None:
        """Take in one step.

        Args:
            rows: its g. At 1 nothing was drafted and only time passes.
            accepted: draft tokens confirmed, 0…rows−1, one per request.

        Raises:
            ValueError: a g that is not on the ladder, or a count outside 0…rows−1.
        """
        if rows not in self.ladder:
            raise ValueError(f"rows is {rows}; the ladder is {self.ladder}")
        self._step += 1
        if rows == 1 or not accepted:
            return
        if not 0 <= min(accepted) <= max(accepted) < rows:
            raise ValueError(f"accepted is {list(accepted)}; allowed: 0 to {rows - 1}")
        self._latest = self._step
        width = self._widths[rows]
        width.scale(self._fading(width))
        width.seen = self._step
        if width.surprise(len(accepted), sum(a > 0 for a in accepted)) > self._sigmas:
            self._forget()
        stopped = [0] * rows
        for count in accepted:
            stopped[count] += 1
        reached = len(accepted)
        for position in range(rows - 1):
            passed = reached - stopped[position]
            keep = 1.0 - min(reached / self._window, _LARGEST_STEP)
            width.trials[position] = keep * width.trials[position] + reached
            width.hits[position] = keep * width.hits[position] + passed
            reached = passed

    def _forget(self) -> None:
        """Leave every width with the weight of a borrowed estimate at most."""
        for width in self._widths.values():
            width.scale(min(1.0, self._borrowed / max(width.trials[0], self._borrowed)))

    def _fading(self, width: _Width) -> float:
        """Share of a width's evidence that still counts; between consecutive steps all of it."""
        return float(0.5 ** (max(self._latest - width.seen - 1, 0) / self._half_life))

    def conditional(self, rows: int) -> list[float]:
        """Acceptance of each of the rows − 1 draft positions, given all before it."""
        if rows == 1:
            return []
        own, nearest = self._widths[rows], self._nearest(rows)
        if nearest is None:
            return self._curve(own, rows - 1)
        fading, weight = self._fading(own), self._borrowed
        lent = self._curve(self._widths[nearest], rows - 1)
        return [
            (fading * hits + weight * prior) / (fading * trials + weight)
            for hits, trials, prior in zip(own.hits, own.trials, lent, strict=True)
        ]

    def tokens_per_step(self, rows: int) -> float:
        """Expected tokens of one request in a step of g = rows, the bonus token included."""
        return expected_tokens(self.conditional(rows))

    def _nearest(self, rows: int) -> int | None:
        """The nearest width with evidence worth lending; of two the one measured last."""
        at = self.ladder.index(rows)
        measured = [
            (abs(self.ladder.index(other) - at), -width.seen, other)
            for other, width in self._widths.items()
            if other != rows and width.trials[0] * self._fading(width) >= self._borrowed
        ]
        return min(measured)[2] if measured else None

    def _curve(self, width: _Width, length: int) -> list[float]:
        """A width's own averages; where they are thin, the position before stands in."""
        curve, last, weight = [], self._initial, _GUESS
        fading = self._fading(width)
        for position in range(length):
            if position < len(width.trials):
                trials, hits = fading * width.trials[position], fading * width.hits[position]
                last = (hits + weight * last) / (trials + weight)
            curve.append(last)
            weight = self._borrowed
        return curve
