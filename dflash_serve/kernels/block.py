"""What a decode step feeds to the draft and the target: ids, positions and page slots."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["BlockRows", "block_ids", "block_positions", "gather_block", "page_slots"]


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


def gather_block(
    starts: Tensor, page_tables: Tensor, slots: Tensor, rows: int, page_size: int
) -> BlockRows:
    """Collect what a batch of running requests needs from the device tables.

    Args:
        starts: [S] committed length of every slot; any stride.
        page_tables: [S, P].
        slots: [B] the batch.
        rows: R, rows of each request.
    """
    start = starts[slots]
    table = page_tables[slots]
    positions = block_positions(start, rows)
    return BlockRows(
        start, positions.flatten(), page_slots(table, positions, page_size).flatten(), table
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
