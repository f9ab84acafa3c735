"""Inputs of the products of `kernels.linear`, and their results from the definition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_serve.kernels.backend import interpreted

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-6
TYPES = [torch.float32] + [torch.bfloat16] * CUDA


# Every product of a Qwen3-8B step: (N, K).
QWEN = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
    "fc": (4096, 20480),
    "draft_kv": (10240, 4096),
}


@contextlib.contextmanager
def through_triton() -> Iterator[None]:
    """Every call goes through Triton; float32 products of the reference keep all bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with contextlib.nullcontext() if CUDA else interpreted():
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


class Case:
    """Inputs of every product, and its result in float64 from the same rounded inputs.

    The norm is rounded where its definition rounds it: with a root mean square close to one, the
    normalised rows round back to the rows all together, and a product would carry the difference.
    """

    def __init__(self, rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
        self.x = rand(rows, depth, seed=1, dtype=dtype)
        self.weight = (rand(columns, depth, seed=2) / depth**0.5).to(dtype)
        self.norm = (rand(depth, seed=3).abs() + 0.5).to(dtype)
        self.residual = rand(rows, columns, seed=4, dtype=dtype)

    def plain(self) -> Tensor:
        return self.x.double() @ self.weight.double().T

    def normed(self) -> Tensor:
        h = self.x.double()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
        h = h.to(self.x.dtype) * self.norm
        return h.double() @ self.weight.double().T

    def gated(self) -> Tensor:
        return activated(self.normed())


def activated(product: Tensor) -> Tensor:
    """silu(gate) * up of columns gate, up, gate, up, …: [T, 2·I] → [T, I]."""
    gate, up = product[:, 0::2], product[:, 1::2]
    return gate * torch.sigmoid(gate) * up


def close(out: Tensor, expected: Tensor, scale: float = 1.0) -> bool:
    """Within rounding: of the sum in float32, of the inputs and intermediates in bfloat16."""
    bound = 1e-4 if out.dtype == torch.float32 else 2e-2
    difference = (out.double() - expected).abs()
    return bool((difference <= scale * bound * (1 + expected.abs())).all())
