"""Attention of query rows over the paged keys and values of their requests.

One function serves prefill chunks, verification and the draft's block: a batch of B requests with
R rows each (or each with its own number of rows) at positions start…start+R−1, whose own keys and
values were written to the pages before the call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import compiled

__all__ = ["AttentionView", "attend", "check_heads", "check_page_size", "write_pages"]

_MIN_PAGE = 8
_MAX_HEAD_DIM = 512


def check_page_size(page_size: int) -> None:
    """Refuse pages that the GPU kernels cannot read.

    Raises:
        ConfigError: not a power of two of at least 8.
    """
    if page_size < _MIN_PAGE or page_size & (page_size - 1):
        raise ConfigError(
            f"page_size is {page_size}; on a GPU it must be a power of two of at least "
            f"{_MIN_PAGE}; use 64"
        )


def check_heads(num_heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse heads that the GPU kernels cannot serve.

    Raises:
        ConfigError: query heads that are no multiple of the key heads, or heads that are wider
            than 512 or no multiple of 8 wide.
    """
    if num_heads % kv_heads:
        raise ConfigError(
            f"{num_heads} query heads on {kv_heads} key heads; the former must be a multiple of "
            "the latter; choose another tensor-parallel size"
        )
    if head_dim % 8 or not 16 <= head_dim <= _MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim is {head_dim}; on a GPU it must be a multiple of 8 from 16 to "
            f"{_MAX_HEAD_DIM}; serve this model on device 'cpu'"
        )


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

    Row i of a request sees keys at positions ≤ start + i when causal, else up to the last row; with
    a window W only those above start + i − W.

    Attributes:
        page_table: [B, ≥ P] page ids in position order.
        start: [B] committed length before the rows.
        rows: R, rows of each request; with `row_starts` a host bound on them.
        longest: host bound on start + R over the batch; keys past it are not read. Only the torch
            path needs it, and there only to read less.
        page_size: tokens of a page.
        causal: whether a row sees no row after it.
        window: keys a row sees, itself and those before it, or None for all.
        row_starts: [B + 1] int64, where requests have different numbers of rows: those of request
            b are rows row_starts[b]…row_starts[b + 1] − 1 of the T in the call.
    """

    page_table: Tensor
    start: Tensor
    rows: int
    longest: int
    page_size: int
    causal: bool
    window: int | None = None
    row_starts: Tensor | None = None
    _masks: dict[tuple[int, torch.dtype], Tensor] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    @functools.cached_property
    def pages(self) -> Tensor:
        """[B · P] page ids of all requests in position order, P = ⌈longest / page_size⌉."""
        return self.page_table[:, : -(-self.longest // self.page_size)].flatten()

    @functools.cached_property
    def parts(self) -> list[tuple[slice, AttentionView]]:
        """Which of the T rows each request owns, and its view; requests without rows left out."""
        assert self.row_starts is not None
        bounds = self.row_starts.tolist()
        parts = []
        for request, (first, stop) in enumerate(itertools.pairwise(bounds)):
            if first < stop:
                view = dataclasses.replace(
                    self,
                    page_table=self.page_table[request : request + 1],
                    start=self.start[request : request + 1],
                    rows=stop - first,
                    row_starts=None,
                )
                parts.append((slice(first, stop), view))
        return parts

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
        own = self.start[:, None] + torch.arange(rows, device=self.start.device)
        last = own if self.causal else (self.start[:, None] + rows - 1).expand(-1, rows)
        mask = torch.zeros((batch, rows, span), dtype=dtype, device=self.start.device)
        mask.masked_fill_(position > last[:, :, None], -math.inf)
        if self.window is not None:
            mask.masked_fill_(position <= own[:, :, None] - self.window, -math.inf)
        return mask.repeat(1, group, 1)[:, None]


def attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """Softmax attention with scale head_dim ** -0.5 over the keys of a view.

    Args:
        query: [B, R, heads, head_dim]; [T, heads, head_dim] when the view has `row_starts`.
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim].

    Returns:
        The shape of the query. Rows that `row_starts` gives to no request are undefined.
    """
    if compiled(query):
        from dflash_serve.kernels.gpu import attention as gpu

        return gpu.attend(query, key_pages, value_pages, view)
    if view.row_starts is None:
        return _attend(query, key_pages, value_pages, view)
    out = torch.zeros_like(query)
    for rows, part in view.parts:
        out[rows] = _attend(query[rows][None], key_pages, value_pages, part)[0]
    return out


def _attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """[B, R, heads, head_dim] → the same shape."""
    batch, rows, heads, head_dim = query.shape
    # Query heads that share a key head become extra rows of it, so keys are read once.
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    mask = view.mask(group, query.dtype)
    shape = (batch, mask.shape[-1], kv_heads, head_dim)
    key = key_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    value = value_pages.index_select(0, view.pages).view(shape).transpose(1, 2)
    packed = query.reshape(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask)
    out = out.view(batch, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, rows, heads, head_dim)
