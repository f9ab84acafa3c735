"""The kernels that decode: attention of a row tile over its splits, and the merge of splits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from dflash_serve.kernels.gpu.attention_splits import merge_splits, split_first, split_index
from dflash_serve.kernels.gpu.attention_tiles import (
    attend_keys,
    load_query,
    row_tokens,
    store_rows,
)

__all__ = ["decode", "merge_parts"]


@triton.jit  # type: ignore[untyped-decorator]
def _key_range(start: tl.tensor, rows: tl.tensor, capacity: tl.tensor, WINDOW: tl.constexpr) -> Any:
    """First key that some row of a request sees, and the first past its rows."""
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(start - (WINDOW - 1), 0)
    return first, tl.minimum(start + rows, capacity)


@triton.jit  # type: ignore[untyped-decorator]
def _fetch_ahead(
    ahead: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    lines: tl.tensor,
    row_lines: tl.tensor,
    depth: tl.tensor,
    SPAN: tl.constexpr,
    LINE: tl.constexpr,
) -> None:
    """Ask for this program's share of the first `row_lines` cache lines of every row."""
    for first in range(program * SPAN, lines, programs * SPAN):
        at = tl.minimum(first + tl.arange(0, SPAN), lines - 1)
        address = ahead + (at // row_lines).to(tl.int64) * depth + at % row_lines * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [address.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merge_rows(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    out: tl.tensor,
    packed: tl.tensor,
    pair: tl.tensor,
    kv_head: tl.tensor,
    split: tl.tensor,
    last: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    first_column: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Merge and store packed rows [ROWS] of a request and key head, which `pair` numbers."""
    tokens, members = packed // GROUP, packed % GROUP
    column = first_column + tl.arange(0, COLUMNS)
    width = rows * GROUP
    row_sum, acc = merge_splits(
        part_max, part_sum, part_acc, (pair * splits + split) * width + packed, packed < width,
        column, split, last, width, SCALE, HEAD_DIM,
    )  # fmt: skip
    heads = kv_head * GROUP + members
    store_rows(
        out, acc, tl.where(packed < width, row_sum, 1.0), tokens, heads, rows, first_column,
        KV_HEADS * GROUP, HEAD_DIM, COLUMNS,
    )  # fmt: skip


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["programs", "rows", "splits", "ahead_lines", "ahead_row_lines"]
)
def decode(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    counters: tl.tensor,
    ahead: tl.tensor,
    programs: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    capacity: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    ahead_lines: tl.tensor,
    ahead_row_lines: tl.tensor,
    ahead_depth: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    WHOLE: tl.constexpr,
    LAST: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLICES: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines asked for at a time, 0 for none
    LINE: tl.constexpr,  # elements of one
    PRECISION: tl.constexpr,
    EVICTION: tl.constexpr,
) -> None:
    """A row tile of a key head over all its splits, or over every `programs`-th of them.

    Programs past those prefetch. Those of the first splits start first, since a table has room for
    more splits than most requests fill.
    """
    if tl.program_id(2) >= programs:
        if AHEAD > 0:
            plane = tl.num_programs(0) * tl.num_programs(1)
            extra = tl.program_id(2) - programs
            extra = extra * plane + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            _fetch_ahead(
                ahead, extra, (tl.num_programs(2) - programs) * plane,
                ahead_lines, ahead_row_lines, ahead_depth, AHEAD, LINE,
            )  # fmt: skip
        return
    part = tl.program_id(0) % SLICES
    kv_head = tl.program_id(0) // SLICES % KV_HEADS
    row_tile = tl.program_id(0) // (SLICES * KV_HEADS)
    request = tl.program_id(1).to(tl.int64)
    start = tl.load(starts + request).to(tl.int32)
    table += request * table_stride
    first, stop = _key_range(start, rows, capacity, WINDOW)
    aligned = first // KEY_TILE * KEY_TILE
    split = split_index(first, FINE, COARSE) + tl.program_id(2)
    tokens, members = row_tokens(row_tile, GROUP, ROW_TILE)
    heads = kv_head * GROUP + members
    query += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    key_pages += kv_head * head_stride
    value_pages += kv_head * head_stride
    tile = load_query(query, tokens, heads, rows, KV_HEADS * GROUP, HEAD_DIM, BLOCK_D)
    position = start + tl.minimum(tokens, rows - 1)
    first_column = part * VALUE_TILE

    clear_first = aligned
    if WINDOW > 0:
        clear_first = tl.cdiv(tl.maximum(start + rows - WINDOW, 0), KEY_TILE) * KEY_TILE
    clear_stop = stop // KEY_TILE * KEY_TILE
    if CAUSAL:
        clear_stop = (start + 1) // KEY_TILE * KEY_TILE

    if WHOLE:
        row_max, row_sum, acc = attend_keys(
            tile, key_pages, value_pages, table, page_stride, slot_stride,
            aligned, stop, clear_first, clear_stop, stop, capacity, position, first_column,
            SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
            True, SUM_BY_DOT, PRECISION, EVICTION, FINE, COARSE, ONE_LOOP,
        )  # fmt: skip
        store_rows(
            out, acc, row_sum, tokens, heads, rows, first_column,
            KV_HEADS * GROUP, HEAD_DIM, VALUE_TILE,
        )  # fmt: skip
    else:
        last = split_index(stop - 1, FINE, COARSE)
        pair = request * KV_HEADS + kv_head
        column = first_column + tl.arange(0, VALUE_TILE)
        stored = (tokens < rows)[:, None] & (column < HEAD_DIM)[None, :]
        while split <= last:
            begin = tl.maximum(split_first(split, FINE, COARSE), aligned)
            end = tl.minimum(split_first(split + 1, FINE, COARSE), stop)
            # A split has masks everywhere or nowhere: two loops would each fill a pipeline.
            clear = (begin >= clear_first) & (end <= clear_stop)
            row_max, row_sum, acc = attend_keys(
                tile, key_pages, value_pages, table, page_stride, slot_stride,
                begin, end, begin, tl.where(clear, end, begin), stop, capacity, position,
                first_column, SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
                False, SUM_BY_DOT, PRECISION, EVICTION, FINE, COARSE, False,
            )  # fmt: skip
            row = (pair * splits + split) * rows * GROUP + tokens * GROUP + members
            tl.store(part_max + row, row_max, mask=(tokens < rows) & (part == 0))
            tl.store(part_sum + row, row_sum, mask=(tokens < rows) & (part == 0))
            tl.store(part_acc + row[:, None] * HEAD_DIM + column[None, :], acc, mask=stored)
            split += programs
        if LAST:
            split = split_index(first, FINE, COARSE)
            working = tl.minimum(programs, last + 1 - split)
            if tl.program_id(2) < working:
                counter = counters + pair * (tl.num_programs(0) // (SLICES * KV_HEADS)) + row_tile
                # The barrier puts the stores of all threads before the count that announces them.
                tl.debug_barrier()
                before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if before == working * SLICES - 1:
                    tl.debug_barrier()
                    tl.store(counter, 0)
                    for one in tl.static_range(SLICES):
                        for at in range(0, tl.minimum(ROW_TILE, rows * GROUP), MERGE_TILE):
                            packed = row_tile * ROW_TILE + at + tl.arange(0, MERGE_TILE)
                            _merge_rows(
                                part_max, part_sum, part_acc, out, packed, pair, kv_head,
                                split, last, rows, splits, one * VALUE_TILE,
                                GROUP, KV_HEADS, HEAD_DIM, SCALE, VALUE_TILE,
                            )  # fmt: skip


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
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """ROWS packed rows of one request and key head, all splits in ascending order."""
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    first, stop = _key_range(tl.load(starts + request).to(tl.int32), rows, capacity, WINDOW)
    packed = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out += request * rows * (KV_HEADS * GROUP * HEAD_DIM)
    _merge_rows(
        part_max, part_sum, part_acc, out, packed, request * KV_HEADS + kv_head, kv_head,
        split_index(first, FINE, COARSE), split_index(stop - 1, FINE, COARSE), rows, splits, 0,
        GROUP, KV_HEADS, HEAD_DIM, SCALE, BLOCK_D,
    )  # fmt: skip
