"""Attention of many query rows per request, as in prompts, over paged keys and values.

Row tiles are packed as for decoding. Every row takes the key tiles in ascending order from the
first, so its bits depend on its query, position and keys, not on the other rows of the chunk, the
other requests, or where the chunk begins. They differ from those of the decode kernel, which keeps
splits apart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention_tiles import (
    Sums,
    attend_keys,
    load_query,
    row_positions,
    row_tokens,
    store_rows,
)

__all__ = ["PrefillTiles", "prefill_attention", "prefill_tiles"]


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """Tile shapes and launch options; row bits depend on `key_tile` and `sums` alone.

    Attributes:
        row_tile: packed rows of a program.
        key_tile: keys of an iteration.
        value_tile: value columns of a program; the scores are computed again for each.
        warps, stages: of the kernel.
        sums: how the weights of a row are added, as for decoding.
    """

    row_tile: int
    key_tile: int
    value_tile: int
    warps: int = 8
    stages: int = 2
    sums: Sums = "lanes"


def prefill_tiles(head_dim: int, dtype: torch.dtype) -> PrefillTiles:
    """Options for a head width."""
    width = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no tensor cores, and everything takes twice the shared memory
        return PrefillTiles(32, 32 if width <= 256 else 16, min(width, 128), warps=4, stages=1)
    if width > 256:
        return PrefillTiles(64, 32, 128, warps=4)
    return PrefillTiles(128, 64, width, stages=3 if width <= 128 else 2)


def prefill_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    *,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """Same shape and type as the query; view.longest is unused.

    Args:
        query: [B, R, heads, head_dim], or with view.row_starts [T, heads, head_dim]; dense.
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim] of one layout, dense
            within a slot.
        tiles: options other than the table's.
    """
    heads, head_dim = query.shape[-2:]
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    assert key_pages.stride() == value_pages.stride()
    query = query.contiguous()
    out = torch.empty_like(query)
    tiles = tiles or prefill_tiles(head_dim, query.dtype)
    batch = view.start.shape[0]
    slices = triton.cdiv(head_dim, tiles.value_tile)
    if view.row_starts is None:
        grid = (kv_heads * slices, triton.cdiv(view.rows * group, tiles.row_tile), batch)
    else:
        # As many tiles as T rows can make when every request ends in a tile of its own.
        grid = (kv_heads * slices, query.shape[0] * group // tiles.row_tile + batch, 1)
    _prefill[grid](
        query,
        key_pages,
        value_pages,
        view.page_table,
        view.start,
        view.start if view.row_starts is None else view.row_starts,
        out,
        view.rows,
        batch,
        view.page_table.shape[1] * view.page_size,
        view.page_table.stride(0),
        *key_pages.stride()[:3],
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=view.page_size,
        WINDOW=view.window or 0,
        SCALE=math.log2(math.e) * head_dim**-0.5,
        CAUSAL=view.causal,
        BATCH_BLOCK=0 if view.row_starts is None else triton.next_power_of_2(batch),
        ROW_TILE=tiles.row_tile,
        KEY_TILE=tiles.key_tile,
        BLOCK_D=triton.next_power_of_2(head_dim),
        VALUE_TILE=tiles.value_tile,
        SLICES=slices,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        SUMS=tiles.sums,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _find_request(
    row_starts: tl.tensor,
    index: tl.tensor,
    batch: tl.tensor,
    GROUP: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
) -> Any:
    """Request and row tile within it of the index-th row tile of all; `batch` or more for none."""
    request = tl.arange(0, BATCH_BLOCK)
    inside = request < batch
    first = tl.load(row_starts + request, mask=inside, other=0)
    stop = tl.load(row_starts + request + 1, mask=inside, other=0)
    tiles = tl.cdiv((stop - first).to(tl.int32) * GROUP, ROW_TILE)
    found = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    return found, index - tl.sum(tl.where(request < found, tiles, 0), 0)


@triton.jit(do_not_specialize=["rows", "batch"])  # type: ignore[untyped-decorator]
def _prefill(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    row_starts: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    batch: tl.tensor,
    capacity: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:
    """One row tile of one key head; the tiles with the most keys come first."""
    part = tl.program_id(0) % SLICES
    kv_head = tl.program_id(0) // SLICES
    row_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request = tl.program_id(2)
    if BATCH_BLOCK > 0:
        request, row_tile = _find_request(row_starts, row_tile, batch, GROUP, ROW_TILE, BATCH_BLOCK)
        if request >= batch:
            return
        first_row = tl.load(row_starts + request)
        rows = (tl.load(row_starts + request + 1) - first_row).to(tl.int32)
    else:
        first_row = request.to(tl.int64) * rows
    start = tl.load(starts + request).to(tl.int32)
    tokens, members = row_tokens(row_tile, GROUP, ROW_TILE)
    heads = kv_head * GROUP + members
    query += first_row * (KV_HEADS * GROUP * HEAD_DIM)
    out += first_row * (KV_HEADS * GROUP * HEAD_DIM)
    table += request.to(tl.int64) * table_stride
    key_pages += kv_head * head_stride
    value_pages += kv_head * head_stride
    tile = load_query(query, tokens, heads, rows, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)
    position = row_positions(start, tokens, rows)
    first_column = part * VALUE_TILE

    low = start + row_tile * ROW_TILE // GROUP
    high = start + tl.minimum((row_tile * ROW_TILE + ROW_TILE - 1) // GROUP, rows - 1)
    first = start * 0
    clear_first = first
    if WINDOW > 0:
        first = tl.maximum(low - (WINDOW - 1), 0) // KEY_TILE * KEY_TILE
        clear_first = tl.cdiv(tl.maximum(high + 1 - WINDOW, 0), KEY_TILE) * KEY_TILE
    if CAUSAL:
        stop = tl.minimum(high + 1, capacity)
        clear_stop = (low + 1) // KEY_TILE * KEY_TILE
    else:
        stop = tl.minimum(start + rows, capacity)
        clear_stop = stop // KEY_TILE * KEY_TILE
    _, row_sum, acc = attend_keys(
        tile, key_pages, value_pages, table, page_stride, slot_stride,
        first, stop, clear_first, clear_stop, stop, capacity, position, first_column,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        "one", PRECISION, SUMS, "",
    )  # fmt: skip
    store_rows(
        out, acc, row_sum, tokens, heads, rows, first_column,
        KV_HEADS * GROUP, HEAD_DIM, VALUE_TILE,
    )  # fmt: skip
