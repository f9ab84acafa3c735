"""The best (score, id) of each row in one pass over the logits, noise included.

Every program handles a few tiles of one row. Maxima and integer sums are exact, so how a row is
cut into programs cannot change its result.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.noise import gumbel, philox_ids
from dflash_serve.kernels.pick import Kept
from dflash_serve.kernels.rows import RowSampling

__all__ = ["TILE", "Cut", "KeptEnds", "best_keys", "ordered", "stored", "unpack"]

TILE = 2048
_FEW_ROWS = 32
_MANY_TILES = 4
_STAGES = tl.constexpr(4)
_EMPTY = tl.constexpr(-(2**63))
_FAULT = tl.constexpr(2**63 - 1)
_LOW = tl.constexpr(0xFFFFFFFF)
_NOWHERE = tl.constexpr(-(2**31))


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the columns of a row are spread over programs.

    Attributes:
        skew: columns of an id block of 4 that lie before column 0; tiles start with whole blocks.
        tiles: tiles a program handles one after the other.
        parts: programs a row.
    """

    skew: int
    tiles: int
    parts: int

    @classmethod
    def of(cls, logits: Tensor, first_id: int, valid: int) -> Cut:
        """The cut of [R, ≥ valid] logits whose column 0 is `first_id`."""
        if logits.stride(1) != 1 or not logits.is_floating_point():
            raise ConfigError(
                f"logits are {logits.dtype} with strides {logits.stride()}; allowed: floating"
                " point with neighbouring columns; make them contiguous"
            )
        skew = first_id % 4
        # With few rows every tile is a program of its own, to occupy all processors.
        tiles = 1 if logits.shape[0] <= _FEW_ROWS else _MANY_TILES
        return cls(skew, tiles, max(1, triton.cdiv(valid + skew, tiles * TILE)))


@dataclasses.dataclass(frozen=True)
class KeptEnds(Kept):
    """`Kept` of the Triton path: where each row's kept ids end.

    Attributes:
        ints, reals: the search's state by row, see `gpu.truncate`.
        ties: [R, parts] int32 ids that share the last kept logit, by program.
        lower: [R] int64 such ids on ranks with lower ids.
    """

    ints: Tensor
    reals: Tensor
    ties: Tensor
    lower: Tensor


@triton.jit
def ordered(score):  # type: ignore[no-untyped-def]
    """Int32 numbers in the order of float32 scores; −0 counts as +0."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def stored(at, columns, SKEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether columns exist. Loads are masked by the columns stored, usually a multiple of 16,
    which the compiler can turn into wide loads; the number of valid ids is often odd.
    """
    if SKEW == 0:
        return at < columns
    else:
        return (at >= 0) & (at < columns)


@triton.jit  # type: ignore[untyped-decorator]
def _best(  # type: ignore[no-untyped-def]
    logits,
    out,
    temperatures,
    seeds,
    positions,
    ints,
    reals,
    ties,
    lower,
    logits_stride,
    temperature_stride,
    seed_stride,
    position_stride,
    first_row,
    count,
    first_id,
    valid,
    columns,
    scale,
    tiles,
    parts,
    NOISE: tl.constexpr,
    KEPT: tl.constexpr,
    SCALE_READ: tl.constexpr,
    SKEW: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (parts, R): largest key of the program's columns → out [R, parts]."""
    follow(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    line = logits + row * logits_stride
    factor = tl.load(scale) if SCALE_READ else scale
    if NOISE:
        request = (first_row + row) // count
        temperature = tl.load(temperatures + request * temperature_stride).to(tl.float32)
        seed = tl.load(seeds + request * seed_stride)
        position = tl.load(positions + request * position_stride) + (first_row + row) % count
    if KEPT:
        state = tl.load(ints + row * 8)
        last = tl.load(ints + row * 8 + 6)
        room = tl.load(ints + row * 8 + 7)
        top = tl.load(reals + row * 4)
        heat = tl.load(reals + row * 4 + 1)
        least = tl.load(reals + row * 4 + 2)
        before = tl.arange(0, PARTS)
        counts = tl.load(ties + row * parts + before, mask=before < part, other=0)
        seen = tl.load(lower + row) + tl.sum(counts.to(tl.int64), 0)

    # A lane sees its columns in ascending order, so that only a greater score replaces one; the
    # keys that also order lanes are made at the end. Comparing floats counts −0 as +0.
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_at = tl.full([TILE], _NOWHERE, tl.int32)
    broken = tl.zeros([TILE], tl.int1)
    # Several tiles are on their way at once: the noise takes so many registers that too few
    # programs run side by side to fill the bandwidth with one each.
    for tile in tl.range(0, tiles, num_stages=_STAGES):
        start = (part * tiles + tile) * TILE
        at = start - SKEW + tl.arange(0, TILE)
        logit = tl.load(line + at, mask=stored(at, columns, SKEW), other=0.0).to(tl.float32)
        inside = stored(at, valid, SKEW)
        score = logit * factor
        if NOISE:  # noqa: SIM102 (known when compiled; the next when run)
            if temperature > 0.0:
                words = philox_ids(seed, position, (first_id - SKEW + start) // 4, TILE)
                score = score + temperature * gumbel(words)
        allowed = inside
        if KEPT:  # noqa: SIM102
            if state == 1:
                order = ordered(logit).to(tl.int64) + 2147483648
                tied = inside & (order == last)
                index = seen + tl.cumsum(tied.to(tl.int32), 0)
                seen += tl.sum(tied.to(tl.int64), 0)
                share = (logit.to(tl.float64) - top) / heat
                allowed = inside & ((order > last) | (tied & (index <= room)))
                allowed = allowed & (share >= least)
        broken = broken | (inside & (score != score))
        better = allowed & ((score > best) | (best_at == _NOWHERE))
        best = tl.where(better, score, best)
        best_at = tl.where(better, at, best_at)
    ids = (first_id + best_at).to(tl.int64)
    key = (ordered(best).to(tl.int64) << 32) | (_LOW - ids)
    key = tl.where(best_at == _NOWHERE, _EMPTY, key)
    largest = tl.max(tl.where(broken, _FAULT, key), 0)
    if KEPT:
        largest = tl.where(state == 2, _FAULT, largest)
    tl.store(out + row * parts + part, largest)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    partial, out, parts, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """Grid (R,): maximum of each row of partial [R, parts]."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    keys = tl.load(partial + row * parts + part, mask=part < parts, other=_EMPTY)
    tl.store(out + row, tl.max(keys, 0))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _unpack(  # type: ignore[no-untyped-def]
    keys, ids, faults, rows, TILE: tl.constexpr, PDL: tl.constexpr
):
    """Grid (tiles of rows,): ids and faults of keys [R]."""
    follow(PDL)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key = tl.load(keys + row, mask=row < rows, other=0)
    fault = key == _FAULT
    tl.store(ids + row, tl.where(fault, 0, _LOW - (key & _LOW)), mask=row < rows)
    tl.store(faults + row, fault, mask=row < rows)


def best_keys(
    logits: Tensor,
    rows: RowSampling | None,
    first_id: int,
    valid: int,
    scale: float | Tensor,
    kept: Kept | None,
) -> Tensor:
    """See `kernels.pick.best_keys`; reads the logits once and writes no noise."""
    count = logits.shape[0]
    keys = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count == 0:
        return keys
    cut = Cut.of(logits, first_id, valid)
    partial = torch.empty((count, cut.parts), dtype=torch.int64, device=logits.device)
    unused = keys  # stands in for tensors that a variant does not touch
    table = (unused, unused, unused)
    first_row, rows_each = 0, 1
    if rows is not None:
        table = (rows.temperature, rows.seed, rows.position)
        first_row, rows_each = rows.first, rows.count
    ends = (unused, unused, unused, unused)
    if kept is not None:
        assert isinstance(kept, KeptEnds)
        ends = (kept.ints, kept.reals, kept.ties, kept.lower)
    padded = triton.next_power_of_2(cut.parts)
    _best[(cut.parts, count)](
        logits,
        partial,
        *table,
        *ends,
        logits.stride(0),
        *(values.stride(0) for values in table),
        first_row,
        rows_each,
        first_id,
        valid,
        logits.shape[1],
        scale,
        cut.tiles,
        cut.parts,
        NOISE=rows is not None,
        KEPT=kept is not None,
        SCALE_READ=isinstance(scale, Tensor),
        SKEW=cut.skew,
        PARTS=padded,
        TILE=TILE,
        num_warps=8,
        enable_fp_fusion=False,  # logit + T · G rounds as in the torch reference, in any variant
        **chained(logits),
    )
    _largest[(count,)](partial, keys, cut.parts, PARTS=padded, num_warps=1, **chained(keys))
    return keys


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.pick.unpack`."""
    ids = torch.empty_like(keys)
    faults = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    if keys.shape[0]:
        grid = (triton.cdiv(keys.shape[0], 256),)
        _unpack[grid](keys, ids, faults, keys.shape[0], TILE=256, num_warps=2, **chained(keys))
    return ids, faults
