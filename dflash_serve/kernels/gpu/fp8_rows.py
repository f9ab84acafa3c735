"""Triton: rows of activations in 8 bits, alone and for the end of another kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.fp8 import FP8, FP8_MAX, LEAST
from dflash_serve.kernels.gpu.launch import chained, follow

__all__ = ["empty_rows", "quantize_rows", "quantized"]

_MOST = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST)
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


@triton.jit
def _rounded(value):  # type: ignore[no-untyped-def]
    """The nearest numbers that the 8-bit type has, in float32; ties go to the even one."""
    exponent = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # A number of this size has no room for anything below a step.
    shift = tl.maximum(exponent * 0.125, 0.001953125) * 12582912.0
    return (value + shift) - shift


@triton.jit  # type: ignore[untyped-decorator]
def quantized(value, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 row, padded with 0, scaled to the 8-bit type's range, and its scale.

    ROUND: to the type's numbers, which the interpreter's cast would miss up to a power of two.
    """
    most = tl.maximum(tl.max(tl.abs(value), 0), _LEAST)
    scaled = value * tl.div_rn(_MOST, most)
    if ROUND:
        scaled = _rounded(scaled)
    return scaled, most * (1.0 / _MOST)


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled, of_row = quantized(value, ROUND)
    tl.store(out + row * WIDTH + column, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, of_row)


def empty_rows(shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for quantised rows [T, K] and their scales [T]."""
    data = torch.empty(shape, dtype=FP8, device=device)
    return data, torch.empty(shape[0], dtype=torch.float32, device=device)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.fp8.quantize_rows`; one program a row, whose bits depend on it alone."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, width = x.shape
    out, scale = empty_rows(x.shape, x.device)
    if rows:
        block = max(int(triton.next_power_of_2(width)), 32)
        _quantize_rows[(rows,)](
            x,
            out,
            scale,
            x.stride(0) if rows > 1 else width,
            WIDTH=width,
            BLOCK=block,
            ROUND=not x.is_cuda,
            num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS),
            **chained(x),
        )
    return out, scale
