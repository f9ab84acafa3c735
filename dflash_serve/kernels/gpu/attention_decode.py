"""The kernels that decode: attention of a row tile over its splits, and the merge of splits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from dflash_serve.kernels.gpu.attention_splits import (
    merge_splits,
    nearest_split,
    split_first,
    split_index,
    split_stop,
    store_part,
)
from dflash_serve.kernels.gpu.attention_tiles import (
    attend_keys,
    load_query,
    row_positions,
    row_tokens,
    store_rows,
)
from dflash_serve.kernels.gpu.launch import follow

__all__ = ["decode", "merge_parts"]

_ONE_LOOP_KEYS = tl.constexpr(512)


@triton.jit  # type: ignore[untyped-decorator]
def _key_range(start: tl.tensor, rows: tl.tensor, capacity: tl.tensor, WINDOW: tl.constexpr) -> Any:
    """First key that some row of a request sees, and the first past its rows."""
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start - (WINDOW - 1), 0)
    return first, tl.minimum(start + rows, capacity)


@triton.jit  # type: ignore[untyped-decorator]
def _share(first: tl.tensor, stop: tl.tensor) -> Any:
    """First key and stop of this program's splits, of those that hold the keys first…stop−1.

    One split each where there are enough programs; else as even shares of the keys as splits allow.
    """
    count, index = tl.num_programs(2), tl.program_id(2)
    split = split_index(first)
    if split_index(stop - 1) - split < count:
        begin, end = split_first(split + index), split_first(split + index + 1)
    else:
        share = tl.cdiv(stop - first, count)
        begin, end = (
            nearest_split(first + share * index),
            nearest_split(first + share * index + share),
        )
    begin = tl.where(index > 0, tl.maximum(begin, first), first)
    end = tl.where(index < count - 1, tl.minimum(end, stop), stop)
    return begin, end


@triton.jit  # type: ignore[untyped-decorator]
def _attend_all(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    clear_first: tl.tensor,
    clear_stop: tl.tensor,
    capacity: tl.tensor,
    position: tl.tensor,
    first_column: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    EVICTION: tl.constexpr,
    HEADS: tl.constexpr,
    key_box: tl.tensor,
    value_box: tl.tensor,
    box_column: tl.tensor,
) -> None:
    """Columns first_column… of a row tile over all its splits, merged here, to `out`."""
    _, row_sum, acc = attend_keys(
        query, key_pages, value_pages, table, page_stride, slot_stride,
        first, stop, clear_first, clear_stop, stop, capacity, position, first_column,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        "merge", PRECISION, SUMS, EVICTION, key_box, value_box, box_column,
    )  # fmt: skip
    store_rows(out, acc, row_sum, tokens, heads, rows, first_column, HEADS, HEAD_DIM, VALUE_TILE)


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def decode(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_box: tl.tensor,
    value_box: tl.tensor,
    short_box: tl.tensor,
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
    SHORT_KEYS: tl.constexpr,
    SHORT_SLICES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    EVICTION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A row tile of a key head over all its splits, or over this program's share of them.

    Args:
        key_box, value_box, short_box: descriptors for `attend_keys` or None; the last one for the
            programs that take a short request whole.
        SHORT_KEYS: unless WHOLE, requests of up to so many keys are taken whole by
        SHORT_SLICES: programs, each for a slice of the values.
    """
    follow(PDL)
    value_slice = tl.program_id(0) % SLICES
    kv_head = tl.program_id(0) // SLICES % KV_HEADS
    row_tile = tl.program_id(0) // (SLICES * KV_HEADS)
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + request).to(tl.int32)
    table += request * table_stride
    first, stop = _key_range(start, rows, capacity, WINDOW)
    aligned = first // KEY_TILE * KEY_TILE
    begin, end = aligned, stop
    if not WHOLE:
        begin, end = _share(aligned, stop)
        idle = begin >= end
        if SHORT_KEYS > 0:
            short = stop - aligned <= SHORT_KEYS
            idle = tl.where(short, tl.program_id(2) >= SHORT_SLICES, idle)
        if idle:  # most programs, where a request is much shorter than it may become
            return
    tokens, members = row_tokens(row_tile, GROUP, ROW_TILE)
    heads = kv_head * GROUP + members
    query += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    key_pages += kv_head * head_stride
    value_pages += kv_head * head_stride
    tile = load_query(query, tokens, heads, rows, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)
    position = row_positions(start, tokens, rows)
    first_column = value_slice * VALUE_TILE

    clear_first = aligned
    if WINDOW > 0:
        clear_first = tl.cdiv(tl.maximum(start + rows - WINDOW, 0), KEY_TILE) * KEY_TILE
    clear_stop = stop // KEY_TILE * KEY_TILE
    if CAUSAL:
        clear_stop = (start + 1) // KEY_TILE * KEY_TILE

    pair = request * KV_HEADS + kv_head
    width = rows * GROUP
    packed = tokens * GROUP + members
    if WHOLE:
        _attend_all(
            tile, key_pages, value_pages, table, page_stride, slot_stride, aligned, stop,
            clear_first, clear_stop, capacity, position, first_column, out, tokens, heads, rows,
            SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
            PRECISION, SUMS, EVICTION, KV_HEADS * GROUP, key_box, value_box, kv_head * HEAD_DIM,
        )  # fmt: skip
    elif stop - aligned <= SHORT_KEYS:
        if SHORT_KEYS > 0:
            _attend_all(
                tile, key_pages, value_pages, table, page_stride, slot_stride, aligned, stop,
                clear_first, clear_stop, capacity, position,
                first_column + tl.program_id(2) * (VALUE_TILE // SHORT_SLICES),
                out, tokens, heads, rows,
                SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE // SHORT_SLICES, KEY_TILE, PAGE, WINDOW,
                CAUSAL, PRECISION, SUMS, EVICTION, KV_HEADS * GROUP,
                key_box, short_box, kv_head * HEAD_DIM,
            )  # fmt: skip
    else:
        part_max += pair * splits * width
        part_sum += pair * splits * width
        part_acc += pair * splits * width * HEAD_DIM
        while begin < end:
            until = tl.minimum(split_stop(begin), end)
            # For few keys masks everywhere: a second loop would fill a pipeline of its own.
            masked = (begin < clear_first) | (until > clear_stop)
            masked = masked & (until - begin <= _ONE_LOOP_KEYS)
            row_max, row_sum, acc = attend_keys(
                tile, key_pages, value_pages, table, page_stride, slot_stride,
                begin, until, tl.where(masked, begin, clear_first),
                tl.where(masked, begin, clear_stop), stop, capacity, position, first_column,
                SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
                "one", PRECISION, SUMS, EVICTION, key_box, value_box, kv_head * HEAD_DIM,
            )  # fmt: skip
            store_part(
                part_max, part_sum, part_acc, split_index(begin), packed, width,
                first_column, row_max, row_sum, acc, HEAD_DIM,
            )  # fmt: skip
            begin = until


@triton.jit(do_not_specialize=["rows", "splits"])  # type: ignore[untyped-decorator]
def merge_parts(
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
    SHORT_KEYS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """ROWS packed rows of one request and key head, all splits in ascending order.

    Nothing is left to do for a request that `decode` took whole.
    """
    follow(PDL)
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    first, stop = _key_range(tl.load(starts + request).to(tl.int32), rows, capacity, WINDOW)
    if stop - first // KEY_TILE * KEY_TILE <= SHORT_KEYS:
        return
    packed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = rows * GROUP
    split = split_index(first)
    row = ((request * KV_HEADS + kv_head) * splits + split) * width + packed
    row_sum, acc = merge_splits(
        part_max, part_sum, part_acc, row, packed < width, tl.arange(0, BLOCK_D),
        split, split_index(stop - 1), width, SCALE, HEAD_DIM,
    )  # fmt: skip
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    store_rows(
        out, acc, row_sum, packed // GROUP, kv_head * GROUP + packed % GROUP, rows,
        0, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
