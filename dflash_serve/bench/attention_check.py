"""Whether an attention kernel's result is right, what the kernel needs, and other split sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention import DecodeTiles, Sharing, decode_attention
from dflash_serve.kernels.gpu.attention_decode import decode
from dflash_serve.kernels.gpu.attention_splits import set_split_sizes

__all__ = ["bits", "faults", "needs", "use_tiers"]

_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 2e-5}


def use_tiers(tiers: str | None) -> None:
    """Cut keys into splits of these sizes, before any kernel is compiled in this process.

    `tiers` reads as 1024:256,4096:512,8192:1024,2048: 256 keys below 1,024 and so on, then 2,048.
    """
    if tiers is not None:
        *limited, last = tiers.split(",")
        pairs = [tier.split(":") for tier in limited]
        set_split_sizes([(int(limit), int(size)) for limit, size in pairs], int(last))


def needs() -> str:
    """Registers, spilled words and shared memory of the decode kernels used since the last call."""
    caches = dict(decode.device_caches)
    decode.device_caches.clear()
    kernels = [kernel for cache in caches.values() for kernel in cache[0].values()]
    return "; ".join(sorted({_need(kernel) for kernel in kernels})) or "no decode kernel"


def _need(kernel: Any) -> str:
    shared = kernel.metadata.shared
    return f"{kernel.n_regs} registers, {kernel.n_spills} spilled, {shared} bytes shared"


def faults(out: Tensor, query: Tensor, pages: Tensor, view: AttentionView) -> str:
    """What is wrong with the result of one layer's `pages` [2, ...]; nothing is ''.

    The first and the last request are compared with torch.
    """
    found = []
    for request in sorted({0, query.shape[0] - 1}):
        error = (out[request].float() - _reference(request, query, pages, view)).abs().max()
        if not error < _TOLERANCE[query.dtype]:  # NaN is wrong too
            found.append(f"request {request} is off by {float(error):.1e}")
    return ", ".join(found)


def bits(
    out: Tensor,
    query: Tensor,
    pages: Tensor,
    view: AttentionView,
    tiles: DecodeTiles,
    sharing: Sharing | None,
) -> str:
    """Whether the bits of a row depend on anything they must not; 'equal' if they do not.

    The first request's 16 last rows are computed alone, taken whole by tiles of 64 rows (in float32
    by tiles of the same height) that add weights in the same way. The same rows come from calls of
    1, 4 and 16 of them with these tiles and this sharing, and from `out`, that of the whole batch.
    """
    last = int(view.start[0]) + view.rows
    rows = torch.randn((1, 16, *query.shape[2:]), device=query.device).to(query.dtype)
    count = min(view.rows, 16)
    rows[:, 16 - count :] = query[:1, view.rows - count :]
    tall = tiles.row_tile if query.dtype == torch.float32 else 64
    plain = DecodeTiles(tall, tiles.key_tile, tiles.value_tile, sums=tiles.sums)

    def alone(count: int, tiles: DecodeTiles, sharing: Sharing | None) -> Tensor:
        one = dataclasses.replace(
            view, page_table=view.page_table[:1], start=view.start[:1] * 0 + last - count
        )
        one = dataclasses.replace(one, rows=count)
        part = rows[:, 16 - count :].contiguous()
        return decode_attention(part, pages[0], pages[1], one, tiles=tiles, sharing=sharing)

    expected = alone(16, plain, Sharing("whole", 1))
    found = [
        _difference(f"{count} rows", alone(count, tiles, sharing), expected[:, 16 - count :])
        for count in (1, 4, 16)
    ]
    ours = out[:1, view.rows - count :]
    found.append(_difference("the batch", ours, expected[:, 16 - count :]))
    return ", ".join(filter(None, found)) or "equal"


def _difference(name: str, got: Tensor, expected: Tensor) -> str:
    wrong = int((got != expected).sum())  # counts NaN too
    return f"{name} DIFFER in {wrong} of {got.numel()}" if wrong else ""


def _reference(request: int, query: Tensor, pages: Tensor, view: AttentionView) -> Tensor:
    """[rows, heads, head_dim] of one request, in float32."""
    first = int(view.start[request])
    used = view.page_table[request, : -(-(first + view.rows) // view.page_size)]
    heads, head_dim = query.shape[-2:]
    out = torch.empty(query.shape[1:], dtype=torch.float32, device=query.device)
    group = heads // pages.shape[-2]
    keys = torch.arange(used.shape[0] * view.page_size, device=query.device)
    rows = torch.arange(first, first + view.rows, device=query.device)
    for head in range(heads):
        key, value = (p[used, :, head // group].flatten(0, 1).float() for p in pages)
        score = query[request, :, head].float() @ key.T * head_dim**-0.5
        score = score.masked_fill(keys[None] > rows[:, None], float("-inf"))
        out[:, head] = torch.softmax(score, 1) @ value
    return out
