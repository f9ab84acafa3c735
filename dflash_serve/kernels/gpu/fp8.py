"""Triton kernels of the 8-bit products of quantised rows with a weight.

Loads go through the copy engine; sums are float32, and both scales come in once a tile is summed.
Gate and up rows of a weight alternate, so that a product of both has a gate and its up side by
side. `fp8_tiles` says how a product is cut up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.fp8 import COPY_DEPTH, Fp8Rows, Fp8Weight
from dflash_serve.kernels.gpu.fp8_rows import quantize_rows
from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile, fp8_tile
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.norm import add_norm, add_norm_rows

__all__ = [
    "check_depth",
    "gated_linear",
    "linear",
    "linear_add_norm",
    "part_sums",
    "processors",
    "product",
]

_STORED_COLUMNS = tl.constexpr(128)
"""Of a tile, stored at a time where programs walk over the tiles."""


@triton.jit
def _activate(gate, up, KIND):  # type: ignore[no-untyped-def]
    """silu(gate) * up, both rounded before and the activation after it."""
    gate = gate.to(KIND).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(KIND).to(tl.float32) * up.to(KIND).to(tl.float32)


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,  # descriptors; they pad with 0
    weight,
    x_scale,
    w_scale,
    out,  # [PARTS, rows, columns], or half of the columns if GATED
    rows,
    columns,  # rows of the weight
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    SWAPPED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one part of K."""
    # Row tiles of the same weight run side by side, then the parts of the same output.
    row_tiles = tl.cdiv(rows, ROWS)
    row0 = tl.program_id(0) % row_tiles * ROWS
    rest = tl.program_id(0) // row_tiles
    part = rest % PARTS
    column0 = rest // PARTS * COLUMNS
    steps = tl.cdiv(depth, DEPTH) // PARTS
    follow(PDL)
    if SWAPPED:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(part * steps, part * steps + steps):
        a = x.load([row0, step * DEPTH])
        w = weight.load([column0, step * DEPTH])
        if SWAPPED:
            acc = tl.dot(w, tl.trans(a), acc, max_num_imprecise_acc=IMPRECISE)
        else:
            acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE)
    if SWAPPED:
        acc = tl.trans(acc)
    kind: tl.constexpr = out.dtype.element_ty
    row = row0 + tl.arange(0, ROWS)
    column = column0 + tl.arange(0, COLUMNS)
    of_row = tl.load(x_scale + row, mask=row < rows, other=0.0)
    of_column = tl.load(w_scale + column, mask=column < columns, other=0.0)
    acc = acc * of_row[:, None] * of_column[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS // 2, 2)))
        acc = _activate(gate, up, kind)
        column = column0 // 2 + tl.arange(0, COLUMNS // 2)
        columns = columns // 2
    line = (part * rows + row[:, None]).to(tl.int64) * columns
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + line + column[None, :], acc.to(kind), mask=inside)


@triton.jit
def _scaled(acc, of_row, w_scale, column0, columns, STRIDE):  # type: ignore[no-untyped-def]
    """A tile with both scales; its columns are every STRIDE-th row of the weight."""
    column = column0 + STRIDE * tl.arange(0, acc.shape[1])
    of_column = tl.load(w_scale + column, mask=column < columns, other=0.0)
    return acc * of_row[:, None] * of_column[None, :]


@triton.jit
def _halves(acc):  # type: ignore[no-untyped-def]
    """The left and the right half of a tile; no number leaves its thread."""
    wide: tl.constexpr = (acc.shape[0], 2, acc.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(acc, wide), (0, 2, 1)))


@triton.jit
def _put(acc, of_row, w_scale, out, row0, column0, columns, GATED):  # type: ignore[no-untyped-def]
    """Scale, activate and store a tile, half of it at a time where it is wide."""
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
        gate = _scaled(gate, of_row, w_scale, column0, columns, 2)
        up = _scaled(up, of_row, w_scale, column0 + 1, columns, 2)
        out.store([row0, column0 // 2], _activate(gate, up, out.dtype).to(out.dtype))
    elif acc.shape[1] > _STORED_COLUMNS:
        half: tl.constexpr = acc.shape[1] // 2
        left, right = _halves(acc)
        _put(left, of_row, w_scale, out, row0, column0, columns, False)
        _put(right, of_row, w_scale, out, row0, column0 + half, columns, False)
    else:
        value = _scaled(acc, of_row, w_scale, column0, columns, 1)
        out.store([row0, column0], value.to(out.dtype))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _walk(  # type: ignore[no-untyped-def]
    x,  # descriptors
    weight,
    x_scale,
    w_scale,
    out,  # a descriptor
    rows,
    columns,  # rows of the weight
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The tiles program_id, program_id + programs, …"""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    follow(PDL)
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
            acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=IMPRECISE)
        row = row0 + tl.arange(0, ROWS)
        of_row = tl.load(x_scale + row, mask=row < rows, other=0.0)
        _put(acc, of_row, w_scale, out, row0, column0, columns, GATED)


def linear(x: Tensor | Fp8Rows, weight: Fp8Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `kernels.fp8.linear`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    tile = fp8_tile(columns, depth, rows)
    return product(*_quantized(x), weight, tile, out_dtype or x.dtype)


def gated_linear(x: Tensor | Fp8Rows, gate_up: Fp8Weight) -> Tensor:
    """See `kernels.fp8.gated_linear`."""
    (rows, depth), columns = x.shape, gate_up.shape[0]
    tile = fp8_tile(columns, depth, rows, gated=True)
    return product(*_quantized(x), gate_up, tile, x.dtype, gated=True)


def _quantized(x: Tensor | Fp8Rows) -> tuple[Tensor, Tensor]:
    return (x.data, x.scale) if isinstance(x, Fp8Rows) else quantize_rows(x)


def linear_add_norm(
    x: Tensor,
    weight: Fp8Weight,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    *,
    quantized: bool = False,
    consume: bool = False,
) -> tuple[Tensor, Tensor | Fp8Rows]:
    """See `kernels.fp8.linear_add_norm`; parts of K are added up by the norm's kernel."""
    (rows, depth), columns = x.shape, weight.shape[0]
    tile = fp8_tile(columns, depth, rows, summed=True)
    data, scale = quantize_rows(x)
    if tile.parts > 1:
        delta = part_sums(data, scale, weight, tile)
    else:
        delta = product(data, scale, weight, tile, x.dtype)
    if quantized:
        return add_norm_rows(delta, residual, norm, eps, consume=consume)
    return add_norm(delta, residual, norm, eps, consume=consume)


def part_sums(data: Tensor, scale: Tensor, weight: Fp8Weight, tile: Fp8Tile) -> Tensor:
    """Sums of the parts of K, scaled: [T, K] by [N, K] → [parts, T, N] float32.

    Args:
        data, scale: of `quantize_rows`.

    Raises:
        ConfigError: as `product`, and parts that are no whole number of steps.
    """
    if data.shape[1] % (tile.parts * tile.depth) or tile.walks:
        raise ConfigError(
            f"an fp8 product over K = {data.shape[1]} in {tile.parts} parts of steps of "
            f"{tile.depth}; K must be a multiple of their product and each tile have a program "
            "of its own: choose another tile"
        )
    shape = (tile.parts, data.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=torch.float32, device=data.device)
    _launch(data, scale, weight, tile, out, gated=False)
    return out


def product(
    data: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    tile: Fp8Tile,
    out_dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """The product of quantised rows with a weight, for a tile of one part.

    Args:
        data, scale: of `quantize_rows`.
        weight: [N, K]; gate and up rows in turn when `gated`.

    Returns:
        [T, N], or [T, N / 2] of silu(gate) * up when `gated`.

    Raises:
        ConfigError: a tile in parts, or a K that the copy engine cannot address.
    """
    if tile.parts > 1:
        raise ConfigError(
            f"an fp8 product in {tile.parts} parts of K that nothing adds up; only `part_sums` "
            "has them: choose a tile of one part"
        )
    rows, columns = data.shape[0], weight.shape[0] // (2 if gated else 1)
    out = torch.empty((rows, columns), dtype=out_dtype, device=data.device)
    _launch(data, scale, weight, tile, out, gated=gated)
    return out


def _launch(
    data: Tensor, scale: Tensor, weight: Fp8Weight, tile: Fp8Tile, out: Tensor, *, gated: bool
) -> None:
    """Fill `out` with one kernel."""
    (rows, depth), columns = data.shape, weight.shape[0]
    if out.numel() == 0:
        return
    check_depth(depth)
    options: dict[str, Any] = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GATED": gated,
        "IMPRECISE": tile.depth if tile.exact else None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **chained(data),
    }
    boxes = (
        TensorDescriptor.from_tensor(data, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight.data, [tile.columns, tile.depth]),
    )
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    sizes = (rows, columns, depth)
    # Rows of the output that the copy engine cannot address are stored by a program a tile.
    if tile.walks and out.shape[1] * out.element_size() % COPY_DEPTH == 0:
        wide = tile.columns // 2 if gated else min(tile.columns, _STORED_COLUMNS.value)
        target = TensorDescriptor.from_tensor(out, [tile.rows, wide])
        _walk[(min(count, processors(data.device)),)](
            *boxes, scale, weight.scale, target, *sizes, GROUP=tile.group, **options
        )
    else:
        _product[(count * tile.parts,)](
            *boxes, scale, weight.scale, out, *sizes, PARTS=tile.parts, SWAPPED=tile.swapped,
            **options,
        )  # fmt: skip


def check_depth(depth: int) -> None:
    """Refuse a K that the copy engine cannot address.

    Raises:
        ConfigError: naming it.
    """
    if depth % COPY_DEPTH:
        raise ConfigError(
            f"an fp8 product over K = {depth}; the copy engine needs a multiple of {COPY_DEPTH}: "
            "leave draft_quantization out"
        )


@functools.cache
def processors(device: torch.device) -> int:
    """Programs that run at a time; two in the interpreter, so that each has several tiles."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
