"""The gated activation of Llama-style MLPs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.gpu.launch import chained, follow

__all__ = ["silu_mul"]

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in one launch: columns gate, up, gate, up, … of [T, 2·I] → [T, I].

    Columns that do not lie side by side are copied first.

    Elementwise, hence row-invariant. The activation is rounded to the type of `gate_up` before
    the multiplication, as torch does.
    """
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    stride = gate_up.stride(0) if rows > 1 else 2 * width
    grid = (rows, triton.cdiv(width, _BLOCK))
    _silu_mul[grid](gate_up, out, stride, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **chained(out))
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    raw = tl.load(gate_up + row * stride + both, mask=both < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(raw, (BLOCK, 2)))
    gate = gate.to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(raw.dtype).to(tl.float32)
    result = (active * up.to(tl.float32)).to(raw.dtype)
    tl.store(out + row * WIDTH + column, result, mask=column < WIDTH)
