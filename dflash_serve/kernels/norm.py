"""RMSNorm, alone and behind the residual add."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["add_norm", "rms_norm"]


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


def add_norm(
    delta: Tensor, stream: Tensor, weight: Tensor, eps: float, *, consume: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream with an addend, and the RMSNorm of that: what stands between two layers.

    Args:
        delta: [T, H] of the stream's type, or [parts, T, H] float32 whose sum over the parts, in
            ascending order, is rounded to the stream's type first.
        stream: [T, H].
        weight: [H].
        consume: the new stream may take the memory of `stream`, whose contents are then gone.

    Returns:
        stream + delta and rms_norm(stream + delta), both [T, H].
    """
    if compiled(stream):
        from dflash_serve.kernels.gpu import norm

        return norm.add_norm(delta, stream, weight, eps, consume=consume)
    if delta.dim() == 3:
        total = torch.zeros_like(delta[0])
        for part in delta:
            total += part
        delta = total.to(stream.dtype)
    stream = stream.add_(delta) if consume else stream + delta
    return stream, rms_norm(stream, weight, eps)
