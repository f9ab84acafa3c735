"""Which ids top-k, top-p and min-p keep, found by radix selection.

The kept ids are a beginning of the order (logit descending, id ascending). Its end is found digit
by digit: 8 bits of the logit's order at a time, every rank counts its ids and adds up their
probability mass by digit, the sums go over the ranks, and the digit in which the count (top-k) or
the mass (top-p) is reached becomes part of the prefix. After four digits the last kept logit is
known, and how many of the ids that share it are kept. The number of rounds never depends on the
data, and integer sums do not depend on the order of summation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.pick import Kept, KeptMask, score_of, score_order
from dflash_serve.kernels.rows import RowSampling

__all__ = ["BINS", "DIGITS", "MASS_BITS", "Search", "TorchSearch", "largest_below", "search"]

MASS_BITS = 40
"""Probability mass is counted in units of 2^-40 of the largest: integer sums do not depend on
the order of summation, and 2^18 ids of full mass still fit in 64 bits."""

BINS = 256
DIGITS = 4
_ALL = 2**40
"""More ids than any vocabulary has: the target of a row without top-k."""
_ALL_MASS = 2**62
"""More mass than all ids have: the target of a row without top-p."""
_PART_IDS = 2**18


class Search(Protocol):
    """The state of one search over R rows. All ranks take the same steps with the same sums.

    First the digits of the top-k end, then `turn_to_mass`, then the digits of the top-p end.
    """

    def histogram(self, digit: int) -> Tensor:
        """[R, 2, 256] int64: this rank's ids by value of a digit, counts and then masses.

        Only ids whose digits before agree with those chosen are counted.
        """

    def choose(self, sums: Tensor) -> None:
        """Fix the next digit by the histogram summed over the ranks."""

    def turn_to_mass(self) -> None:
        """Keep the top-k end; start again for the top-p end."""

    def settle(self) -> None:
        """Take the nearer end of the two."""

    def ties(self) -> Tensor:
        """[R] int64: this rank's ids with exactly the last kept logit."""

    def kept(self, lower: Tensor | None) -> Kept:
        """The result, given the ties [R] of all ranks with lower ids (None: there are none)."""


def search(logits: Tensor, rows: RowSampling, top: Tensor, first_id: int, valid: int) -> Search:
    """Start a search.

    Args:
        logits: [R, ≥ valid], any float type.
        top: [R] largest key of each row's logits over all ranks.
        first_id: global id of column 0.
        valid: columns that are ids.
    """
    if compiled(logits):
        from dflash_serve.kernels.gpu.truncate import TritonSearch

        return TritonSearch(logits, rows, top, first_id, valid)
    return TorchSearch(logits, rows, top, valid)


def largest_below(bound: Tensor) -> Tensor:
    """Largest integer that as a float64 is below each positive bound: [R] float64 → int64.

    Above 2^53 integers are rounded to float64, half to even, so the halfway point is looked at.
    """
    before = torch.nextafter(bound, torch.zeros_like(bound))
    halfway = before.long() + (bound - before).long() // 2
    last = torch.where(bound <= 2.0**53, bound.ceil().long() - 1, halfway)
    return last - (last.double() >= bound).long()


class _Part:
    """Some rows of a search, few enough to stay in the processor's cache.

    Attributes:
        rows: [r] which rows of the batch these are.
        order: [r, C] int32 order of the logits; keys are order + 2^31.
        log_share: [r, C] float64 log of each id's share of the largest.

    Masses are left at 0 where no row has a top-p.
    """

    def __init__(
        self, rows: Tensor, logits: Tensor, top: Tensor, temperature: Tensor, by_mass: bool
    ) -> None:
        self.rows = rows
        self.order = score_order(logits)
        self.log_share = (logits.double() - top[:, None]).div_(temperature[:, None])
        if by_mass:
            mass = self.log_share.exp().mul_(2**MASS_BITS).round_().long()
        else:
            mass = self.order[:, :0]
        self._by_mass, self._mass = by_mass, mass.flatten()
        first = (self.order >> 24).add_(BINS // 2)
        self._first_digit = first.to(torch.uint8)
        row = torch.arange(rows.shape[0], device=rows.device)
        place = (first + row[:, None] * BINS).flatten()
        self._first_sums = self._sums(place, self._mass)
        self._candidates = place[:0], self._mass[:0]

    def histogram(self, digit: int, prefix: Tensor) -> Tensor:
        """[2, r, 256] counts and masses of the ids that have the prefixes [r]."""
        if digit == 0:
            return self._first_sums
        if digit == 1:
            self._candidates = self._narrowed(prefix)
        # The row of a candidate stands above the 32 bits of its key.
        key, mass = self._candidates
        if digit > 1:
            wanted = prefix + (torch.arange(prefix.shape[0], device=prefix.device) << 8 * digit)
            index = (key >> 8 * (DIGITS - digit) == wanted[key >> 32]).nonzero()[:, 0]
            key, mass = self._candidates = key[index], mass[index] if self._by_mass else mass
        value = key >> 8 * (DIGITS - 1 - digit) & (BINS - 1)
        return self._sums(value + (key >> 32) * BINS, mass)

    def _narrowed(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and masses of the ids with these first digits."""
        if not bool(self._first_sums[0].gather(1, prefix[:, None]).any()):
            return self._candidates[0][:0], self._mass[:0]
        index = (self._first_digit == prefix.to(torch.uint8)[:, None]).flatten().nonzero()[:, 0]
        key = self.order.flatten()[index].long() + 2**31
        if self.rows.shape[0] > 1:
            key += index // self.order.shape[1] << 32
        return key, self._mass[index] if self._by_mass else self._mass

    def _sums(self, place: Tensor, mass: Tensor) -> Tensor:
        sums = place.new_zeros((2, self.rows.shape[0] * BINS))
        sums[0].scatter_add_(0, place, torch.ones_like(place))
        if self._by_mass:
            sums[1].scatter_add_(0, place, mass)
        return sums.view(2, -1, BINS)


class TorchSearch:
    """`Search` in plain torch. Only what is local depends on values: which ids are looked at."""

    def __init__(self, logits: Tensor, rows: RowSampling, top: Tensor, valid: int) -> None:
        rows = rows.per_row()
        self._shape = logits.shape[0], valid
        self._limits = rows
        self._active = rows.temperature > 0
        self._active &= (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
        best = score_of(top)
        # Shares of an infinite maximum are NaN; a NaN faults its row in any case.
        self._broken = self._active & ~best.isfinite()
        usable = (self._active & ~self._broken).nonzero()[:, 0]
        step = max(1, _PART_IDS // max(1, valid))
        self._parts = []
        for begin in range(0, usable.shape[0], step):
            some = usable[begin : begin + step]
            local, heat = logits[some, :valid].float(), rows.temperature[some].double()
            by_mass = bool((rows.top_p[some] < 1.0).any())
            self._parts.append(_Part(some, local, best[some].double(), heat, by_mass))
        self._by_mass = False
        self._prefix = torch.zeros_like(top)
        self._left = torch.where(rows.top_k > 0, rows.top_k, _ALL)
        self._above = torch.zeros_like(top)
        self._here = torch.stack((self._above, self._above))
        self._last, self._room = self._prefix, self._left

    def histogram(self, digit: int) -> Tensor:
        """See `Search`."""
        sums = self._prefix.new_zeros((self._shape[0], 2, BINS))
        for part in self._parts:
            sums[part.rows] = part.histogram(digit, self._prefix[part.rows]).transpose(0, 1)
        return sums

    def choose(self, sums: Tensor) -> None:
        """See `Search`."""
        before = sums.sum(2, keepdim=True) - sums.cumsum(2)
        reached = before[:, int(self._by_mass)] >= self._left[:, None]
        digit = reached.sum(1).clamp(max=BINS - 1)
        at = digit[:, None, None].expand(-1, 2, 1)
        taken = before.gather(2, at)[:, :, 0]
        self._here = sums.gather(2, at)[:, :, 0].T
        self._above = self._above + taken[:, 1]
        self._left = self._left - taken[:, int(self._by_mass)]
        self._prefix = self._prefix << 8 | digit

    def turn_to_mass(self) -> None:
        """See `Search`."""
        self._last, self._room = self._prefix, self._left
        counts, masses = self._here
        each = masses // counts.clamp(min=1)  # the same logit, hence the same mass
        total = self._above + each * torch.minimum(self._left, counts)
        bound = self._limits.top_p * total.double()
        self._left = torch.where(self._limits.top_p < 1.0, largest_below(bound) + 1, _ALL_MASS)
        self._prefix = torch.zeros_like(self._prefix)
        self._by_mass = True

    def settle(self) -> None:
        """See `Search`."""
        counts, masses = self._here
        each = (masses // counts.clamp(min=1)).clamp(min=1)
        cut = self._limits.top_p < 1.0
        self._last = torch.where(cut, self._prefix, self._last)
        self._room = torch.where(cut, (self._left + each - 1) // each, self._room)

    def ties(self) -> Tensor:
        """See `Search`."""
        count = torch.zeros_like(self._prefix)
        for part in self._parts:
            count[part.rows] = (part.order == self._last_order(part)).sum(1)
        return count

    def kept(self, lower: Tensor | None) -> Kept:
        """See `Search`."""
        room = self._room if lower is None else self._room - lower
        allowed = torch.ones(self._shape, dtype=torch.bool, device=room.device)
        for part in self._parts:
            last = self._last_order(part)
            some = part.order >= last
            row, column = (part.order == last).nonzero(as_tuple=True)
            place = torch.arange(row.shape[0], device=row.device)
            place -= torch.searchsorted(row, row)  # how many of the row's ties come before
            some[row, column] = place < room[part.rows][row]
            some &= part.log_share >= self._limits.min_p[part.rows].log()[:, None]
            allowed[part.rows] = some
        return KeptMask(allowed, self._broken)

    def _last_order(self, part: _Part) -> Tensor:
        return (self._last[part.rows, None] - 2**31).int()
