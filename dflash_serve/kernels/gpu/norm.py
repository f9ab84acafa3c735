"""RMSNorm, alone and behind the residual add: one program a row, its block given by the width.

A norm whose only reader multiplies in 8 bits rounds its rows to them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.fp8 import Fp8Rows
from dflash_serve.kernels.gpu.fp8_rows import empty_rows, quantized
from dflash_serve.kernels.gpu.launch import chained, follow

__all__ = ["add_norm", "add_norm_rows", "check_weight_type", "norm_rows", "rms_norm"]

_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16
_MAX_WIDTH = 65536
"""A row is held in registers; beyond this it does not fit."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Row-invariant RMSNorm over the last axis, in one launch.

    The bits of a row depend on its content and the width, not on the number of rows.

    Args:
        x: [..., width]; read in place where it is 2-D or 3-D with a dense last axis.
        weight: [width] of x's type.

    Returns:
        The same shape and type as x, contiguous.

    Raises:
        ConfigError: a weight of another type, or a width above 65,536.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, weight, eps, out, None)
    return out


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """See `kernels.fp8.norm_rows`; one launch, with the bits of `rms_norm` before it rounds."""
    data, scale = empty_rows(x.shape, x.device)
    _norm(x, weight, eps, data, scale)
    return Fp8Rows(data, scale, x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    """Fill `out`, and `scales` where the rows are wanted in 8 bits."""
    check_weight_type("the norm weight", weight, x)
    width = x.shape[-1]
    block, warps = _block(width)
    outer, inner, outer_stride, inner_stride, rows = _as_rows(x)
    _rms_norm[(outer * inner,)](
        rows,
        weight,
        out,
        out if scales is None else scales,
        eps,
        inner,
        outer_stride,
        inner_stride,
        WIDTH=width,
        BLOCK=block,
        FP8=scales is not None,
        ROUND=not x.is_cuda,
        num_warps=warps,
        **chained(x),
    )


def add_norm(
    delta: Tensor, stream: Tensor, weight: Tensor, eps: float, *, consume: bool = False
) -> tuple[Tensor, Tensor]:
    """See `kernels.norm.add_norm`; one launch, row-invariant, the bits of `rms_norm` on the sum.

    Args:
        delta: [T, H] or [parts, T, H], dense.
        stream: [T, H], dense.

    Raises:
        ConfigError: a weight of another type, or a width above 65,536.
    """
    out = torch.empty_like(stream, memory_format=torch.contiguous_format)
    return _add(delta, stream, weight, eps, out, None, consume=consume), out


def add_norm_rows(
    delta: Tensor, stream: Tensor, weight: Tensor, eps: float, *, consume: bool = False
) -> tuple[Tensor, Fp8Rows]:
    """See `kernels.fp8.add_norm_rows`; one launch, with the bits of `add_norm` before it rounds."""
    data, scale = empty_rows(stream.shape, stream.device)
    total = _add(delta, stream, weight, eps, data, scale, consume=consume)
    return total, Fp8Rows(data, scale, stream.dtype)


def _add(
    delta: Tensor,
    stream: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
    *,
    consume: bool,
) -> Tensor:
    """The new stream; fills `out`, and `scales` where the rows are wanted in 8 bits."""
    check_weight_type("the norm weight", weight, stream)
    rows, width = stream.shape
    block, warps = _block(width)
    delta, stream = delta.contiguous(), stream.contiguous()
    total = stream if consume else torch.empty_like(stream)
    if rows:
        _add_norm[(rows,)](
            delta,
            stream,
            weight,
            total,
            out,
            out if scales is None else scales,
            rows,
            eps,
            WIDTH=width,
            BLOCK=block,
            PARTS=delta.shape[0] if delta.dim() == 3 else 1,
            FP8=scales is not None,
            ROUND=not stream.is_cuda,
            num_warps=warps,
            **chained(stream),
        )
    return total


def _block(width: int) -> tuple[int, int]:
    """Values of a program and its warps for a row of a width.

    Raises:
        ConfigError: a width above 65,536.
    """
    if width > _MAX_WIDTH:
        raise ConfigError(
            f"RMSNorm over {width} values; the kernel takes up to {_MAX_WIDTH}; "
            "serve this model on device 'cpu'"
        )
    block = max(int(triton.next_power_of_2(width)), 32)
    return block, min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)


def check_weight_type(what: str, weight: Tensor, x: Tensor) -> None:
    """Refuse a weight whose type is not that of the activations.

    Raises:
        ConfigError: naming both types.
    """
    if weight.dtype != x.dtype:
        raise ConfigError(
            f"{what} is {weight.dtype} and the activations are {x.dtype}; both must have one "
            "type: load the checkpoint with dtype float32 or bfloat16 throughout"
        )


def _as_rows(x: Tensor) -> tuple[int, int, int, int, Tensor]:
    """outer, inner, their strides, and the tensor: row r is [r // inner, r % inner]."""
    width = x.shape[-1]
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = x.reshape(-1, width).contiguous()
    if x.dim() == 3 and x.shape[1] > 1:
        outer_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1] * width
        return x.shape[0], x.shape[1], outer_stride, x.stride(1), x
    # The stride of an axis of length 1 means nothing, but Triton compiles for its divisibility.
    return x.shape[0], 1, x.stride(0) if x.shape[0] > 1 else width, width, x


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    outer_row, inner_row = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    source = x + outer_row * outer_stride + inner_row * inner_stride
    raw = tl.load(source + column, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = _normal(raw, scale, eps, WIDTH)
    _put(out, scales, row.to(tl.int64), column, result, WIDTH, FP8, ROUND)


@triton.jit  # type: ignore[untyped-decorator]
def _normal(raw: tl.tensor, scale: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> Any:
    """RMSNorm of one row, padded with 0."""
    value = raw.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / WIDTH
    # Rounded to the type of the row before the weight comes in, as in the published models.
    normal = (value * tl.rsqrt(mean + eps)).to(raw.dtype).to(tl.float32)
    return (normal * scale).to(raw.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _put(
    out: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    result: tl.tensor,
    WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """Store one row, in 8 bits with its scale if FP8."""
    inside = column < WIDTH
    if FP8:
        scaled, of_row = quantized(result.to(tl.float32), ROUND)
        tl.store(scales + row, of_row)
        tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row * WIDTH + column, result, mask=inside)


# A row count that is 1 or a multiple of 16 gets no kernel of its own.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _add_norm(
    delta: tl.tensor,  # [PARTS, rows, WIDTH]
    stream: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(stream + row * WIDTH + column, mask=inside, other=0.0)
    added = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = delta + (part * rows + row) * WIDTH + column
        added += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = base.dtype
    raw = (base.to(tl.float32) + added.to(kind).to(tl.float32)).to(kind)
    tl.store(total + row * WIDTH + column, raw, mask=inside)
    _put(out, scales, row, column, _normal(raw, scale, eps, WIDTH), WIDTH, FP8, ROUND)
