"""From the joint q/k/v product to rotated queries, and keys and values in their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.kernels.attention import write_pages
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.rope import apply_rope

__all__ = ["rope_and_store"]


def rope_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
    num_heads: int,
) -> Tensor:
    """Normalise q and k per head where the family does, rotate both, store k and v.

    Args:
        qkv: [T, (num_heads + 2 · kv_heads) · head_dim], q then k then v.
        q_norm, k_norm: [head_dim], or None for both.
        rope: [positions, head_dim] float32 table of `rope_table`.
        positions, slots: [T] int64; slots are page · page_size + offset.
        pages: keys and values, [num_pages, page_size, kv_heads, head_dim], changed in place.

    Returns:
        queries [T, num_heads, head_dim].
    """
    if compiled(qkv):
        from dflash_serve.kernels.gpu import qkv as kernels

        return kernels.rope_and_store(
            qkv, q_norm, k_norm, eps, rope, positions, slots, pages, num_heads
        )
    kv_heads, head_dim = pages[0].shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
    cos_sin = rope[positions]
    write_pages(pages[0], slots, apply_rope(key, cos_sin))
    write_pages(pages[1], slots, value)
    return apply_rope(query, cos_sin)
