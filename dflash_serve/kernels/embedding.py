"""Rows of the token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = ["embed_rows"]


def embed_rows(ids: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Embedding rows of the ids that `weight` holds, zeros for all others.

    Args:
        ids: [T] int64.
        weight: [rows, H], the embeddings of ids first…first+rows−1.

    Returns:
        [T, H].
    """
    if compiled(weight):
        from dflash_serve.kernels.gpu import embedding

        return embedding.embed_rows(ids, weight, first)
    rows = weight.shape[0]
    if rows == 0:
        return weight.new_zeros((ids.shape[0], weight.shape[1]))
    local = ids - first
    mine = (local >= 0) & (local < rows)
    found = F.embedding(local.clamp(0, rows - 1), weight)
    return torch.where(mine[:, None], found, 0)
