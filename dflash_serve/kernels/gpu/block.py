"""What a decode step feeds to the draft and the target, gathered in one launch.

A program takes one request and a stretch of its rows and of its page table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["block_ids", "gather_block", "gather_step"]

_BLOCK = 512


def gather_block(
    starts: Tensor, page_tables: Tensor, slots: Tensor, rows: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """start [B], positions [B · R], page slots [B · R] and page table [B, P].

    Positions past the page table get slots in the dummy page.

    Args:
        starts: [S] of any stride.
        page_tables: [S, P], dense rows.
        slots: [B].
    """
    batch, pages = slots.shape[0], page_tables.shape[1]
    start, positions, places, table = _outputs(page_tables, batch, rows)
    _gather[_grid(batch, rows, pages)](
        starts,
        starts.stride(0),
        page_tables,
        page_tables.stride(0),
        slots.contiguous(),
        start,
        positions,
        places,
        table,
        start,
        start,
        start,
        start,
        rows,
        pages,
        0,
        0,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        COLUMNS=1,
        COLUMN_BLOCK=1,
        STEP=False,
        num_warps=4,
    )
    return start, positions, places, table


def gather_step(
    state: Tensor,
    page_tables: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
    mask_id: int,
    ahead: int,
) -> tuple[Tensor, ...]:
    """The same, then anchor [B], ids [B, R], first position [B] and state rows [B, C].

    Args:
        state: [S, C] int64 with dense rows, anchor in column 0 and start in column 1.
    """
    batch, pages, columns = slots.shape[0], page_tables.shape[1], state.shape[1]
    start, positions, places, table = _outputs(page_tables, batch, rows)
    anchor, first = torch.empty_like(start), torch.empty_like(start)
    ids, copied = start.new_empty((batch, rows)), start.new_empty((batch, columns))
    _gather[_grid(batch, rows, pages)](
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
        STEP=True,
        num_warps=4,
    )
    return start, positions, places, table, anchor, ids, first, copied


def block_ids(anchor: Tensor, rows: int, mask_id: int) -> Tensor:
    """[B] anchors of any stride → [B, rows]: the anchor and rows − 1 masks, in one launch."""
    batch = anchor.shape[0]
    ids = torch.empty((batch, rows), dtype=torch.int64, device=anchor.device)
    _block_ids[(batch,)](
        anchor,
        anchor.stride(0),
        ids,
        rows,
        mask_id,
        BLOCK=max(int(triton.next_power_of_2(rows)), 32),
        num_warps=1,
    )
    return ids


def _outputs(page_tables: Tensor, batch: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for start, positions, page slots and page table."""
    new = page_tables.new_empty
    return (
        new((batch,)),
        new((batch * rows,)),
        new((batch * rows,)),
        new((batch, page_tables.shape[1])),
    )


def _grid(batch: int, rows: int, pages: int) -> tuple[int, int]:
    return batch, int(triton.cdiv(max(rows, pages, 1), _BLOCK))


@triton.jit  # type: ignore[untyped-decorator]
def _gather(
    starts: tl.tensor,
    starts_stride: tl.tensor,
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
    STEP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + request)
    row = starts + slot * starts_stride
    start = tl.load(row + 1) if STEP else tl.load(row)

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

    if STEP:
        anchor = tl.load(row)
        ids = tl.where(index == 0, anchor, mask_id)
        tl.store(out_ids + request * rows + index, ids, mask=is_row)
    if tl.program_id(1) == 0:
        tl.store(out_start + request, start)
        if STEP:
            tl.store(out_anchor + request, anchor)
            tl.store(out_first + request, start + ahead)
            column = tl.arange(0, COLUMN_BLOCK)
            inside = column < COLUMNS
            values = tl.load(row + column, mask=inside, other=0)
            tl.store(out_state + request * COLUMNS + column, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _block_ids(
    anchor: tl.tensor,
    anchor_stride: tl.tensor,
    ids: tl.tensor,
    rows: tl.tensor,
    mask_id: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    value = tl.where(index == 0, tl.load(anchor + request * anchor_stride), mask_id)
    tl.store(ids + request * rows + index, value, mask=index < rows)
