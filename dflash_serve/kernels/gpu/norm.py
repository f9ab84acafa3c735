"""RMSNorm: one program a row, whose block follows from the width alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.launch import chained, follow

__all__ = ["check_weight_type", "rms_norm"]

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
    check_weight_type("the norm weight", weight, x)
    width = x.shape[-1]
    if width > _MAX_WIDTH:
        raise ConfigError(
            f"RMSNorm over {width} values; the kernel takes up to {_MAX_WIDTH}; "
            "serve this model on device 'cpu'"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer, inner, outer_stride, inner_stride, rows = _as_rows(x)
    block = max(int(triton.next_power_of_2(width)), 32)
    warps = min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)
    _rms_norm[(outer * inner,)](
        rows,
        weight,
        out,
        eps,
        inner,
        outer_stride,
        inner_stride,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps,
        **chained(x),
    )
    return out


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
    eps: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
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
    value = raw.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / WIDTH
    # Rounded to the type of x before the weight comes in, as in the published models.
    normal = (value * tl.rsqrt(mean + eps)).to(raw.dtype).to(tl.float32)
    result = (normal * scale).to(raw.dtype)
    tl.store(out + row.to(tl.int64) * WIDTH + column, result, mask=inside)
