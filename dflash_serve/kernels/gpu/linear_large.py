"""A persistent Triton product for many rows: prefill chunks and large batches.

One program a processor walks over output tiles; x and weight come through tensor descriptors (the
copy engine on Hopper), and the loads of the next tile run while the last one is stored. Like the
product of few rows in one part it sums K in ascending order into one float32 accumulator, so that
a row's bits do not depend on the other rows.

Gate and up rows of a weight alternate, so that the thread that sums a gate has its up beside it:
with the activation inside, the product's loop is that of any other, and half as much is stored.

Between them the processors read their tiles from L2 no faster than about 9 TB/s. A tile of
128 · 256 keeps just ahead of that, one of 128 · 128 does not.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.linear_parts import activate, addressable, finish
from dflash_serve.kernels.gpu.tiles import COPY_BYTES, Tile

__all__ = ["product"]

_STORED_BYTES = 32 * 1024
"""Of a tile, turned in shared memory and stored at a time; half with a residual, turned too."""
_STORED_COLUMNS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The left and the right half of a tile; no number leaves its thread."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    acc, residual, out, row0, column0, rows, columns, residual_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """Residual and store of [ROWS, COLUMNS] of the output."""
    row = row0 + tl.arange(0, ROWS)
    column = column0 + tl.arange(0, COLUMNS)
    if COPIED:
        if ADD:
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            from_at = residual + row[:, None].to(tl.int64) * residual_stride + column[None, :]
            base = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
            acc = base + acc.to(KIND).to(tl.float32)
        out.store([row0, column0], acc.to(out.dtype))
    else:
        finish(
            acc, acc, residual, out, row, column, rows, columns, residual_stride, KIND, False, ADD
        )


@triton.jit  # type: ignore[untyped-decorator]
def _put_all(  # type: ignore[no-untyped-def]
    acc, residual, out, row0, column0, rows, columns, residual_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr, KIND: tl.constexpr,
    ADD: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """The same in pieces of PIECE columns, up to four: less shared memory to turn them in."""
    if COLUMNS <= PIECE:
        _put(
            acc, residual, out, row0, column0, rows, columns, residual_stride,
            ROWS, COLUMNS, KIND, ADD, COPIED,
        )  # fmt: skip
    else:
        half: tl.constexpr = COLUMNS // 2
        left, right = _halves(acc, ROWS, COLUMNS)
        if half <= PIECE:
            _put(
                left, residual, out, row0, column0, rows, columns, residual_stride,
                ROWS, half, KIND, ADD, COPIED,
            )  # fmt: skip
            _put(
                right, residual, out, row0, column0 + half, rows, columns, residual_stride,
                ROWS, half, KIND, ADD, COPIED,
            )  # fmt: skip
        else:
            quarter: tl.constexpr = COLUMNS // 4
            one, two = _halves(left, ROWS, half)
            three, four = _halves(right, ROWS, half)
            _put(
                one, residual, out, row0, column0, rows, columns, residual_stride,
                ROWS, quarter, KIND, ADD, COPIED,
            )  # fmt: skip
            _put(
                two, residual, out, row0, column0 + quarter, rows, columns, residual_stride,
                ROWS, quarter, KIND, ADD, COPIED,
            )  # fmt: skip
            _put(
                three, residual, out, row0, column0 + half, rows, columns, residual_stride,
                ROWS, quarter, KIND, ADD, COPIED,
            )  # fmt: skip
            _put(
                four, residual, out, row0, column0 + half + quarter, rows, columns,
                residual_stride, ROWS, quarter, KIND, ADD, COPIED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptors
    weight,
    residual,
    out,  # a descriptor if COPIED
    rows,
    columns,
    depth,
    residual_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    GATED: tl.constexpr,  # COLUMNS // 2 columns of the output from COLUMNS rows of the weight
    ADD: tl.constexpr,
    COPIED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tiles program_id, program_id + programs, …; descriptors pad with 0.

    A tile is [ROWS, COLUMNS] of the product; `columns` is the output's width.
    """
    kind: tl.constexpr = weight.dtype
    row_tiles = tl.cdiv(rows, ROWS)
    wide: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    column_tiles = tl.cdiv(columns, wide)
    steps = tl.cdiv(depth, DEPTH)
    follow(PDL)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True
    ):
        first = tile // (GROUP * column_tiles) * GROUP
        high = tl.minimum(row_tiles - first, GROUP)
        inner = tile % (GROUP * column_tiles)
        row0 = (first + inner % high) * ROWS
        column_tile = inner // high
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row0, step * DEPTH])
            w = weight.load([column_tile * COLUMNS, step * DEPTH])
            acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            gate, up = tl.split(tl.reshape(acc, (ROWS, wide, 2)))
            result = activate(gate, up, kind)
        else:
            result = acc
        _put_all(
            result, residual, out, row0, column_tile * wide, rows, columns, residual_stride,
            ROWS, wide, PIECE, kind, ADD, COPIED,
        )  # fmt: skip


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T, with its activation or with a residual added to it.

    Args:
        x: [T, K].
        weight: [N, K]; gate and up rows in turn when `gated`.
        tile: in one part; its columns are rows of the weight, gated or not.
        residual: [T, N] added to the result, or None; not with `gated`.
        out_dtype: that of x unless given.

    Returns:
        [T, N], or [T, N / 2] of silu(gate) * up when `gated`.

    Raises:
        ConfigError: a K that the copy engine cannot address.
    """
    share = 2 if gated else 1
    (rows, depth), columns, wide = x.shape, weight.shape[0] // share, tile.columns // share
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    x = addressable(x, weight)
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, wide)
    stored = _STORED_BYTES // (tile.rows * out.element_size()) // (1 if residual is None else 2)
    piece = min(wide, stored, _STORED_COLUMNS)
    copied = columns * out.element_size() % COPY_BYTES == 0 and piece * 4 >= wide
    _product[(min(count, _processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        x if residual is None else residual,
        TensorDescriptor.from_tensor(out, [tile.rows, piece]) if copied else out,
        rows,
        columns,
        depth,
        0 if residual is None else residual.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=tile.group,
        PIECE=piece,
        GATED=gated,
        ADD=residual is not None,
        COPIED=copied,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(x),
    )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    """Programs that run at a time; two in the interpreter, so that each has several tiles."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
