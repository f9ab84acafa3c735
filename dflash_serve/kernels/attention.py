"""Attention of a few query rows per request over its paged keys and values.

One function serves prefill chunks, verification and the draft's block: a batch of B requests with
R rows each at positions start…start+R−1, whose own keys and values were written to the pages
before the call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["paged_attention", "write_pages"]


def write_pages(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows of keys or values.

    Args:
        pages: [num_pages, page_size, kv_heads, head_dim], changed in place.
        slots: [T] int64, page · page_size + offset.
        rows: [T, kv_heads, head_dim].
    """
    pages.view(-1, *pages.shape[2:])[slots] = rows.to(pages.dtype)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    max_length: int,
    *,
    causal: bool,
) -> Tensor:
    """Softmax attention with scale head_dim ** -0.5.

    Row i of a request sees keys at positions ≤ start + i when causal, else every key of the
    request up to start + R − 1.

    Args:
        query: [B, R, heads, head_dim].
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim].
        page_table: [B, P] page ids in position order.
        start: [B] committed length before the rows.
        max_length: host bound on start + R over the batch; keys past it are not read.

    Returns:
        [B, R, heads, head_dim].
    """
    batch, rows, heads, head_dim = query.shape
    page_size, kv_heads = key_pages.shape[1], key_pages.shape[2]
    num_pages = -(-max_length // page_size)
    table = page_table[:, :num_pages]
    span = num_pages * page_size
    key = key_pages[table].view(batch, span, kv_heads, head_dim).transpose(1, 2)
    value = value_pages[table].view(batch, span, kv_heads, head_dim).transpose(1, 2)

    position = torch.arange(span, device=query.device)
    last = (
        start[:, None] + torch.arange(rows, device=query.device)
        if causal
        else (start[:, None] + (rows - 1)).expand(batch, rows)
    )
    mask = position <= last[:, :, None]  # [B, R, span]

    # Query heads that share a key head become extra rows of it, so keys are read once.
    group = heads // kv_heads
    packed = query.view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask.repeat(1, group, 1)[:, None]
    )
    out = out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, head_dim)
