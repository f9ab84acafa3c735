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

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.tiles import Tile, many_tile

__all__ = ["check_aligned", "finish", "product"]

_GROUP = 8  # row tiles that share the columns they read from L2
_ALIGNED_BYTES = 16  # what the copy engine asks of addresses and strides


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    acc, up, residual, out, row, column, rows, columns, residual_stride, KIND, GATED, ADD
):
    """Activation, residual and store of one part of a tile, rounded where the reference rounds."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if GATED:
        gate = acc.to(KIND).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(KIND).to(tl.float32) * up.to(KIND).to(tl.float32)
    if ADD:
        from_at = residual + row[:, None].to(tl.int64) * residual_stride + column[None, :]
        base = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
        acc = base + acc.to(KIND).to(tl.float32)
    to_at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(to_at, acc.to(out.dtype.element_ty), mask=inside)


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
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    HALVES: tl.constexpr,  # store a tile in two parts: less shared memory to turn it in
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
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row0, step * DEPTH])
            w = weight.load([column0, step * DEPTH])
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
            if GATED:
                u = weight.load([columns + column0, step * DEPTH])
                up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
        row = row0 + tl.arange(0, ROWS)
        kind: tl.constexpr = weight.dtype
        if HALVES:
            half: tl.constexpr = COLUMNS // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, half)), (0, 2, 1)))
            up_left, up_right = left, right
            if GATED:
                up_left, up_right = tl.split(tl.permute(tl.reshape(up, (ROWS, 2, half)), (0, 2, 1)))
            column = column0 + tl.arange(0, half)
            finish(
                left,
                up_left,
                residual,
                out,
                row,
                column,
                rows,
                columns,
                residual_stride,
                kind,
                GATED,
                ADD,
            )
            finish(
                right,
                up_right,
                residual,
                out,
                row,
                column + half,
                rows,
                columns,
                residual_stride,
                kind,
                GATED,
                ADD,
            )
        else:
            column = column0 + tl.arange(0, COLUMNS)
            finish(
                acc,
                up,
                residual,
                out,
                row,
                column,
                rows,
                columns,
                residual_stride,
                kind,
                GATED,
                ADD,
            )


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    halves: bool = True,
    persistent: bool = True,
) -> Tensor:
    """x @ weight.T with what follows it.

    Args:
        x: [T, K].
        weight: [N, K]; gate rows, then up rows when `gated`.
        tile: None takes it from the table.
        residual: [T, N] added to the result, or None.
        halves: store every tile in two parts.
        persistent: one program a processor; else one a tile, where several fit a processor.

    Returns:
        [T, N], or [T, N / 2] of silu(gate) * up when `gated`.
    """
    check_aligned(x, weight)
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    if tile is None:
        tile = many_tile(weight.shape[0], depth, rows, x.dtype, gated=gated)
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    programs = min(count, _processors(x.device)) if persistent else count
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
        GATED=gated,
        ADD=residual is not None,
        HALVES=halves,
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


def check_aligned(x: Tensor, weight: Tensor) -> None:
    """Refuse what the copy engine cannot address."""
    for name, tensor in (("rows", x), ("weight", weight)):
        stride = tensor.stride(0) * tensor.element_size()
        if stride % _ALIGNED_BYTES or tensor.data_ptr() % _ALIGNED_BYTES or tensor.stride(1) != 1:
            raise ConfigError(
                f"the {name} of a product through the copy engine lie {stride} bytes apart from "
                f"address {tensor.data_ptr():#x}; both must be multiples of {_ALIGNED_BYTES}: pad "
                "K, or take another tile"
            )
