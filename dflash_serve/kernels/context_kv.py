"""Keys and values of the draft's context, straight from the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.kernels.attention import write_pages
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.rope import apply_rope

__all__ = ["store_context", "valid_slots"]


def store_context(
    kv: Tensor,
    key_norms: Tensor,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
) -> None:
    """Write every draft layer's context keys and values (DFlash, arXiv 2602.06036).

    Keys are normalised per head and rotated, values are stored as they are.

    Args:
        kv: [T, N · 2 · kv_heads · head_dim] projections of the tapped features; per layer k rows,
            then v rows.
        key_norms: [N, head_dim].
        eps: epsilon of the key norm.
        rope: [positions, head_dim] float32 table of `rope_table`.
        positions: [T] int64.
        slots: [T] page slots; rows that must not be written point into the dummy page, whose
            content is undefined.
        pages: [N, 2, num_pages, page_size, kv_heads, head_dim], changed in place.
    """
    if compiled(kv):
        from dflash_serve.kernels.gpu import context_kv

        context_kv.store_context(kv, key_norms, eps, rope, positions, slots, pages)
        return
    layers, head_dim = key_norms.shape
    kv = kv.view(kv.shape[0], layers, 2, -1, head_dim)
    cos_sin = rope[positions]
    for layer, (key_pages, value_pages) in enumerate(pages):
        key = apply_rope(rms_norm(kv[:, layer, 0], key_norms[layer], eps), cos_sin)
        write_pages(key_pages, slots, key)
        write_pages(value_pages, slots, kv[:, layer, 1])


def valid_slots(slots: Tensor, accepted: Tensor) -> Tensor:
    """Send rows past the accepted run to slot 0, which lies in the dummy page.

    Args:
        slots: [B, g] page slots of the verified rows.
        accepted: [B] accepted drafts; rows 0…accepted are committed.
    """
    row = torch.arange(slots.shape[1], device=slots.device)
    return torch.where(row <= accepted[:, None], slots, 0)
