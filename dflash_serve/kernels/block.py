"""What a decode step feeds to the draft and the target: ids, positions and page slots."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dflash_serve.kernels.backend import compiled

__all__ = [
    "BlockRows",
    "StepRows",
    "block_ids",
    "block_positions",
    "gather_step",
    "page_slots",
]


@dataclasses.dataclass(frozen=True)
class BlockRows:
    """Where the B · R rows of a step stand.

    Attributes:
        start: [B] committed lengths.
        positions: [B · R] absolute positions start…start+R−1 of each request.
        slots: [B · R] page slots of those positions.
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
