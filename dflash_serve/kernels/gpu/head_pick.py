"""The head product that keeps the best (score, id) of every tile instead of its logits.

The sums are those of `linear` and `linear_large`, in the same order and rounded to the same type;
the scores and keys are those of `pick`. A tile leaves one key a row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.head_tiles import HeadTile, head_tile
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.linear_parts import addressable
from dflash_serve.kernels.gpu.noise import gumbel, philox
from dflash_serve.kernels.gpu.pick import ordered
from dflash_serve.kernels.rows import RowSampling

__all__ = ["head_keys", "largest", "pick_keys"]

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHANGING = ["rows", "first_row", "requests", "valid"]
"""Of these, 1 and multiples of 16 get no kernel of their own."""
_SCANNED = tl.constexpr(256)
_EMPTY = tl.constexpr(-(2**63))
_FAULT = tl.constexpr(2**63 - 1)
_LOW = tl.constexpr(0xFFFFFFFF)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _halves(acc):  # type: ignore[no-untyped-def]
    """The left and the right half of a tile; no number leaves its thread."""
    wide: tl.constexpr = (acc.shape[0], 2, acc.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(acc, wide), (0, 2, 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _row_noise(seed, position, first_block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel noise of ids 4 · first_block … + COLUMNS − 1 for rows of any seed and position."""
    block = first_block + tl.zeros([ROWS, 1], tl.int32) + tl.arange(0, COLUMNS // 4)[None, :]
    x0, x1, x2, x3 = philox(seed[:, None], position[:, None], block)
    words = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [ROWS, COLUMNS])
    return gumbel(words)


@triton.jit
def _column(logits, column0):  # type: ignore[no-untyped-def]
    """The column of every number of a tile: int32 of its shape."""
    return (
        column0 + tl.zeros([logits.shape[0], 1], tl.int32) + tl.arange(0, logits.shape[1])[None, :]
    )


@triton.jit
def _inside(column, valid):  # type: ignore[no-untyped-def]
    """0 <= column < valid, in one comparison."""
    return column.to(tl.uint32, bitcast=True) < valid.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _plain(  # type: ignore[no-untyped-def]
    logits, best, at, column0, valid, factor, PIECE: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Follow the best score of every lane through the columns of a tile, PIECE at a time.

    A lane sees its columns in ascending order, so that only a greater score replaces one. A NaN
    stays. The lowest valid column lies in the first piece, whose scores are all taken over: it is
    the answer when no score is above -inf.
    """
    if logits.shape[1] > PIECE:
        half: tl.constexpr = logits.shape[1] // 2
        left, right = _halves(logits)
        best, at = _plain(left, best, at, column0, valid, factor, PIECE, FIRST)
        best, at = _plain(right, best, at, column0 + half, valid, factor, PIECE, False)
    else:
        column = _column(logits, column0)
        score = logits.to(tl.float32) * factor
        score = tl.where(_inside(column, valid), score, float("-inf"))
        if FIRST:
            best, at = score, column
        else:
            at = tl.where(score > best, column, at)
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    return best, at


@triton.jit
def _keys(score, at, first_id, valid):  # type: ignore[no-untyped-def]
    """Key of each row: [ROWS, C] scores of the columns `at` → [ROWS] int64."""
    broken = score != score
    score = tl.where(broken, float("-inf"), score)
    value = tl.max(score, 1)
    possible = (score == value[:, None]) & _inside(at, valid)
    column = tl.min(tl.where(possible, at, _NOWHERE), 1)
    keys = (ordered(value).to(tl.int64) << 32) | (_LOW - (first_id + column).to(tl.int64))
    keys = tl.where(column == _NOWHERE, _EMPTY, keys)
    return tl.where(tl.max(broken.to(tl.int32), 1) > 0, _FAULT, keys)


@triton.jit
def _noisy_keys(  # type: ignore[no-untyped-def]
    logits, column0, first_id, valid, factor, temperature, seed, position
):  # fmt: skip
    """Key of each row of a piece of a tile, by logit · factor + T · G."""
    column = _column(logits, column0)
    block = (first_id + column0) // 4
    noise = _row_noise(seed, position, block, logits.shape[0], logits.shape[1])
    score = logits.to(tl.float32) * factor + temperature[:, None] * noise
    score = tl.where(_inside(column, valid), score, float("-inf"))
    return _keys(score, column, first_id, valid)


@triton.jit  # type: ignore[untyped-decorator]
def _noisy(  # type: ignore[no-untyped-def]
    logits, column0, first_id, valid, factor, temperature, seed, position, PIECE: tl.constexpr
):  # fmt: skip
    """Key of each row of a tile, PIECE columns at a time or a quarter of them.

    The code of the noise is long, and unrolled over a tile it would take more registers and more
    of the instruction cache than there are: pieces take turns in the place that it looks at.
    """
    if logits.shape[1] <= PIECE:
        keys = _noisy_keys(
            logits, column0, first_id, valid, factor, temperature, seed, position
        )  # fmt: skip
    elif logits.shape[1] // 2 <= PIECE:
        half: tl.constexpr = logits.shape[1] // 2
        one, two = _halves(logits)
        keys = tl.full([logits.shape[0]], _EMPTY, tl.int64)
        for turn in tl.range(2, loop_unroll_factor=1):
            found = _noisy_keys(
                one, column0 + turn * half, first_id, valid, factor, temperature, seed, position
            )  # fmt: skip
            keys = tl.maximum(keys, found)
            one = two
    else:
        quarter: tl.constexpr = logits.shape[1] // 4
        left, right = _halves(logits)
        one, two = _halves(left)
        three, four = _halves(right)
        keys = tl.full([logits.shape[0]], _EMPTY, tl.int64)
        for turn in tl.range(4, loop_unroll_factor=1):
            found = _noisy_keys(
                one, column0 + turn * quarter, first_id, valid, factor, temperature, seed, position
            )  # fmt: skip
            keys = tl.maximum(keys, found)
            one, two, three = two, three, four
    return keys


@triton.jit  # type: ignore[untyped-decorator]
def pick_keys(  # type: ignore[no-untyped-def]
    logits, column0, row, rows, first_id, valid, factor, noisy,
    temperatures, seeds, positions, temperature_stride, seed_stride, position_stride,
    first_row, count, PIECE: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Keys of a tile, with noise if one of its rows has any; `noisy`: whether it may."""
    if NOISE:
        request = (first_row + row) // count
        inside = row < rows
        hot = False
        if noisy:
            most = tl.load(temperatures + request * temperature_stride, mask=inside, other=0.0)
            hot = tl.max(most.to(tl.float32), 0) > 0.0
        if hot:
            heat = tl.load(temperatures + request * temperature_stride, mask=inside, other=0.0)
            seed = tl.load(seeds + request * seed_stride, mask=inside, other=0)
            position = tl.load(positions + request * position_stride, mask=inside, other=0)
            position += (first_row + row) % count
            # For greedy rows 0 · G is a zero, which changes no key.
            warm = tl.maximum(heat.to(tl.float32), 0.0)
            keys = _noisy(logits, column0, first_id, valid, factor, warm, seed, position, PIECE)
        else:
            best, at = _plain(logits, logits, logits, column0, valid, factor, PIECE, True)
            keys = _keys(best, at, first_id, valid)
    else:
        best, at = _plain(logits, logits, logits, column0, valid, factor, PIECE, True)
        keys = _keys(best, at, first_id, valid)
    return keys


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _by_address(  # type: ignore[no-untyped-def]
    x, weight, partial, temperatures, seeds, positions,
    x_stride, temperature_stride, seed_stride, position_stride,
    rows, columns, depth, first_row, count, requests, first_id, valid, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr,
    EVEN: tl.constexpr, SKEW: tl.constexpr, NOISE: tl.constexpr, SCALE_READ: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keys of one [ROWS, COLUMNS] tile → partial [column tiles, rows].

    Tiles start with whole blocks of 4 ids, hence SKEW columns before the first.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    column_tile = tl.program_id(0) // row_tiles
    column0 = column_tile * COLUMNS - SKEW
    step = tl.arange(0, DEPTH)
    row_inside = (row < rows)[:, None]
    # Columns outside compute another one again: loads of the weight need no mask.
    line = tl.minimum(tl.maximum(column0 + tl.arange(0, COLUMNS), 0), columns - 1).to(tl.int64)
    x_at = x + row[:, None].to(tl.int64) * x_stride + step[None, :]
    w_at = weight + line[:, None] * depth + step[None, :]

    follow(PDL)
    factor = tl.load(scale) if SCALE_READ else scale
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            a = tl.load(x_at + start, mask=row_inside, other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = (step < depth - start)[None, :]
            a = tl.load(x_at + start, mask=row_inside & inside, other=0.0)
            w = tl.load(w_at + start, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    keys = pick_keys(
        acc.to(weight.dtype.element_ty), column0, row, rows, first_id, valid, factor, True,
        temperatures, seeds, positions, temperature_stride, seed_stride, position_stride,
        first_row, count, PIECE, NOISE,
    )  # fmt: skip
    tl.store(partial + column_tile.to(tl.int64) * rows + row, keys, mask=row < rows)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _copied(  # type: ignore[no-untyped-def]
    x, weight, partial, temperatures, seeds, positions,
    temperature_stride, seed_stride, position_stride,
    rows, depth, first_row, count, requests, first_id, valid, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr,
    GROUP: tl.constexpr, RESIDENT: tl.constexpr, SKEW: tl.constexpr, NOISE: tl.constexpr,
    SCALE_READ: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for tiles program_id, program_id + programs, …; x and weight are descriptors.

    They pad with 0, also before column 0.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(valid + SKEW, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    tl.assume(steps > 0)
    follow(PDL)
    factor = tl.load(scale) if SCALE_READ else scale
    noisy = RESIDENT == 0
    if NOISE and RESIDENT > 0:
        # Once for all tiles: a look at each tile's own rows would cost more than scoring it.
        most = tl.zeros([_SCANNED], tl.float32)
        for first in range(0, requests, _SCANNED):
            request = first + tl.arange(0, _SCANNED)
            at = temperatures + request.to(tl.int64) * temperature_stride
            most = tl.maximum(most, tl.load(at, mask=request < requests, other=0.0).to(tl.float32))
        noisy = tl.max(most, 0) > 0.0
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=RESIDENT > 0
    ):
        first = tile // (GROUP * column_tiles) * GROUP
        high = tl.minimum(row_tiles - first, GROUP)
        inner = tile % (GROUP * column_tiles)
        row0 = (first + inner % high) * ROWS
        column_tile = inner // high
        column0 = column_tile * COLUMNS - SKEW
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row0, step * DEPTH])
            w = weight.load([column0, step * DEPTH])
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        row = row0 + tl.arange(0, ROWS)
        # Rounded here rather than in the branches of the pick: a wait for the product in each of
        # them would keep its steps from following each other.
        keys = pick_keys(
            acc.to(weight.dtype), column0, row, rows, first_id, valid, factor, noisy,
            temperatures, seeds, positions, temperature_stride, seed_stride, position_stride,
            first_row, count, PIECE, NOISE,
        )  # fmt: skip
        tl.store(partial + column_tile.to(tl.int64) * rows + row, keys, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    partial, out, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr
):
    """Grid (row blocks,): maximum of each row of partial [tiles, rows]."""
    follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    most = tl.full([TILES, ROWS], _EMPTY, tl.int64)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = partial + tile[:, None].to(tl.int64) * rows + row[None, :]
        inside = (tile < tiles)[:, None] & (row < rows)[None, :]
        most = tl.maximum(most, tl.load(at, mask=inside, other=_EMPTY))
    tl.store(out + row, tl.max(most, 0), mask=row < rows)


def head_keys(
    x: Tensor,
    weight: Tensor,
    rows: RowSampling | None,
    first_id: int,
    valid: int,
    scale: float | Tensor,
    tile: HeadTile | None = None,
) -> Tensor:
    """See `kernels.pick.head_keys`; writes no logits and no noise.

    Args:
        tile: that of the table unless given.
    """
    _check(x, weight, valid)
    (count, depth), columns = x.shape, weight.shape[0]
    keys = torch.empty(count, dtype=torch.int64, device=x.device)
    if count == 0 or valid == 0:
        return keys.fill_(_EMPTY.value)
    tile = tile or head_tile(columns, depth, count, x.dtype)
    skew = first_id % 4
    column_tiles = triton.cdiv(valid + skew, tile.columns)
    partial = torch.empty((column_tiles, count), dtype=torch.int64, device=x.device)
    table = (keys, keys, keys)  # stand in for tensors that are not touched
    first_row, rows_each = 0, 1
    if rows is not None:
        table = (rows.temperature, rows.seed, rows.position)
        first_row, rows_each = rows.first, rows.count
    strides = tuple(values.stride(0) for values in table)
    sampling = (first_row, rows_each, table[0].shape[0], first_id, valid, scale)
    grid = triton.cdiv(count, tile.rows) * column_tiles
    options = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "PIECE": tile.piece,
        "SKEW": skew,
        "NOISE": rows is not None,
        "SCALE_READ": isinstance(scale, Tensor),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,  # logit + T · G rounds as in `pick`
    }
    if tile.copied:
        x = addressable(x, weight)
        if tile.resident:
            grid = min(grid, _processors(x.device) * tile.resident)
        _copied[(grid,)](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
            partial, *table, *strides, count, depth, *sampling,
            GROUP=tile.group, RESIDENT=tile.resident, **options, **chained(x),
        )  # fmt: skip
    else:
        _by_address[(grid,)](
            x, weight, partial, *table, x.stride(0), *strides, count, columns, depth, *sampling,
            EVEN=depth % tile.depth == 0, **options, **chained(x),
        )  # fmt: skip
    return largest(partial, keys)


def largest(partial: Tensor, keys: Tensor) -> Tensor:
    """The keys [R], filled with the maximum of each row of [tiles, R]."""
    tiles, count = partial.shape
    wide = 1 if count <= 128 else 16
    _largest[(triton.cdiv(count, wide),)](
        partial, keys, count, tiles, ROWS=wide, TILES=1024 // wide, num_warps=4, **chained(keys)
    )
    return keys


def _check(x: Tensor, weight: Tensor, valid: int) -> None:
    """Refuse what the kernels would read wrongly."""
    if x.dtype not in _TYPES or weight.dtype != x.dtype:
        raise ConfigError(
            f"a head of {weight.dtype} on {x.dtype} rows; on a GPU both must be one of bfloat16, "
            "float16 and float32: set the engine's dtype"
        )
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ConfigError(
            f"head product of rows with strides {x.stride()} and a weight with strides "
            f"{weight.stride()}; rows must be dense and the weight contiguous: copy them first"
        )
    if not 0 <= valid <= weight.shape[0]:
        raise ConfigError(
            f"{valid} ids may be produced by a head of {weight.shape[0]} rows; at most its rows"
        )


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs that run at a time; two in the interpreter, so that each has several tiles."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
