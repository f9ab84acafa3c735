"""Radix selection of the kept ids, see `kernels.truncate`, in Triton.

The state of a row is 8 integers and 4 floats of 64 bits:

    ints   0: 0 keeps every id, 1 truncates, 2 has an infinite or undefined largest logit
           1: prefix, the digits chosen so far     2: left, count or mass still to be reached
           3: mass before the prefix               4, 5: count and mass of ids with the prefix
           6, 7: last kept logit (its order, 0…2³²−1) and how many of the ids that share it
    reals  0: largest logit   1: temperature   2: log of min-p   3: top-p
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.gpu.pick import TILE, Cut, KeptEnds, ordered, stored
from dflash_serve.kernels.pick import Kept
from dflash_serve.kernels.rows import RowSampling

__all__ = ["TritonSearch"]

_FULL = tl.constexpr(1099511627776.0)  # mass of the largest, 2^40
_ROUND = tl.constexpr(6755399441055744.0)  # adding and taking away 1.5 · 2^52 rounds half to even
_EXACT = tl.constexpr(9007199254740992.0)  # 2^53, integers up to it are floats
_ALL = tl.constexpr(2**40)
_ALL_MASS = tl.constexpr(2**62)


@triton.jit
def _start(  # type: ignore[no-untyped-def]
    tops,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    ints,
    reals,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    first_row,
    count,
):
    """Grid (R,): the state before the first digit."""
    row = tl.program_id(0).to(tl.int64)
    request = (first_row + row) // count
    temperature = tl.load(temperatures + request * temperature_stride).to(tl.float32)
    top_k = tl.load(top_ks + request * top_k_stride)
    top_p = tl.load(top_ps + request * top_p_stride).to(tl.float64)
    min_p = tl.load(min_ps + request * min_p_stride).to(tl.float64)
    bits = (tl.load(tops + row) >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    finite = (bits & 0x7F800000) != 0x7F800000
    active = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    top = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    log_min = tl.log(tl.where(min_p > 0.0, min_p, 1.0))
    ints += row * 8
    tl.store(ints, tl.where(active, tl.where(finite, 1, 2), 0).to(tl.int64))
    tl.store(ints + 1, tl.zeros_like(top_k))
    tl.store(ints + 2, tl.where(top_k > 0, top_k, _ALL))
    tl.store(ints + 3, tl.zeros_like(top_k))
    reals += row * 4
    tl.store(reals, top.to(tl.float64))
    tl.store(reals + 1, temperature.to(tl.float64))
    tl.store(reals + 2, tl.where(min_p > 0.0, log_min, float("-inf")))
    tl.store(reals + 3, top_p)


@triton.jit  # type: ignore[untyped-decorator]
def _histogram(  # type: ignore[no-untyped-def]
    logits,
    out,
    ints,
    reals,
    logits_stride,
    valid,
    columns,
    shift,
    tiles,
    FIRST: tl.constexpr,
    SKEW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (parts, R): adds counts and masses by digit to out [R, 2, 256]."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    line = logits + row * logits_stride
    out += row * 512
    state = tl.load(ints + row * 8)
    prefix = tl.load(ints + row * 8 + 1).to(tl.uint32)
    top = tl.load(reals + row * 4)
    temperature = tl.load(reals + row * 4 + 1)
    if state == 1:
        for tile in range(tiles):
            at = (part * tiles + tile) * TILE - SKEW + tl.arange(0, TILE)
            logit = tl.load(line + at, mask=stored(at, columns, SKEW), other=0.0).to(tl.float32)
            inside = stored(at, valid, SKEW)
            order = ordered(logit).to(tl.uint32, bitcast=True) ^ 0x80000000
            share = tl.exp((logit.to(tl.float64) - top) / temperature)
            mass = ((share * _FULL + _ROUND) - _ROUND).to(tl.int64)
            if FIRST:
                # The first digit takes few values, so each is summed up before it is added:
                # thousands of single additions to one address would wait for one another.
                rest = tl.where(inside, (order >> 24).to(tl.int32), -1)
                value = tl.max(rest, 0)
                while value >= 0:
                    here = rest == value
                    tl.atomic_add(out + value, tl.sum(here.to(tl.int64), 0), sem="relaxed")
                    some = tl.sum(tl.where(here, mass, 0), 0)
                    tl.atomic_add(out + 256 + value, some, sem="relaxed")
                    rest = tl.where(here, -1, rest)
                    value = tl.max(rest, 0)
            else:
                match = inside & ((order >> (shift + 8)) == prefix)
                digit = ((order >> shift) & 255).to(tl.int32)
                one = tl.full([TILE], 1, tl.int64)
                tl.atomic_add(out + digit, one, mask=match, sem="relaxed")
                tl.atomic_add(out + 256 + digit, mass, mask=match, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _choose(sums, ints, BY_MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid (R,): fix a digit by the summed histogram [R, 2, 256]."""
    row = tl.program_id(0).to(tl.int64)
    ints += row * 8
    if tl.load(ints) == 1:
        value = tl.arange(0, 256)
        counts = tl.load(sums + row * 512 + value)
        masses = tl.load(sums + row * 512 + 256 + value)
        left = tl.load(ints + 2)
        selected = masses if BY_MASS else counts
        before = tl.sum(selected, 0) - tl.cumsum(selected, 0)
        digit = tl.min(tl.where(before < left, value, 255), 0)
        here = value == digit
        tl.store(ints + 1, tl.load(ints + 1) * 256 + digit)
        tl.store(ints + 2, left - tl.sum(tl.where(here, before, 0), 0))
        above = tl.sum(tl.where(value > digit, masses, 0), 0)
        tl.store(ints + 3, tl.load(ints + 3) + above)
        tl.store(ints + 4, tl.sum(tl.where(here, counts, 0), 0))
        tl.store(ints + 5, tl.sum(tl.where(here, masses, 0), 0))


@triton.jit
def _turn_to_mass(ints, reals):  # type: ignore[no-untyped-def]
    """Grid (R,): keep the top-k end, aim at the mass of top-p, see `largest_below`."""
    row = tl.program_id(0).to(tl.int64)
    ints += row * 8
    if tl.load(ints) == 1:
        left = tl.load(ints + 2)
        count = tl.load(ints + 4)
        each = tl.load(ints + 5) // tl.maximum(count, 1)
        total = tl.load(ints + 3) + each * tl.minimum(left, count)
        top_p = tl.load(reals + row * 4 + 3)
        bound = top_p * total.to(tl.float64)
        below = (bound.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        halfway = below.to(tl.int64) + ((bound - below).to(tl.int64) >> 1)
        last = tl.where(bound <= _EXACT, tl.ceil(bound).to(tl.int64) - 1, halfway)
        last = tl.where(last.to(tl.float64) >= bound, last - 1, last)
        tl.store(ints + 6, tl.load(ints + 1))
        tl.store(ints + 7, left)
        tl.store(ints + 1, tl.zeros_like(left))
        tl.store(ints + 2, tl.where(top_p < 1.0, last + 1, _ALL_MASS))


@triton.jit
def _settle(ints, reals):  # type: ignore[no-untyped-def]
    """Grid (R,): where top-p is in force its end is the nearer one."""
    row = tl.program_id(0).to(tl.int64)
    ints += row * 8
    if (tl.load(ints) == 1) & (tl.load(reals + row * 4 + 3) < 1.0):
        each = tl.maximum(tl.load(ints + 5) // tl.maximum(tl.load(ints + 4), 1), 1)
        tl.store(ints + 6, tl.load(ints + 1))
        tl.store(ints + 7, (tl.load(ints + 2) + each - 1) // each)


@triton.jit  # type: ignore[untyped-decorator]
def _ties(  # type: ignore[no-untyped-def]
    logits,
    out,
    ints,
    logits_stride,
    valid,
    columns,
    tiles,
    parts,
    SKEW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (parts, R): ids with exactly the last kept logit → out [R, parts]."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    line = logits + row * logits_stride
    last = tl.load(ints + row * 8 + 6)
    found = tl.zeros([TILE], tl.int32)
    if tl.load(ints + row * 8) == 1:
        for tile in range(tiles):
            at = (part * tiles + tile) * TILE - SKEW + tl.arange(0, TILE)
            logit = tl.load(line + at, mask=stored(at, columns, SKEW), other=0.0).to(tl.float32)
            inside = stored(at, valid, SKEW)
            order = ordered(logit).to(tl.int64) + 2147483648
            found += (inside & (order == last)).to(tl.int32)
    tl.store(out + row * parts + part, tl.sum(found, 0))


class TritonSearch:
    """`kernels.truncate.Search` on a GPU; rows that keep every id cost next to nothing."""

    def __init__(
        self, logits: Tensor, rows: RowSampling, top: Tensor, first_id: int, valid: int
    ) -> None:
        self._logits = logits
        self._valid = valid
        self._cut = Cut.of(logits, first_id, valid)
        count, device = logits.shape[0], logits.device
        self._ints = torch.empty((count, 8), dtype=torch.int64, device=device)
        self._reals = torch.empty((count, 4), dtype=torch.float64, device=device)
        self._ties = torch.empty((count, self._cut.parts), dtype=torch.int32, device=device)
        self._by_mass = False
        table = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        strides = (t.stride(0) for t in table)
        state = (self._ints, self._reals)
        _start[(count,)](top, *table, *state, *strides, rows.first, rows.count, num_warps=1)

    def histogram(self, digit: int) -> Tensor:
        """See `Search`."""
        logits, cut = self._logits, self._cut
        count = logits.shape[0]
        sums = torch.zeros((count, 2, 256), dtype=torch.int64, device=logits.device)
        _histogram[(cut.parts, count)](
            logits,
            sums,
            self._ints,
            self._reals,
            logits.stride(0),
            self._valid,
            self._logits.shape[1],
            24 - 8 * digit,
            cut.tiles,
            FIRST=digit == 0,
            SKEW=cut.skew,
            TILE=TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
        return sums

    def choose(self, sums: Tensor) -> None:
        """See `Search`."""
        _choose[(self._ints.shape[0],)](sums, self._ints, BY_MASS=self._by_mass, num_warps=4)

    def turn_to_mass(self) -> None:
        """See `Search`."""
        self._by_mass = True
        _turn_to_mass[(self._ints.shape[0],)](
            self._ints, self._reals, num_warps=1, enable_fp_fusion=False
        )

    def settle(self) -> None:
        """See `Search`."""
        _settle[(self._ints.shape[0],)](self._ints, self._reals, num_warps=1)
        cut = self._cut
        _ties[(cut.parts, self._ints.shape[0])](
            self._logits,
            self._ties,
            self._ints,
            self._logits.stride(0),
            self._valid,
            self._logits.shape[1],
            cut.tiles,
            cut.parts,
            SKEW=cut.skew,
            TILE=TILE,
            num_warps=8,
        )

    def ties(self) -> Tensor:
        """See `Search`."""
        return self._ties.sum(1)

    def kept(self, lower: Tensor | None) -> Kept:
        """See `Search`."""
        if lower is None:
            count = self._ints.shape[0]
            lower = torch.zeros(count, dtype=torch.int64, device=self._ints.device)
        return KeptEnds(self._ints, self._reals, self._ties, lower)
