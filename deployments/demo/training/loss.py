"""Cross-entropy over the target's head, computed in slices with its gradient at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .fused import row_facts, spread

SLICE_BLOCKS = 1024


def row_weights(rows: int, gamma: float, device: torch.device) -> Tensor:
    """Return ``exp(-(k - 1) / gamma)`` for rows 1..rows."""
    return torch.tensor([math.exp(-k / gamma) for k in range(rows)], device=device)


def _slice_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor, static: Tensor, reach: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss sum, the gradient of ``hidden [R, H]`` and which rows are right."""
    logits = F.linear(hidden, head)
    lse, label_logit, top = row_facts(logits, labels)
    log_p, weight = _weigh(lse, label_logit, valid, static, reach)
    probabilities = spread(logits, lse, weight.flatten())
    grad = torch.mm(probabilities, head)
    grad -= weight.flatten()[:, None].to(hidden.dtype) * F.embedding(labels, head)
    return -(log_p * weight).sum(), grad, label_logit >= top


def _weigh(
    lse: Tensor, label_logit: Tensor, valid: Tensor, static: Tensor, reach: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and row weights ``[blocks, rows]``.

    With ``reach`` a row counts as much as the draft believes in all the rows before it, which is
    how often verification gets there.
    """
    log_p = (label_logit - lse).view(-1, static.shape[0])
    before = torch.cumsum(log_p, dim=1) - log_p
    weight = static * (1.0 - reach) + reach * before.exp()
    return log_p, weight * valid


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy per block; never holds more than one slice of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        static: Tensor,
        reach: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss per block and the accepted counts ``[blocks]``."""
        blocks, rows, width = hidden.shape
        gradient = torch.empty_like(hidden)
        accepted = torch.empty(blocks, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for at in range(0, blocks, SLICE_BLOCKS):
            part = slice(at, at + SLICE_BLOCKS)
            loss, grad, right = _slice_loss(
                hidden[part].reshape(-1, width),
                head,
                labels[part].flatten(),
                valid[part].float(),
                static,
                reach,
            )
            total += loss
            gradient[part] = grad.view(-1, rows, width)
            hits = right.view(-1, rows) & valid[part]
            accepted[part] = hits.int().cumprod(dim=1).sum(dim=1).float()
        ctx.save_for_backward(gradient)
        ctx.blocks = blocks
        ctx.mark_non_differentiable(accepted)
        return total / blocks, accepted

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradient."""
        (gradient,) = ctx.saved_tensors
        return gradient * (grad_loss / ctx.blocks).to(gradient.dtype), None, None, None, None, None
