"""A persistent Triton product for many rows: prefill chunks and large batches.

One program a processor walks over output tiles; x and weight come through tensor descriptors (the
copy engine on Hopper). Like the product of few rows in one part it sums K in ascending order into
one float32 accumulator, so that a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.kernels.gpu.linear_parts import addressable, finish
from dflash_serve.kernels.gpu.tiles import Tile

__all__ = ["product"]

_GROUP = 8  # row tiles that share the columns they read from L2


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptors
    weight,
    residual,
    out,
    rows,
    columns,
    depth,
    residual_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The [ROWS, COLUMNS] tiles program_id, program_id + programs, …; descriptors pad with 0."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True
    ):
        first = tile // (GROUP * column_tiles) * GROUP
        high = tl.minimum(row_tiles - first, GROUP)
        inner = tile % (GROUP * column_tiles)
        row0 = (first + inner % high) * ROWS
        column0 = inner // high * COLUMNS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row0, step * DEPTH])
            w = weight.load([column0, step * DEPTH])
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        row = row0 + tl.arange(0, ROWS)
        kind: tl.constexpr = weight.dtype
        # Stored in two halves: less shared memory to turn the tile in.
        half: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, half)), (0, 2, 1)))
        column = column0 + tl.arange(0, half)
        finish(
            left, left, residual, out, row, column, rows, columns, residual_stride, kind, False, ADD
        )  # fmt: skip
        column += half
        finish(
            right, right, residual, out, row, column, rows, columns, residual_stride, kind, False,
            ADD,
        )  # fmt: skip


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T: [T, K] by [N, K] → [T, N], to which `residual` [T, N] is added."""
    (rows, depth), columns = x.shape, weight.shape[0]
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    x = addressable(x, weight)
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    programs = min(count, _processors(x.device))
    _product[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        x if residual is None else residual,
        out,
        rows,
        columns,
        depth,
        0 if residual is None else residual.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=_GROUP,
        ADD=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs that run at a time; two in the interpreter, so that each has several tiles."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
