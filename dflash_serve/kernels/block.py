"""What a step feeds to the draft and the target: ids, positions and page slots."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = [
    "BlockRows",
    "ChunkRows",
    "StepRows",
    "block_ids",
    "block_positions",
    "gather_chunks",
    "gather_step",
    "page_slots",
]


@dataclasses.dataclass(frozen=True)
class BlockRows:
    """Where the T rows of a step stand, R of each request or as many as its chunk has.

    Attributes:
        start: [B] committed lengths.
        positions: [T] absolute positions start…start+R−1 of each request.
        slots: [T] page slots of those positions.
        page_table: [B, P].
    """

    start: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor


@dataclasses.dataclass(frozen=True)
class StepRows:
    """All that a decode step reads from the device tables.

    Attributes:
        block: where the rows stand.
        anchor: [B].
        ids: [B, R] the draft's input, the anchor and masks.
        first: [B] position of the token that a request's first row chooses.
        state: [B, C] the batch's rows of the slot table.
    """

    block: BlockRows
    anchor: Tensor
    ids: Tensor
    first: Tensor
    state: Tensor


@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """All that chunks of several prompts read from the device tables.

    Attributes:
        block: where the rows stand.
        stop: [B] position after a chunk, that of the token which its last row chooses.
        state: [B, C] the chunks' rows of the slot table.
    """

    block: BlockRows
    stop: Tensor
    state: Tensor


def gather_step(
    state: Tensor,
    page_tables: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
    mask_id: int,
    *,
    ahead: int = 1,
) -> StepRows:
    """Everything a decode step needs of the device tables; one launch on a GPU.

    Args:
        state: [S, C] int64, a slot's row with its anchor in column 0 and its committed length in
            column 1; the other columns are only copied.
        page_tables: [S, P].
        slots: [B] the batch.
        rows: R, rows of each request.
        mask_id: id of the draft's mask token; any id where nothing drafts.
        ahead: from the committed length to the token that the first row chooses: 1 where the
            anchor stands there; the tokens of a chunk where they come first.
    """
    if compiled(state):
        from dflash_serve.kernels.gpu import block

        start, positions, places, table, *more = block.gather_step(
            state, page_tables, slots, rows, page_size, mask_id, ahead
        )
        return StepRows(BlockRows(start, positions, places, table), *more)
    copied, table = state[slots], page_tables[slots]
    anchor, start = copied[:, 0].contiguous(), copied[:, 1].contiguous()
    positions = block_positions(start, rows)
    places = page_slots(table, positions, page_size)
    return StepRows(
        block=BlockRows(start, positions.flatten(), places.flatten(), table),
        anchor=anchor,
        ids=block_ids(anchor, rows, mask_id),
        first=start + ahead,
        state=copied,
    )


def gather_chunks(
    state: Tensor,
    page_tables: Tensor,
    slots: Tensor,
    row_starts: Tensor,
    rows: int,
    page_size: int,
) -> ChunkRows:
    """`gather_step` for requests with different numbers of rows; nothing is read on the host.

    Args:
        state, page_tables: see `gather_step`.
        slots: [B].
        row_starts: [B + 1] int64; request b has rows row_starts[b]…row_starts[b + 1] − 1, none
            where the two are equal.
        rows: T = row_starts[B].
    """
    if compiled(state):
        from dflash_serve.kernels.gpu import block

        start, positions, places, table, stop, copied = block.gather_chunks(
            state, page_tables, slots, row_starts, rows, page_size
        )
        return ChunkRows(BlockRows(start, positions, places, table), stop, copied)
    copied, table = state[slots], page_tables[slots]
    start, counts = copied[:, 1].contiguous(), row_starts.diff()
    request = torch.repeat_interleave(counts, output_size=rows)
    index = torch.arange(rows, device=state.device) - row_starts[request]
    positions = start[request] + index
    page = table[request, positions // page_size]
    places = page * page_size + positions % page_size
    return ChunkRows(BlockRows(start, positions, places, table), start + counts, copied)


def block_ids(anchor: Tensor, rows: int, mask_id: int) -> Tensor:
    """[B] anchors → [B, rows]: the anchor and rows − 1 masks."""
    ids = torch.full((anchor.shape[0], rows), mask_id, dtype=torch.int64, device=anchor.device)
    ids[:, 0] = anchor
    return ids


def block_positions(start: Tensor, rows: int) -> Tensor:
    """[B] committed lengths → [B, rows] absolute positions start…start+rows−1."""
    return start[:, None] + torch.arange(rows, device=start.device)


def page_slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Flat page slots of positions: [B, P] tables and [B, R] positions → [B, R] int64."""
    page = torch.gather(page_table, 1, positions // page_size)
    return page * page_size + positions % page_size
