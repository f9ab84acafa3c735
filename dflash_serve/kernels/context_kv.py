"""Keys and values of the draft's context, straight from the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.kernels.attention import write_pages
from dflash_serve.kernels.linear import linear
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.rope import apply_rope

__all__ = ["inject_context", "valid_slots"]


def inject_context(
    context: Tensor,
    kv_weight: Tensor,
    key_norms: Tensor,
    eps: float,
    cos_sin: Tensor,
    pages: list[tuple[Tensor, Tensor]],
    slots: Tensor,
) -> None:
    """Write every draft layer's context keys and values (DFlash, arXiv 2602.06036).

    One product computes k and v of all layers; keys are normalised per head and rotated, values
    are stored as they are.

    Args:
        context: [T, H] normalised projection of the tapped features.
        kv_weight: [N · 2 · kv_heads · head_dim, H]; per layer k rows, then v rows.
        key_norms: [N, head_dim].
        eps: epsilon of the key norm.
        cos_sin: [T, head_dim] rope rows at the tokens' positions.
        pages: per layer (key_pages, value_pages), changed in place.
        slots: [T] page slots; rows that must not be written point into the dummy page.
    """
    layers, head_dim = key_norms.shape
    kv_heads = pages[0][0].shape[2]
    kv = linear(context, kv_weight).reshape(-1, layers, 2, kv_heads, head_dim)
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
