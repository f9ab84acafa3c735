"""The head product of 8-bit numbers that keeps the best (score, id) of every tile.

The sums are those of `gpu.fp8` with the same tile, scaled and rounded as there; scores and keys are
those of `head_pick`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.fp8 import Fp8Weight
from dflash_serve.kernels.gpu.fp8 import check_depth, processors
from dflash_serve.kernels.gpu.fp8_rows import quantize_rows
from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile, head_tile
from dflash_serve.kernels.gpu.head_pick import largest, pick_keys
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.rows import RowSampling

__all__ = ["head_keys"]

_KINDS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_CHANGING = ["rows", "first_row", "requests", "valid"]
"""Of these, 1 and multiples of 16 get no kernel of their own."""
_EMPTY = -(2**63)
_SCANNED = tl.constexpr(256)


@triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator]
def _scaled_keys(  # type: ignore[no-untyped-def]
    x, weight, x_scale, w_scale, partial, temperatures, seeds, positions,
    temperature_stride, seed_stride, position_stride,
    rows, depth, first_row, count, requests, first_id, valid, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PIECE: tl.constexpr,
    GROUP: tl.constexpr, WALKS: tl.constexpr, SWAPPED: tl.constexpr, IMPRECISE: tl.constexpr,
    SKEW: tl.constexpr, NOISE: tl.constexpr, SCALE_READ: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Keys of the tiles program_id, program_id + programs, … → partial [column tiles, rows].

    x and weight are descriptors, which pad with 0. Tiles start with whole blocks of 4 ids, hence
    SKEW columns before the first.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(valid + SKEW, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    tl.assume(steps > 0)
    follow(PDL)
    factor = tl.load(scale) if SCALE_READ else scale
    noisy = not WALKS
    if NOISE and WALKS:
        # Once for all tiles: a look at each tile's own rows would cost more than scoring it.
        most = tl.zeros([_SCANNED], tl.float32)
        for first in range(0, requests, _SCANNED):
            request = first + tl.arange(0, _SCANNED)
            at = temperatures + request.to(tl.int64) * temperature_stride
            most = tl.maximum(most, tl.load(at, mask=request < requests, other=0.0).to(tl.float32))
        noisy = tl.max(most, 0) > 0.0
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=WALKS
    ):
        first = tile // (GROUP * column_tiles) * GROUP
        high = tl.minimum(row_tiles - first, GROUP)
        inner = tile % (GROUP * column_tiles)
        row0 = (first + inner % high) * ROWS
        column_tile = inner // high
        column0 = column_tile * COLUMNS - SKEW
        if SWAPPED:
            acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        else:
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row0, step * DEPTH])
            w = weight.load([column0, step * DEPTH])
            if SWAPPED:
                acc = tl.dot(w, tl.trans(a), acc, max_num_imprecise_acc=IMPRECISE)
            else:
                acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE)
        if SWAPPED:
            acc = tl.trans(acc)
        row = row0 + tl.arange(0, ROWS)
        column = column0 + tl.arange(0, COLUMNS)
        of_row = tl.load(x_scale + row, mask=row < rows, other=0.0)
        inside = (column >= 0) & (column < valid)
        of_column = tl.load(w_scale + column, mask=inside, other=0.0)
        logits = (acc * of_row[:, None] * of_column[None, :]).to(KIND)
        keys = pick_keys(
            logits, column0, row, rows, first_id, valid, factor, noisy,
            temperatures, seeds, positions, temperature_stride, seed_stride, position_stride,
            first_row, count, PIECE, NOISE,
        )  # fmt: skip
        tl.store(partial + column_tile.to(tl.int64) * rows + row, keys, mask=row < rows)


def head_keys(
    x: Tensor,
    weight: Fp8Weight,
    rows: RowSampling | None,
    first_id: int,
    valid: int,
    scale: float | Tensor,
    tile: Fp8Tile | None = None,
) -> Tensor:
    """See `kernels.pick.head_keys`; writes no logits and no noise.

    Args:
        x: [R, K], quantised here.
        tile: of one part; that of the table or rule unless given.

    Raises:
        ConfigError: more ids than the head has rows, or a K that the copy engine cannot address.
    """
    (count, depth), columns = x.shape, weight.shape[0]
    check_depth(depth)
    if not 0 <= valid <= columns:
        raise ConfigError(
            f"{valid} ids may be produced by a head of {columns} rows; at most its rows"
        )
    keys = torch.empty(count, dtype=torch.int64, device=x.device)
    if count == 0 or valid == 0:
        return keys.fill_(_EMPTY)
    tile = tile or head_tile(columns, depth, count)
    data, of_rows = quantize_rows(x)
    skew = first_id % 4
    column_tiles = triton.cdiv(valid + skew, tile.columns)
    partial = torch.empty((column_tiles, count), dtype=torch.int64, device=x.device)
    table = (keys, keys, keys)  # stand in for tensors that are not touched
    first_row, rows_each = 0, 1
    if rows is not None:
        table = (rows.temperature, rows.seed, rows.position)
        first_row, rows_each = rows.first, rows.count
    programs = triton.cdiv(count, tile.rows) * column_tiles
    _scaled_keys[(min(programs, processors(x.device)) if tile.walks else programs,)](
        TensorDescriptor.from_tensor(data, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight.data, [tile.columns, tile.depth]),
        of_rows, weight.scale, partial, *table, *(values.stride(0) for values in table),
        count, depth, first_row, rows_each, table[0].shape[0], first_id, valid, scale,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PIECE=_piece(tile),
        GROUP=tile.group,
        WALKS=tile.walks,
        SWAPPED=tile.swapped,
        IMPRECISE=tile.depth if tile.exact else None,
        SKEW=skew,
        NOISE=rows is not None,
        SCALE_READ=isinstance(scale, Tensor),
        KIND=_KINDS[x.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,  # logit + T · G rounds as in `pick`
        **chained(x),
    )  # fmt: skip
    return largest(partial, keys)


def _piece(tile: Fp8Tile) -> int:
    """Most columns scored at a time: fewer where the tile alone takes many registers."""
    return 64 if tile.rows * tile.columns <= 32 * 32 * tile.warps else 32
