"""Matrix products of activations with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FEW_ROWS", "linear"]

FEW_ROWS = 32
"""Up to this many rows a float32 CPU product is bound by reading the weight."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T: [T, K] by [N, K] → [T, N].

    On CPU with few rows in float32 the product is taken as weight @ x.T with at least two
    columns: the library then streams the weight once at memory speed, where its usual form
    takes two to four times as long (measured by `dflash-serve bench step`).
    """
    rows = x.shape[0]
    if x.device.type != "cpu" or x.dtype != torch.float32 or rows > FEW_ROWS:
        return F.linear(x, weight)
    if rows == 1:
        x = torch.cat((x, x))
    # Contiguous on both sides: the product is several times slower for other layouts.
    return torch.mm(weight, x.contiguous().t())[:, :rows].t().contiguous()
