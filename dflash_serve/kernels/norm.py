"""RMSNorm, alone and with the residual add in front of it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32, cast back to x's type.

    The cast comes before the multiplication by `weight`, as in the published models.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual stream after adding `x`, and its norm: returns (norm(s), s), s = x + residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total
