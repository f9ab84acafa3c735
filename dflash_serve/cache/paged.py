"""Paged key/value tensors of one model."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PagedKV", "page_bytes"]


class PagedKV:
    """Keys and values of every layer of a model shard.

    Attributes:
        pool: [num_layers, 2, num_pages, page_size, kv_heads, head_dim], keys before values.
        layers: per layer (keys, values), views of the pool.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_pages, page_size, kv_heads, head_dim)
        self.page_size = page_size
        # Zeros, not garbage: masked keys must be finite, since 0 · NaN is NaN.
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [(both[0], both[1]) for both in self.pool]


def page_bytes(
    num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """Bytes of one page over all layers of a model shard."""
    return 2 * num_layers * page_size * kv_heads * head_dim * dtype_bytes
