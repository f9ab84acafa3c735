"""Packed (score, id) keys: one int64 whose order is higher score first, then lower id.

Packing makes the best of several vocabulary shards a plain integer maximum: one all-gather gives
every rank the same winner, ties included.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EMPTY", "FAULT", "best", "order_keys", "unpack_id"]

EMPTY = -(2**63)
"""Key of a shard without any allowed id: loses against every other."""

FAULT = 2**63 - 1
"""Key of a row that holds a NaN: wins against every other, so that all ranks see it."""

_LOW = 0xFFFFFFFF


def order_keys(score: Tensor, first_id: int) -> Tensor:
    """Keys of [R, C] float32 scores of ids first_id…first_id+C−1.

    −0 counts as +0. Infinities keep their place; NaN must have been dealt with before.
    """
    bits = (score.float() + 0.0).view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(first_id, first_id + score.shape[1], device=score.device)
    return ordered << 32 | (_LOW - ids)


def best(score: Tensor, first_id: int, allowed: Tensor | None = None) -> Tensor:
    """Best key of each row: [R, C] → [R] int64.

    Args:
        score: [R, C] float32; C may be 0.
        first_id: global id of column 0.
        allowed: [R, C] bool; ids outside never win. None allows all.
    """
    if score.shape[1] == 0:
        return torch.full((score.shape[0],), EMPTY, dtype=torch.int64, device=score.device)
    if allowed is None:
        value, column = score.float().max(dim=1)  # first maximum, hence the lowest id
        keys = order_keys(value[:, None], 0)[:, 0] - first_id - column
        return torch.where(value.isnan(), FAULT, keys)  # a maximum passes a NaN on
    keys = order_keys(score, first_id).masked_fill(~allowed, EMPTY).amax(dim=1)
    return torch.where(score.isnan().any(dim=1), FAULT, keys)


def unpack_id(key: Tensor) -> Tensor:
    """The id inside a key."""
    return _LOW - (key & _LOW)
