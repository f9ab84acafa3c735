"""The factor on the draft's logits, fitted to what the target confirms (no torch).

The draft proposes argmax(s · logit + T · noise) with the target's own noise. Any s > 0 gives the
same output, since a proposal only counts where the target agrees; it changes how often that is.
A draft that is too sure of itself wants s < 1, one that is too flat s > 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

__all__ = ["DraftScale", "ScaleStats"]

_GRID = tuple(2.0 ** (k / 2) for k in range(-2, 5))  # 0.5 … 4


class ScaleStats(msgspec.Struct, kw_only=True):
    """The fit as of now, for the metrics.

    Attributes:
        scale: s in use.
        compared: the neighbour that takes every other step, or None between comparisons.
        comparisons: how many were finished.
        moves: of those, how many changed the scale.
    """

    scale: float
    compared: float | None = None
    comparisons: int = 0
    moves: int = 0


class _Arm:
    """Proposals made with one scale: how many were judged, how many confirmed."""

    def __init__(self) -> None:
        self.steps = 0
        self.trials = 0
        self.hits = 0

    @property
    def rate(self) -> float:
        return self.hits / self.trials


class DraftScale:
    """A hill climb over a geometric grid, one neighbour at a time.

    The scale in use and a neighbour take turns, step by step, so that a change of content meets
    both alike. The neighbour wins when its acceptance is higher by more than `margin` and by more
    than chance would explain; it loses when it is lower by as much, or when `most_trials` have
    not told them apart. After both neighbours have lost the fit rests.

    Args:
        grid: scales to choose from, ascending.
        start: the first one in use.
        least_trials: proposals judged per scale before anything is concluded.
        most_trials: proposals judged per scale before the one in use is kept.
        margin: absolute gain of acceptance that a move must bring.
        sigmas: standard errors of the difference that a conclusion needs.
        rest: steps between two rounds of comparisons.

    Raises:
        ValueError: a start that is not on the grid, or a grid that does not ascend from above 0.
    """

    def __init__(
        self,
        grid: Sequence[float] = _GRID,
        *,
        start: float = 1.0,
        least_trials: int = 2048,
        most_trials: int = 32768,
        margin: float = 0.005,
        sigmas: float = 3.0,
        rest: int = 4096,
    ) -> None:
        self._grid = tuple(grid)
        if start not in self._grid or not self._grid[0] > 0:
            raise ValueError(f"start is {start} and the grid {self._grid}; it must be on the grid")
        if any(b <= a for a, b in zip(self._grid, self._grid[1:], strict=False)):
            raise ValueError(f"the grid is {self._grid}; it must ascend")
        self._least_trials = least_trials
        self._most_trials = most_trials
        self._margin = margin
        self._sigmas = sigmas
        self._rest = rest
        self._at = self._grid.index(start)
        self._direction = 1
        self._lost = 0  # neighbours that lost in a row
        self._resting = 0
        self._odd = False
        self._comparisons = 0
        self._moves = 0
        self._arms = (_Arm(), _Arm())
        self._next_look = least_trials

    @property
    def scale(self) -> float:
        """The scale in use."""
        return self._grid[self._at]

    def choose(self) -> float:
        """The scale of the next step with a temperature above 0; call once for each."""
        if self._resting:
            self._resting -= 1
            return self.scale
        self._odd = not self._odd
        neighbour = self._neighbour()
        return self.scale if self._odd or neighbour is None else neighbour

    def observe(self, scale: float, rows: int, accepted: Sequence[int]) -> None:
        """Take in a step.

        Args:
            scale: that the step was run with, as `choose` gave it.
            rows: its g.
            accepted: draft tokens confirmed, for its requests with a temperature above 0 only;
                at 0 the scale changes nothing.
        """
        if self._resting or rows == 1 or scale not in (self.scale, self._neighbour()):
            return
        used, other = self._arms
        due = used if used.steps == other.steps else other
        arm = used if scale == self.scale else other
        if arm is not due:  # a step from before the comparison, or one whose pair is missing
            return
        arm.steps += 1
        arm.hits += sum(accepted)
        arm.trials += sum(min(count + 1, rows - 1) for count in accepted)
        self._conclude()

    def stats(self) -> ScaleStats:
        """The scale and the counts so far."""
        return ScaleStats(
            scale=self.scale,
            compared=None if self._resting else self._neighbour(),
            comparisons=self._comparisons,
            moves=self._moves,
        )

    def _neighbour(self) -> float | None:
        """The scale compared with the one in use; None past an end of the grid."""
        at = self._at + self._direction
        return self._grid[at] if 0 <= at < len(self._grid) else None

    def _conclude(self) -> None:
        """End the comparison if it has an outcome."""
        if self._neighbour() is None:
            self._turn()
            return
        used, other = self._arms
        trials = min(used.trials, other.trials)
        if used.steps != other.steps or trials < self._next_look:
            return
        # Every look is another chance to be misled, so their distance doubles.
        self._next_look = 2 * trials
        gain = other.rate - used.rate
        pooled = (used.hits + other.hits) / (used.trials + other.trials)
        error = math.sqrt(pooled * (1 - pooled) * (1 / used.trials + 1 / other.trials))
        if gain > max(self._margin, self._sigmas * error):
            self._comparisons += 1
            self._move()
        elif gain < -self._sigmas * error or trials >= self._most_trials:
            self._comparisons += 1
            self._turn()

    def _move(self) -> None:
        """Use the neighbour and go on the same way; the one left behind has lost already."""
        self._at += self._direction
        self._moves += 1
        self._lost = 1
        self._start()

    def _turn(self) -> None:
        """Compare with the neighbour on the other side, or rest when both have lost."""
        self._direction = -self._direction
        self._lost += 1
        self._start()
        if self._lost == 2:
            self._lost = 0
            self._resting = self._rest

    def _start(self) -> None:
        """Begin a comparison."""
        self._arms = (_Arm(), _Arm())
        self._next_look = self._least_trials
