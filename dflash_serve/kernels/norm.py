"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32, cast back to x's type.

    The cast comes before the multiplication by `weight`, as in the published models.
    """
    if compiled(x):
        from dflash_serve.kernels.gpu import norm

        return norm.rms_norm(x, weight, eps)
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)
