"""What a decode step feeds to the draft and the target: ids, positions and page slots."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_ids", "block_positions", "page_slots"]


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
