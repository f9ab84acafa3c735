"""Paged key/value tensors of one model."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PagedKV", "page_bytes"]


class PagedKV:
    """Keys and values of every layer of a model shard.

    Attributes:
        layers: per layer (keys, values), each [num_pages, page_size, kv_heads, head_dim].
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
        shape = (num_pages, page_size, kv_heads, head_dim)
        self.page_size = page_size
        # Zeros, not garbage: masked keys must be finite, since 0 · NaN is NaN.
        self.layers: list[tuple[Tensor, Tensor]] = [
            (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]


def page_bytes(
    num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> int:
    """Bytes of one page over all layers of a model shard."""
    return 2 * num_layers * page_size * kv_heads * head_dim * dtype_bytes
