"""Triton products of few rows with a weight, with the activation and add that follow them.

One program owns a tile of columns and sums K in ascending order into a float32 accumulator. A row's
bits therefore do not depend on the other rows of the call, nor on the tile, as long as there are at
most `INVARIANT_ROWS` rows: plain decoding and verification give the same logits. (On Hopper
mma.sync and wgmma sum a step of K in the same way: measured.) Tiles with a mode run in
`linear_parts`; `linear_policy` says which products go to cuBLAS instead.

An RMSNorm before a product is a kernel of its own, which costs less than the products' programs
each normalising the rows again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear_large, linear_parts
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.linear_parts import check_parts, finish
from dflash_serve.kernels.gpu.linear_policy import use_library
from dflash_serve.kernels.gpu.linear_sum import part_sums
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, Tile, large_tile, tile_for
from dflash_serve.kernels.norm import add_norm, rms_norm

__all__ = ["gated_linear", "linear", "linear_add", "linear_add_norm", "product"]

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    residual,
    out,
    rows,
    columns,
    depth,
    x_stride,
    residual_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,  # K is whole steps
    GATED: tl.constexpr,
    JOINT: tl.constexpr,  # gate and up in one product of 2 · COLUMNS
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One [ROWS, COLUMNS] tile of the output; `columns` is the output's width."""
    # Row tiles of the same columns run side by side, so that the weight is read once.
    row_tiles = tl.cdiv(rows, ROWS)
    pid = tl.program_id(0)
    row = (pid % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = (pid // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    row_inside = (row < rows)[:, None]
    # Columns past the end compute the last one again: loads of the weight need no mask.
    wide: tl.constexpr = 2 * COLUMNS if JOINT else COLUMNS
    if JOINT:
        line = tl.minimum((pid // row_tiles) * wide + tl.arange(0, wide), 2 * columns - 1)
    else:
        line = tl.minimum(column, columns - 1) * (2 if GATED else 1)
    x_at = x + row[:, None].to(tl.int64) * x_stride + step[None, :]
    w_at = weight + line[:, None].to(tl.int64) * depth + step[None, :]
    up_at = w_at + depth

    follow(PDL)
    acc = tl.zeros((ROWS, wide), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if EVEN:
            a = tl.load(x_at + start, mask=row_inside, other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = (step < depth - start)[None, :]
            a = tl.load(x_at + start, mask=row_inside & inside, other=0.0)
            w = tl.load(w_at + start, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        if GATED and not JOINT:
            u = tl.load(up_at + start) if EVEN else tl.load(up_at + start, mask=inside, other=0.0)
            up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
    if JOINT:
        acc, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
    kind: tl.constexpr = weight.dtype.element_ty
    finish(acc, up, residual, out, row, column, rows, columns, residual_stride, kind, GATED, ADD)


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Any of the products of this module with a given tile.

    Args:
        x: [T, K].
        weight: [N, K]; gate and up rows in turn when `gated`.
        residual: [T, N] added to the result, or None.

    Returns:
        [T, N], or [T, N / 2] of silu(gate) * up when `gated`.
    """
    _check(x, weight)
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    check_parts(depth, tile, gated=gated)
    if tile.mode != "":
        return linear_parts.product(
            x, weight, tile, residual=residual, gated=gated, out_dtype=out_dtype
        )
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    across = tile.columns // (2 if tile.joint else 1)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, across),)
    _product[grid](
        x,
        weight,
        x if residual is None else residual,
        out,
        rows,
        columns,
        depth,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        ROWS=tile.rows,
        COLUMNS=across,
        DEPTH=tile.depth,
        EVEN=depth % tile.depth == 0,
        GATED=gated,
        JOINT=tile.joint,
        ADD=residual is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(x),
    )
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    """Refuse what the kernels would read wrongly."""
    if x.dtype not in _TYPES or weight.dtype != x.dtype:
        raise ConfigError(
            f"a product of {x.dtype} rows with a {weight.dtype} weight; on a GPU both must be one "
            "of bfloat16, float16 and float32: set the engine's dtype"
        )
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ConfigError(
            f"a product of rows with strides {x.stride()} and a weight with strides "
            f"{weight.stride()}; rows must be dense and the weight contiguous: copy them first"
        )


def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T: [T, K] by [N, K] → [T, N]."""
    if not _library(x, weight):
        return _own(x, weight, None, out_dtype)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight)
    if x.is_cuda and out_dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight).to(out_dtype)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, *, consume: bool = False) -> Tensor:
    """residual + x @ weight.T: [T, K], [N, K] and [T, N] → [T, N].

    With `consume` the result may take the memory of `residual`, whose contents are then gone.
    """
    if not _library(x, weight):
        # Beside the residual even if it may be consumed: a tile is read and written all the same.
        return _own(x, weight, residual, None)
    if consume:
        return residual.addmm_(x, weight.t())
    # The library copies the residual before it adds to it.
    return torch.addmm(residual, x, weight.t())


def linear_add_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, *, consume: bool = False
) -> tuple[Tensor, Tensor]:
    """s = residual + x @ weight.T and rms_norm(s): [T, K], [N, K], [T, N] and [N] → two [T, N].

    With `consume` s may take the memory of `residual`, whose contents are then gone.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows <= INVARIANT_ROWS and not _library(x, weight):
        tile = tile_for(columns, depth, rows, x.dtype)
        if tile.parts > 1:
            sums = part_sums(x, weight, tile)
            return add_norm(sums, residual, norm, eps, consume=consume)
    stream = linear_add(x, weight, residual, consume=consume)
    return stream, rms_norm(stream, norm, eps)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(g) * u for the columns g, u, g, u, … of x @ gate_up.T: [T, K] → [T, I].

    Args:
        x: [T, K].
        gate_up: [2·I, K]; row 2·i is gate i, row 2·i + 1 up i.
    """
    rows = x.shape[0]
    if rows > INVARIANT_ROWS:
        large = large_tile(gate_up.shape[0], gate_up.shape[1], rows, x.dtype, gated=True)
        if large is not None:
            return linear_large.product(x, gate_up, large, gated=True)
    if rows > INVARIANT_ROWS or _library(x, gate_up):
        return silu_mul(linear(x, gate_up))
    return _own(x, gate_up, None, None, gated=True)


def _own(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    gated: bool = False,
) -> Tensor:
    """The Triton product, where `_library` says no; `gated` with few rows only."""
    (rows, depth), columns = x.shape, weight.shape[0]
    if rows <= INVARIANT_ROWS:
        tile = tile_for(columns, depth, rows, x.dtype, gated=gated)
        return product(x, weight, tile, residual=residual, gated=gated, out_dtype=out_dtype)
    large = large_tile(columns, depth, rows, x.dtype)
    assert large is not None  # or the library would have it
    run = linear_large.product if large.mode == "" else product
    return run(x, weight, large, residual=residual, out_dtype=out_dtype)


def _library(x: Tensor, weight: Tensor) -> bool:
    return use_library(x.shape[0], (weight.shape[0], weight.shape[1]), x.dtype)
