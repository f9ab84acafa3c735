"""Attention of up to 32 query rows per request over its paged keys and values.

The R rows of a request and the G query heads that share a key head are packed into row tiles, so
that keys and values are read once. Keys are cut into splits at absolute positions; each split is
computed from scratch and the splits are merged in ascending order. The bits of a row therefore
depend on its own query, its position and its keys only: not on R, on the batch, on the lengths of
other requests, on the number of programs, nor on which of two modes runs:

    whole   one program per (request, key head, row tile) merges its splits in registers.
    split   several programs share the splits of one, and a second kernel merges their results.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention_tiles import (
    attend_keys,
    fresh,
    load_query,
    merge,
    row_tokens,
    split_count,
    split_first,
    split_index,
    store_rows,
)
from dflash_serve.kernels.gpu.prefill import prefill_attention

__all__ = ["FEW_ROWS", "DecodeTiles", "attend", "decode_attention", "decode_tiles"]

FEW_ROWS = 32
"""More rows per request go to the kernel for prefill, whose row bits differ."""

_PROCESSORS = 132
"""Streaming multiprocessors of an H200; only which mode runs and how many programs share a
request's splits depend on it."""

_MERGE_ROWS = 4
"""Packed rows of a program that merges splits: few, so that many programs share the reading."""

Mode = Literal["whole", "split"]


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Tile shapes and launch options of the decode kernels; row bits depend on `key_tile`.

    Attributes:
        row_tile: packed rows of a program, 16, 32, 64 or 128.
        key_tile: keys of an iteration; divides the smallest split.
        value_tile: value columns of a program; the scores are computed again for each.
        warps, stages: of the main kernel.
        sum_by_dot: sum a row's weights through the tensor cores, so that the order of summation
            cannot depend on the layout of a tile.
        evict_first: whether keys and values leave the L2 cache before other data.
    """

    row_tile: int
    key_tile: int
    value_tile: int
    warps: int = 4
    stages: int = 3
    sum_by_dot: bool = False
    evict_first: bool = True


def decode_tiles(head_dim: int, dtype: torch.dtype, packed_rows: int) -> DecodeTiles:
    """Options for a head width and R · G packed rows.

    The row tile is 64 or 128: within those, a warp holds the same 16 rows in the same layout.
    """
    width = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no tensor cores, and everything takes twice the shared memory
        return DecodeTiles(32, 32 if width <= 256 else 16, min(width, 128), stages=1)
    if width > 256:
        return DecodeTiles(64, 32, 128, stages=2)
    if width > 128:
        return DecodeTiles(64, 64, 128, stages=2)
    if packed_rows > 64:
        return DecodeTiles(128, 64, width, warps=8)
    return DecodeTiles(64, 64, width)


def attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """`kernels.attention.attend` without reading a length on the host; view.longest is unused.

    Rows that a ragged view assigns to no request come back undefined.
    """
    if view.row_starts is not None or view.rows > FEW_ROWS:
        return prefill_attention(query, key_pages, value_pages, view)
    return decode_attention(query, key_pages, value_pages, view)


def decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    *,
    tiles: DecodeTiles | None = None,
    mode: Mode | None = None,
    programs: int | None = None,
) -> Tensor:
    """[B, R, heads, head_dim] queries → the same shape. Row-invariant for any B, R and lengths.

    Args:
        query: [B, R, heads, head_dim], dense.
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim] of one layout, dense
            within a slot.
        tiles: options other than the table's.
        mode: 'whole' or 'split' instead of what the shapes ask for.
        programs: programs that share the splits of a request and key head in split mode.
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    assert key_pages.stride() == value_pages.stride()
    query = query.contiguous()
    out = torch.empty_like(query)
    tiles = tiles or decode_tiles(head_dim, query.dtype, rows * group)
    row_tiles = triton.cdiv(rows * group, tiles.row_tile)
    slices = triton.cdiv(head_dim, tiles.value_tile)
    capacity = view.page_table.shape[1] * view.page_size
    splits = split_count(capacity)
    mode = mode or ("whole" if batch * kv_heads >= _PROCESSORS else "split")
    if mode == "whole":
        grid = (1, kv_heads * row_tiles * slices, batch)
        scratch = out, out, out
    else:
        programs = programs or triton.cdiv(2 * _PROCESSORS, batch * kv_heads * row_tiles * slices)
        grid = (min(splits, programs), kv_heads * row_tiles * slices, batch)
        scratch = _scratch(query, batch * kv_heads * splits, rows * group)
    constants = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": view.window or 0,
        "SCALE": math.log2(math.e) * head_dim**-0.5,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    _decode[grid](
        query,
        key_pages,
        value_pages,
        view.page_table,
        view.start,
        out,
        *scratch,
        rows,
        splits,
        capacity,
        view.page_table.stride(0),
        *key_pages.stride()[:3],
        **constants,
        PAGE=view.page_size,
        CAUSAL=view.causal,
        WHOLE=mode == "whole",
        ROW_TILE=tiles.row_tile,
        KEY_TILE=tiles.key_tile,
        VALUE_TILE=tiles.value_tile,
        SLICES=slices,
        SUM_BY_DOT=tiles.sum_by_dot,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        EVICTION="evict_first" if tiles.evict_first else "",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if mode == "split":
        _merge[(triton.cdiv(rows * group, _MERGE_ROWS), kv_heads, batch)](
            *scratch,
            view.start,
            out,
            rows,
            splits,
            capacity,
            **constants,
            ROWS=_MERGE_ROWS,
            num_warps=4,
        )
    return out


def _scratch(query: Tensor, parts: int, packed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per split: maxima and sums [parts, packed rows], weighted values [.., head_dim]."""
    shape = (parts, packed)
    return (
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty((*shape, query.shape[-1]), dtype=torch.float32, device=query.device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _key_range(start: tl.tensor, rows: tl.tensor, capacity: tl.tensor, WINDOW: tl.constexpr) -> Any:
    """First key that some row of a request sees, and the first past its rows."""
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start - (WINDOW - 1), 0)
    return first, tl.minimum(start + rows, capacity)


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _decode(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
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
    WHOLE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLICES: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVICTION: tl.constexpr,
) -> None:
    """A row tile of a key head over all its splits, or over every num_programs(0)-th of them."""
    part = tl.program_id(1) % SLICES
    kv_head = tl.program_id(1) // SLICES % KV_HEADS
    row_tile = tl.program_id(1) // (SLICES * KV_HEADS)
    request = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + request).to(tl.int32)
    tokens, members = row_tokens(row_tile, GROUP, ROW_TILE)
    heads = kv_head * GROUP + members
    query += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    table += request * table_stride
    key_pages += kv_head * head_stride
    value_pages += kv_head * head_stride
    tile = load_query(query, tokens, heads, rows, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)
    position = start + tl.minimum(tokens, rows - 1)
    first_column = part * VALUE_TILE

    first, stop = _key_range(start, rows, capacity, WINDOW)
    aligned = first // KEY_TILE * KEY_TILE
    clear_first = aligned
    if WINDOW > 0:
        clear_first = tl.cdiv(tl.maximum(start + rows - WINDOW, 0), KEY_TILE) * KEY_TILE
    clear_stop = stop // KEY_TILE * KEY_TILE
    if CAUSAL:
        clear_stop = (start + 1) // KEY_TILE * KEY_TILE

    if WHOLE:
        row_max, row_sum, acc = attend_keys(
            tile, key_pages, value_pages, table, page_stride, slot_stride,
            aligned, stop, clear_first, clear_stop, stop, position, first_column,
            SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
            True, SUM_BY_DOT, PRECISION, EVICTION,
        )  # fmt: skip
        store_rows(
            out, acc, row_sum, tokens, heads, rows, first_column,
            KV_HEADS * GROUP, HEAD_DIM, VALUE_TILE,
        )  # fmt: skip
    else:
        last = split_index(stop - 1)
        column = first_column + tl.arange(0, VALUE_TILE)
        stored = (tokens < rows)[:, None] & (column < HEAD_DIM)[None, :]
        for split in range(split_index(first) + tl.program_id(0), last + 1, tl.num_programs(0)):
            row_max, row_sum, acc = attend_keys(
                tile, key_pages, value_pages, table, page_stride, slot_stride,
                tl.maximum(split_first(split), aligned),
                tl.minimum(split_first(split + 1), stop),
                clear_first, clear_stop, stop, position, first_column,
                SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
                False, SUM_BY_DOT, PRECISION, EVICTION,
            )  # fmt: skip
            row = ((request * KV_HEADS + kv_head) * splits + split) * rows * GROUP
            row += tokens * GROUP + members
            tl.store(part_max + row, row_max, mask=(tokens < rows) & (part == 0))
            tl.store(part_sum + row, row_sum, mask=(tokens < rows) & (part == 0))
            tl.store(part_acc + row[:, None] * HEAD_DIM + column[None, :], acc, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _load_part(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    present: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> Any:
    """Maximum, sum and weighted values of one split; of an absent one, those of no keys."""
    place = part_acc + row[:, None] * HEAD_DIM + column[None, :]
    inside = present & (column < HEAD_DIM)[None, :]
    return (
        tl.load(part_max + row, mask=present, other=float("-inf")),
        tl.load(part_sum + row, mask=present, other=0.0),
        tl.load(place, mask=inside, other=0.0),
    )


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def _merge(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    capacity: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """ROWS packed rows of one request and key head, all splits in ascending order."""
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    tokens, members = row_tokens(tl.program_id(0), GROUP, ROWS)
    heads = kv_head * GROUP + members
    first, stop = _key_range(tl.load(starts + request).to(tl.int32), rows, capacity, WINDOW)
    split, last = split_index(first), split_index(stop - 1)
    column = tl.arange(0, BLOCK_D)
    width = rows * GROUP
    row = ((request * KV_HEADS + kv_head) * splits + split) * width
    row += tl.minimum(tokens, rows - 1) * GROUP + members
    row_max, row_sum, acc = fresh(ROWS, BLOCK_D)
    # Four splits are read at once, since a merge waits for the one before it.
    while split <= last:
        max_0, sum_0, acc_0 = _load_part(
            part_max, part_sum, part_acc, row, column, split <= last, HEAD_DIM
        )
        max_1, sum_1, acc_1 = _load_part(
            part_max, part_sum, part_acc, row + width, column, split + 1 <= last, HEAD_DIM
        )
        max_2, sum_2, acc_2 = _load_part(
            part_max, part_sum, part_acc, row + 2 * width, column, split + 2 <= last, HEAD_DIM
        )
        max_3, sum_3, acc_3 = _load_part(
            part_max, part_sum, part_acc, row + 3 * width, column, split + 3 <= last, HEAD_DIM
        )
        row_max, row_sum, acc = merge(row_max, row_sum, acc, max_0, sum_0, acc_0, SCALE)
        row_max, row_sum, acc = merge(row_max, row_sum, acc, max_1, sum_1, acc_1, SCALE)
        row_max, row_sum, acc = merge(row_max, row_sum, acc, max_2, sum_2, acc_2, SCALE)
        row_max, row_sum, acc = merge(row_max, row_sum, acc, max_3, sum_3, acc_3, SCALE)
        split += 4
        row += 4 * width
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    store_rows(out, acc, row_sum, tokens, heads, rows, 0, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)
