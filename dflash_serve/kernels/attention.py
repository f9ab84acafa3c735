"""Attention of a few query rows per request over its paged keys and values.

One function serves prefill chunks, verification and the draft's block: a batch of B requests with
R rows each at positions start…start+R−1, whose own keys and values were written to the pages
before the call.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AttentionView", "attend", "write_pages"]


def write_pages(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows of keys or values.

    Args:
        pages: [num_pages, page_size, kv_heads, head_dim], changed in place.
        slots: [T] int64, page · page_size + offset.
        rows: [T, kv_heads, head_dim].
    """
    pages.view(-1, *pages.shape[2:])[slots] = rows.to(pages.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionView:
    """Which keys a call's rows see; the same for every layer, hence made once per forward pass.

    Row i of a request sees keys at positions ≤ start + i when causal, else up to the last row.

    Attributes:
        page_table: [B, ≥ P] page ids in position order.
        start: [B] committed length before the rows.
        rows: R, rows of each request.
        longest: host bound on start + R over the batch; keys past it are not read. Only the torch
            path needs it, and there only to read less.
        page_size: tokens of a page.
        causal: whether a row sees no row after it.
    """

    page_table: Tensor
    start: Tensor
    rows: int
    longest: int
    page_size: int
    causal: bool
    _masks: dict[tuple[int, torch.dtype], Tensor] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @functools.cached_property
    def pages(self) -> Tensor:
        """[B · P] page ids of all requests in position order, P = ⌈longest / page_size⌉."""
        return self.page_table[:, : -(-self.longest // self.page_size)].flatten()

    def mask(self, group: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, group · R, span] added to the scores: 0 or −inf, span = P · page_size."""
        key = (group, dtype)
        if key not in self._masks:
            self._masks[key] = self._mask(group, dtype)
        return self._masks[key]

    def _mask(self, group: int, dtype: torch.dtype) -> Tensor:
        batch, rows = self.start.shape[0], self.rows
        span = self.pages.shape[0] // batch * self.page_size
        position = torch.arange(span, device=self.start.device)
        row = torch.arange(rows, device=self.start.device) if self.causal else rows - 1
        last = (self.start[:, None] + row).expand(-1, rows)
        mask = torch.zeros((batch, rows, span), dtype=dtype, device=self.start.device)
        mask.masked_fill_(position > last[:, :, None], -math.inf)
        return mask.repeat(1, group, 1)[:, None]


def attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """Softmax attention with scale head_dim ** -0.5 over the keys of a view.

    Args:
        query: [B, R, heads, head_dim].
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim].

    Returns:
        [B, R, heads, head_dim].
    """
    batch, rows, heads, head_dim = query.shape
    # Query heads that share a key head become extra rows of it, so keys are read once.
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    mask = view.mask(group, query.dtype)
    shape = (batch, mask.shape[-1], kv_heads, head_dim)
    key = key_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    value = value_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    packed = query.view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask)
    out = out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, head_dim)
