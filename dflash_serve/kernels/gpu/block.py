"""What a step feeds to the draft and the target, gathered in one launch.

A program takes one request and a stretch of its rows and of its page table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_chunks", "gather_step"]

_BLOCK = 512


def gather_step(
    state: Tensor,
    page_tables: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
    mask_id: int,
    ahead: int,
) -> tuple[Tensor, ...]:
    """What `kernels.block.gather_step` returns, the block's parts first.

    Positions past the page table get slots in the dummy page.

    Returns:
        start [B], positions [B · R], page slots [B · R], page table [B, P], anchor [B],
        ids [B, R], first position [B] and state rows [B, C].
    """
    batch, pages, columns = slots.shape[0], page_tables.shape[1], state.shape[1]
    start, anchor, first = (state.new_empty(batch) for _ in range(3))
    positions, places = (state.new_empty(batch * rows) for _ in range(2))
    table, ids = state.new_empty((batch, pages)), state.new_empty((batch, rows))
    copied = state.new_empty((batch, columns))
    _gather[(batch, triton.cdiv(max(rows, pages), _BLOCK))](
        state,
        state.stride(0),
        page_tables,
        page_tables.stride(0),
        slots.contiguous(),
        start,
        positions,
        places,
        table,
        anchor,
        ids,
        first,
        copied,
        rows,
        pages,
        mask_id,
        ahead,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        COLUMNS=columns,
        COLUMN_BLOCK=triton.next_power_of_2(columns),
        num_warps=4,
    )
    return start, positions, places, table, anchor, ids, first, copied


@triton.jit(do_not_specialize=["rows", "pages", "mask_id", "ahead"])  # type: ignore[untyped-decorator]
def _gather(
    state: tl.tensor,
    state_stride: tl.tensor,
    page_tables: tl.tensor,
    tables_stride: tl.tensor,
    slots: tl.tensor,
    out_start: tl.tensor,
    out_positions: tl.tensor,
    out_slots: tl.tensor,
    out_table: tl.tensor,
    out_anchor: tl.tensor,
    out_ids: tl.tensor,
    out_first: tl.tensor,
    out_state: tl.tensor,
    rows: tl.tensor,
    pages: tl.tensor,
    mask_id: tl.tensor,
    ahead: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + request)
    row = state + slot * state_stride
    anchor = tl.load(row)
    start = tl.load(row + 1)

    is_row = index < rows
    position = start + index
    page = position // PAGE_SIZE
    table = page_tables + slot * tables_stride
    # A position past the table has no page: the dummy page takes it.
    number = tl.load(table + page, mask=is_row & (page < pages), other=0)
    tl.store(out_positions + request * rows + index, position, mask=is_row)
    place = number * PAGE_SIZE + position % PAGE_SIZE
    tl.store(out_slots + request * rows + index, place, mask=is_row)
    is_page = index < pages
    entry = tl.load(table + index, mask=is_page, other=0)
    tl.store(out_table + request * pages + index, entry, mask=is_page)

    ids = tl.where(index == 0, anchor, mask_id)
    tl.store(out_ids + request * rows + index, ids, mask=is_row)
    if tl.program_id(1) == 0:
        tl.store(out_start + request, start)
        tl.store(out_anchor + request, anchor)
        tl.store(out_first + request, start + ahead)
        column = tl.arange(0, COLUMN_BLOCK)
        inside = column < COLUMNS
        values = tl.load(row + column, mask=inside, other=0)
        tl.store(out_state + request * COLUMNS + column, values, mask=inside)


def gather_chunks(
    state: Tensor,
    page_tables: Tensor,
    slots: Tensor,
    row_starts: Tensor,
    rows: int,
    page_size: int,
) -> tuple[Tensor, ...]:
    """What `kernels.block.gather_chunks` returns, the block's parts first.

    Positions past the page table get slots in the dummy page.

    Returns:
        start [B], positions [T], page slots [T], page table [B, P], stop [B] and state rows [B, C].
    """
    batch, pages, columns = slots.shape[0], page_tables.shape[1], state.shape[1]
    start, stop = state.new_empty(batch), state.new_empty(batch)
    positions, places = state.new_empty(rows), state.new_empty(rows)
    table, copied = state.new_empty((batch, pages)), state.new_empty((batch, columns))
    # One chunk may have all rows.
    _gather_chunks[(batch, triton.cdiv(max(rows, pages), _BLOCK))](
        state,
        state.stride(0),
        page_tables,
        page_tables.stride(0),
        slots.contiguous(),
        row_starts.contiguous(),
        start,
        positions,
        places,
        table,
        stop,
        copied,
        pages,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        COLUMNS=columns,
        COLUMN_BLOCK=triton.next_power_of_2(columns),
        num_warps=4,
    )
    return start, positions, places, table, stop, copied


@triton.jit(do_not_specialize=["pages"])  # type: ignore[untyped-decorator]
def _gather_chunks(
    state: tl.tensor,
    state_stride: tl.tensor,
    page_tables: tl.tensor,
    tables_stride: tl.tensor,
    slots: tl.tensor,
    row_starts: tl.tensor,
    out_start: tl.tensor,
    out_positions: tl.tensor,
    out_slots: tl.tensor,
    out_table: tl.tensor,
    out_stop: tl.tensor,
    out_state: tl.tensor,
    pages: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(row_starts + request)
    rows = tl.load(row_starts + request + 1) - first
    slot = tl.load(slots + request)
    row = state + slot * state_stride
    start = tl.load(row + 1)

    is_row = index < rows
    position = start + index
    page = position // PAGE_SIZE
    table = page_tables + slot * tables_stride
    # A position past the table has no page: the dummy page takes it.
    number = tl.load(table + page, mask=is_row & (page < pages), other=0)
    tl.store(out_positions + first + index, position, mask=is_row)
    tl.store(out_slots + first + index, number * PAGE_SIZE + position % PAGE_SIZE, mask=is_row)
    is_page = index < pages
    entry = tl.load(table + index, mask=is_page, other=0)
    tl.store(out_table + request * pages + index, entry, mask=is_page)

    if tl.program_id(1) == 0:
        tl.store(out_start + request, start)
        tl.store(out_stop + request, start + rows)
        column = tl.arange(0, COLUMN_BLOCK)
        inside = column < COLUMNS
        values = tl.load(row + column, mask=inside, other=0)
        tl.store(out_state + request * COLUMNS + column, values, mask=inside)
