"""Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Push the singular values of a stack of matrices to about one (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x


class Muon:
    """Momentum whose update is orthogonalised; equal shapes are handled in one stack."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[parameter.shape].append(parameter)
        self.momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, beta: float) -> None:
        """Apply one update with learning rate ``rate`` and momentum ``beta``."""
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group])
            momentum = self.momentum[shape]
            momentum.lerp_(gradient, 1 - beta)
            update = orthogonalise(gradient.lerp(momentum, beta)).to(gradient.dtype)
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-scale)


class Optimiser:
    """One interface over Muon + AdamW, or AdamW alone."""

    def __init__(
        self, model: nn.Module, kind: str, rate: float, adam_rate: float, weight_decay: float
    ) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.parameters = matrices + others
        self.rate, self.adam_rate = rate, adam_rate
        self.muon = Muon(matrices, weight_decay) if kind == "muon" else None
        groups = [{"params": others, "weight_decay": 0.0}]
        if self.muon is None:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        self.adam = torch.optim.AdamW(
            groups, lr=adam_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda
        )

    def step(self, scale: float, progress: float) -> None:
        """Clip, update with ``scale`` times the base rates, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        if self.muon is not None:
            self.muon.step(self.rate * scale, 0.85 + 0.10 * min(1.0, progress * 20))
        for parameter in self.parameters:
            parameter.grad = None
