"""Element-wise building blocks with gradients, compiled where a GPU is present."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` for the GPU; run it as written elsewhere.

    The result takes ``fixed=True`` from callers that always pass the same shapes, which selects a
    variant specialised for them.
    """
    by_shape = {True: function, False: function}
    if torch.cuda.is_available():
        by_shape = {fixed: torch.compile(function, dynamic=not fixed) for fixed in by_shape}

    @wraps(function)
    def call(*arguments: Any, fixed: bool = False) -> Any:
        return by_shape[fixed](*arguments)

    return call


@compiled
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32 and scale it."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


@compiled
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised sum and the sum."""
    total = x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), total


@compiled
def swiglu(gate_up: Tensor) -> Tensor:
    """Apply ``silu(gate) * up`` to a fused projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@compiled
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``[..., heads, dim]`` by ``cos``/``sin`` of shape ``[..., dim // 2]``."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


@compiled
def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalise each head, then rotate it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    half = x.shape[-1] // 2
    a, b = wide[..., :half], wide[..., half:]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)


def rope_tables(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables ``[length, dim // 2]`` in float32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] / theta**exponent
    return angles.cos(), angles.sin()
