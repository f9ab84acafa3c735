"""Triton: rows of the token embedding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.gpu.launch import chained, follow

__all__ = ["embed_rows"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["first", "rows"])  # type: ignore[untyped-decorator]
def _embed(
    ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of one row."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    local = tl.load(ids + row) - first
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    mine = (local >= 0) & (local < rows)
    found = tl.load(weight + local * WIDTH + column, mask=inside & mine, other=0.0)
    tl.store(out + row * WIDTH + column, found, mask=inside)


def embed_rows(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """[T] ids and [rows, H] → [T, H]; see `kernels.embedding`."""
    rows, width = weight.shape
    out = weight.new_empty((ids.shape[0], width))
    if out.numel() == 0:
        return out
    _embed[(ids.shape[0], triton.cdiv(width, _BLOCK))](
        ids.contiguous(), weight, out, first, rows, WIDTH=width, BLOCK=_BLOCK, **chained(out)
    )
    return out
