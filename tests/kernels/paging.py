"""Paged keys and values of a few requests, and the attention the torch reference computes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_serve.kernels import backend
from dflash_serve.kernels.attention import AttentionView, attend
from dflash_serve.kernels.block import page_slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# bf16 is computed right only by the compiled kernels, and float32 has the interpreter; a few cases
# take both when compiled, not all, since every one of them is a kernel to compile.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
# Of two bytes, which tensor cores take; the interpreter computes float16 right.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Send what runs inside through the Triton kernels."""
    with backend.interpreted() if DEVICE.type == "cpu" else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """Queries and the pages they look into.

    Attributes:
        query: [B, R, heads, head_dim], or [T, heads, head_dim] for a ragged view.
        keys, values: one layer of a pool; every slot that no request owns holds NaN.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    view: AttentionView

    def reference(self) -> Tensor:
        """What torch computes, in float32 on CPU."""
        pages = (pages.float().cpu().nan_to_num(0.0) for pages in (self.keys, self.values))
        row_starts = self.view.row_starts
        view = dataclasses.replace(
            self.view,
            page_table=self.view.page_table.cpu(),
            start=self.view.start.cpu(),
            row_starts=None if row_starts is None else row_starts.cpu(),
        )
        return attend(self.query.float().cpu(), *pages, view)

    def with_rows(self, first: int, count: int) -> Case:
        """The same request with rows first…first + count − 1 only."""
        view = dataclasses.replace(self.view, start=self.view.start + first, rows=count)
        query = self.query[:, first : first + count].contiguous()
        return dataclasses.replace(self, query=query, view=view)


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def paged(
    starts: list[int],
    rows: int | list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page: int = 16,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = DTYPE,
    spare_pages: int = 2,
) -> Case:
    """Random requests on shuffled pages; a list of rows makes a ragged view."""
    counts = rows if isinstance(rows, list) else [rows] * len(starts)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    width = -(-max(lengths) // page) + spare_pages
    order = torch.randperm(len(starts) * width, generator=torch.Generator().manual_seed(1)) + 1
    table = order.view(len(starts), width)
    shape = (2, 2, 1 + table.numel(), page, kv_heads, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    keys, values = pool[1, 0], pool[1, 1]
    for request, length in enumerate(lengths):
        slots = page_slots(table[request : request + 1], torch.arange(length)[None], page)[0]
        for part, pages in enumerate((keys, values)):
            content = rand(length, kv_heads, head_dim, seed=2 * request + part, dtype=dtype)
            pages.view(-1, kv_heads, head_dim)[slots.to(DEVICE)] = content
    view = AttentionView(
        table.to(DEVICE),
        torch.tensor(starts, device=DEVICE),
        max(counts),
        max(lengths),
        page,
        causal,
        window,
    )
    if isinstance(rows, list):
        bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
        view = dataclasses.replace(view, row_starts=bounds)
        query = rand(sum(counts), heads, head_dim, seed=7, dtype=dtype)
    else:
        query = rand(len(starts), rows, heads, head_dim, seed=7, dtype=dtype)
    return Case(query, keys, values, view)
