"""Attention of a few query rows per request over its paged keys and values.

One function serves prefill chunks, verification and the draft's block: a batch of B requests with
R rows each at positions start…start+R−1, whose own keys and values were written to the pages
before the call.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AttentionView", "attend", "attention_view", "paged_attention", "write_pages"]


def write_pages(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows of keys or values.

    Args:
        pages: [num_pages, page_size, kv_heads, head_dim], changed in place.
        slots: [T] int64, page · page_size + offset.
        rows: [T, kv_heads, head_dim].
    """
    pages.view(-1, *pages.shape[2:])[slots] = rows.to(pages.dtype)


@dataclasses.dataclass(frozen=True)
class AttentionView:
    """Which keys a call's rows see; the same for every layer, hence made once per forward pass.

    Attributes:
        pages: [B · P] page ids of all requests in position order.
        mask: [B, 1, group · R, span] added to the scores: 0 or −inf, span = P · page_size.
    """

    pages: Tensor
    mask: Tensor


def attention_view(
    page_table: Tensor,
    start: Tensor,
    rows: int,
    max_length: int,
    *,
    page_size: int,
    group: int,
    causal: bool,
    dtype: torch.dtype,
) -> AttentionView:
    """Row i of a request sees keys at positions ≤ start + i when causal, else up to the last row.

    Args:
        page_table: [B, ≥ P] page ids in position order.
        start: [B] committed length before the rows.
        rows: R, rows of each request.
        max_length: host bound on start + R over the batch; keys past it are not read.
        group: query heads that share a key head.
        dtype: of the queries.
    """
    num_pages = -(-max_length // page_size)
    position = torch.arange(num_pages * page_size, device=start.device)
    row = torch.arange(rows, device=start.device) if causal else rows - 1
    last = (start[:, None] + row).expand(-1, rows)
    mask = torch.zeros((start.shape[0], rows, position.shape[0]), dtype=dtype, device=start.device)
    mask.masked_fill_(position > last[:, :, None], -math.inf)
    pages = page_table[:, :num_pages].flatten()
    return AttentionView(pages, mask.repeat(1, group, 1)[:, None])


def attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """Softmax attention with scale head_dim ** -0.5 over the keys of a view.

    Args:
        query: [B, R, heads, head_dim].
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim].

    Returns:
        [B, R, heads, head_dim].
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads, span = key_pages.shape[2], view.mask.shape[-1]
    shape = (batch, span, kv_heads, head_dim)
    key = key_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    value = value_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    # Query heads that share a key head become extra rows of it, so keys are read once.
    group = heads // kv_heads
    packed = query.view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=view.mask)
    out = out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, head_dim)


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
    """`attend` over a view made for this call alone; arguments as there."""
    view = attention_view(
        page_table,
        start,
        query.shape[1],
        max_length,
        page_size=key_pages.shape[1],
        group=query.shape[2] // key_pages.shape[2],
        causal=causal,
        dtype=query.dtype,
    )
    return attend(query, key_pages, value_pages, view)
