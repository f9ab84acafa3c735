"""Triton products of few rows with a weight, with the norm, activation and add that surround them.

One program owns a tile of columns and sums K in ascending order into a float32 accumulator. K is
cut into `Tile.parts` equal parts, a number that belongs to the shape of the weight: each is summed
from zero, and their sums are added in ascending order. A row's bits therefore do not depend on the
other rows of the call, nor on the rest of the tile, as long as there are at most `INVARIANT_ROWS`
rows: plain decoding and verification give the same logits. (On Hopper mma.sync and wgmma sum a step
of K in the same way: measured.) `linear_policy` says which products go to cuBLAS instead; tiles
with a mode run in `linear_parts`.

Where the norm of the input is computed, and what that means for a row's bits:

* rstd and apart: one program a row sums the squares with a layout that only the width decides.
  The product then multiplies exactly the rows that `kernels.norm.rms_norm` would give, whether it
  normalises them itself while it loads them (few rows: one pass less over x) or reads them
  normalised (many rows: every program would repeat the arithmetic).
* loop: no second kernel. The squares are summed on the tensor cores as the diagonal of x @ x.T,
  in the order of K in which the product itself is summed: a reduction across lanes would follow the
  layout, hence the row tile. Reading the diagonal adds zeros to one number, in whatever order.
  The norm's weight is multiplied into x before the product and 1 / rms into its result, which
  rounds once less than the reference.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear_large, linear_parts
from dflash_serve.kernels.gpu.linear_parts import check_parts, turn
from dflash_serve.kernels.gpu.linear_policy import use_library
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, Fold, Tile, fold_for, tile_for
from dflash_serve.kernels.norm import rms_norm

__all__ = ["Ahead", "linear", "linear_add", "norm_gated", "norm_linear", "product", "row_norm"]

_LINE_BYTES = 128
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _row_norm(  # type: ignore[no-untyped-def]
    x, norm, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, APPLY: tl.constexpr
):
    """1 / rms of one row, or the row normalised."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    h = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / WIDTH + eps)
    if APPLY:
        weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        h = (h * scale).to(values.dtype).to(tl.float32) * weight
        tl.store(out + row * WIDTH + at, h.to(values.dtype), mask=inside)
    else:
        tl.store(out + row, scale)


@triton.jit
def _fetch_ahead(ahead, lines, row_lines, depth, SPAN, LINE):  # type: ignore[no-untyped-def]
    """Ask for this program's share of the first `row_lines` cache lines of every row."""
    for first in range(tl.program_id(0) * SPAN, lines, tl.num_programs(0) * SPAN):
        at = tl.minimum(first + tl.arange(0, SPAN), lines - 1)
        address = ahead + (at // row_lines).to(tl.int64) * depth + at % row_lines * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [address.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    norm,
    scale,
    residual,
    out,
    ahead,
    rows,
    columns,
    depth,
    x_stride,
    residual_stride,
    eps,
    ahead_lines,
    ahead_row_lines,
    ahead_depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,  # K is whole steps
    NORM: tl.constexpr,  # "", "rstd" or "loop"
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines asked for at a time, 0 for none
    LINE: tl.constexpr,  # elements of one
    PRECISION: tl.constexpr,
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
    line = tl.minimum(column, columns - 1).to(tl.int64)
    x_at = x + row[:, None].to(tl.int64) * x_stride + step[None, :]
    w_at = weight + line[:, None] * depth + step[None, :]
    up_at = w_at + columns.to(tl.int64) * depth
    if NORM == "rstd":
        row_scale = tl.load(scale + row, mask=row < rows, other=0.0)

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    gram = tl.zeros((ROWS, ROWS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_total = tl.zeros((ROWS, COLUMNS), tl.float32)
    span = depth // PARTS
    for start in range(0, depth, DEPTH):
        if EVEN:
            a = tl.load(x_at + start, mask=row_inside, other=0.0)
            w = tl.load(w_at + start)
        else:
            inside = (step < depth - start)[None, :]
            a = tl.load(x_at + start, mask=row_inside & inside, other=0.0)
            w = tl.load(w_at + start, mask=inside, other=0.0)
        if NORM != "":
            if EVEN:
                gain = tl.load(norm + start + step).to(tl.float32)
            else:
                gain = tl.load(norm + start + step, mask=step < depth - start, other=0.0)
                gain = gain.to(tl.float32)
            if NORM == "loop":
                gram = tl.dot(a, tl.trans(a), gram, input_precision=PRECISION)
                a = (a.to(tl.float32) * gain[None, :]).to(a.dtype)
            else:
                h = (a.to(tl.float32) * row_scale[:, None]).to(a.dtype)
                a = (h.to(tl.float32) * gain[None, :]).to(a.dtype)
        acc = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
        if GATED:
            u = tl.load(up_at + start) if EVEN else tl.load(up_at + start, mask=inside, other=0.0)
            up = tl.dot(a, tl.trans(u), up, input_precision=PRECISION)
        if PARTS > 1:
            ends = (start + DEPTH) % span == 0
            total, acc = turn(total, acc, ends)
            if GATED:
                up_total, up = turn(up_total, up, ends)
    if PARTS > 1:
        acc, up = total, up_total

    if NORM == "loop":
        diagonal = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        squares = tl.sum(tl.where(diagonal, gram, 0.0), axis=1)
        after = tl.rsqrt(squares / depth + eps)
        acc = acc * after[:, None]
        up = up * after[:, None]
    # Every intermediate is rounded where the reference rounds it.
    inside = row_inside & (column < columns)[None, :]
    kind: tl.constexpr = weight.dtype.element_ty
    if GATED:
        gate = acc.to(kind).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    if ADD:
        from_at = residual + row[:, None].to(tl.int64) * residual_stride + column[None, :]
        base = tl.load(from_at, mask=inside, other=0.0).to(tl.float32)
        acc = base + acc.to(kind).to(tl.float32)
    to_at = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(to_at, acc.to(out.dtype.element_ty), mask=inside)
    if AHEAD:
        _fetch_ahead(ahead, ahead_lines, ahead_row_lines, ahead_depth, AHEAD, LINE)


@dataclasses.dataclass(frozen=True, eq=False)
class Ahead:
    """A weight that a later product reads, to be brought into L2 while memory would idle.

    Attributes:
        weight: [N, K].
        depth: how many leading elements of every row; what a product reads first.
    """

    weight: Tensor
    depth: int


def row_norm(x: Tensor, norm: Tensor, eps: float, *, apply: bool) -> Tensor:
    """1 / rms of every row, [T] float32, or with `apply` the rows normalised: [T, K] → [T, K]."""
    rows, width = x.shape
    out = torch.empty_like(x) if apply else x.new_empty(rows, dtype=torch.float32)
    # The width alone decides the layout of the sum, and with it a row's bits; it is the layout of
    # `kernels.gpu.norm`.
    block = max(triton.next_power_of_2(width), 32)
    warps = min(max(block // 512, 1), 16)
    _row_norm[(rows,)](
        x, norm, out, x.stride(0), eps, WIDTH=width, BLOCK=block, APPLY=apply, num_warps=warps
    )
    return out


def product(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    fold: Fold = "rstd",
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    ahead: Ahead | None = None,
) -> Tensor:
    """Any of the products of this module with a given tile.

    Args:
        x: [T, K].
        weight: [N, K]; gate rows, then up rows when `gated`.
        norm: [K] weight of the RMSNorm of x, or None.
        fold: where that is computed.
        residual: [T, N] added to the result, or None.
        ahead: fetched at the end; changes nothing but time. Tiles with a mode fetch nothing.

    Returns:
        [T, N], or [T, N / 2] when `gated`.
    """
    _check(x, weight)
    (rows, depth), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    check_parts(depth, tile)
    scale = x
    # The two folds that are bit-equal are one to tiles with a mode.
    if norm is not None and (fold == "apart" or (tile.mode != "" and fold == "rstd")):
        x, norm = row_norm(x, norm, eps, apply=True), None
    elif norm is not None and fold == "rstd":
        scale = row_norm(x, norm, eps, apply=False)
    if tile.mode != "":
        if norm is not None:
            raise ConfigError(f"a tile of mode {tile.mode!r} with fold 'loop'; only mode '' has it")
        return linear_parts.product(
            x, weight, tile, residual=residual, gated=gated, out_dtype=out_dtype
        )
    line = _LINE_BYTES // weight.element_size()
    later, row_lines = weight, 1
    if ahead is not None:
        later, row_lines = ahead.weight, max(1, min(ahead.depth, ahead.weight.shape[1]) // line)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _product[grid](
        x,
        weight,
        x if norm is None else norm,
        scale,
        x if residual is None else residual,
        out,
        later,
        rows,
        columns,
        depth,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        later.shape[0] * row_lines,
        row_lines,
        later.shape[1],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        EVEN=depth % tile.depth == 0,
        NORM="" if norm is None else fold,
        GATED=gated,
        ADD=residual is not None,
        # The interpreter knows no assembly, and has no cache to fill.
        AHEAD=32 * tile.warps if ahead is not None and x.is_cuda else 0,
        LINE=line,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
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
        if x.shape[0] <= INVARIANT_ROWS:
            return product(x, weight, _tile(x, weight), out_dtype=out_dtype)
        return linear_large.product(x, weight, out_dtype=out_dtype)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight)
    if x.is_cuda and out_dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight).to(out_dtype)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + x @ weight.T: [T, K], [N, K] and [T, N] → [T, N]."""
    if _library(x, weight):
        return torch.addmm(residual, x, weight.t())
    if x.shape[0] <= INVARIANT_ROWS:
        return product(x, weight, _tile(x, weight), residual=residual)
    return linear_large.product(x, weight, residual=residual)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(x) @ weight.T: [T, K] with norm weight [K] and [N, K] → [T, N]."""
    rows = x.shape[0]
    if rows > INVARIANT_ROWS or _library(x, weight):
        return linear(rms_norm(x, norm, eps), weight)
    return product(x, weight, _tile(x, weight), norm=norm, eps=eps, fold=fold_for(rows))


def norm_gated(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """silu(g) * u with g | u = rms_norm(x) @ gate_up.T: [T, K] and [2·I, K] → [T, I]."""
    rows = x.shape[0]
    if _library(x, gate_up, gated=True):
        return silu_mul(F.linear(rms_norm(x, norm, eps), gate_up))
    tile = _tile(x, gate_up, gated=True)
    return product(x, gate_up, tile, norm=norm, eps=eps, fold=fold_for(rows), gated=True)


def _library(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    return use_library(x.shape[0], (weight.shape[0], weight.shape[1]), x.dtype, gated=gated)


def _tile(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tile:
    return tile_for(weight.shape[0], weight.shape[1], x.shape[0], x.dtype, gated=gated)
