"""Which drafted tokens stand, and what that changes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.context_kv import valid_slots

__all__ = ["Committed", "accept", "commit"]


def accept(drafted: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Compare proposals with the target's own choices (DFlash, arXiv 2602.06036).

    Args:
        drafted: [B, g−1] proposals d_1…d_{g−1}.
        picked: [B, g] the target's token after each row.

    Returns:
        accepted [B]: length of the leading run with d_{i+1} == y_i;
        bonus [B]: y at that row, the next anchor.
    """
    run = (drafted == picked[:, :-1]).long().cumprod(dim=1)
    accepted = run.sum(dim=1)
    bonus = picked.gather(1, accepted[:, None]).squeeze(1)
    return accepted, bonus


@dataclasses.dataclass(frozen=True)
class Committed:
    """What a verified batch brought.

    Attributes:
        accepted: [B] proposals that stand; rows 0…accepted are committed.
        fault: [B] bool, a committed row held a NaN.
        slots: [B · g] page slots of the committed rows, 0 (in the dummy page) for the others.
    """

    accepted: Tensor
    fault: Tensor
    slots: Tensor


def commit(
    drafted: Tensor,
    picked: Tensor,
    faults: Tensor,
    slots: Tensor,
    page_slots: Tensor,
    anchors: Tensor,
    starts: Tensor,
    *,
    synthetic: float | None = None,
) -> Committed:
    """Accept, and advance the device tables of the batch.

    The last slot of the tables is nobody's: rows that pad a batch stand there, and it stays where
    it is.

    Args:
        drafted: [B, g − 1].
        picked, faults: [B, g].
        slots: [B] index of each request in the tables.
        page_slots: [B · g] page slots of the verified rows.
        anchors, starts: [S] tables of any stride, changed in place.
        synthetic: for benchmarks only, since it makes the output wrong on purpose: each next
            proposal stands with this probability whatever it is, decided by a hash of its
            position and slot. None compares proposals with picks.

    Raises:
        ConfigError: `synthetic` is no probability.
    """
    threshold = None if synthetic is None else _threshold(synthetic)
    if compiled(picked):
        from dflash_serve.kernels.gpu import accept as kernels

        return Committed(
            *kernels.commit(drafted, picked, faults, slots, page_slots, anchors, starts, threshold)
        )
    rows = picked.shape[1]
    if threshold is not None:
        position = starts[slots][:, None] + torch.arange(1, rows, device=slots.device)
        stands = _hash(position, slots[:, None]) < threshold
        drafted = torch.where(stands, picked[:, :-1], picked[:, :-1] + 1)
    accepted, bonus = accept(drafted, picked)
    idle = slots == starts.shape[0] - 1
    starts[slots] += torch.where(idle, 0, accepted + 1)
    anchors[slots] = torch.where(idle, 0, bonus)
    reached = torch.arange(rows, device=slots.device) <= accepted[:, None]
    kept = valid_slots(page_slots.view(-1, rows), accepted)
    return Committed(accepted, (faults & reached).any(dim=1), kept.flatten())


def _threshold(probability: float) -> int:
    """Hashes of 32 bits that count as accepted lie below it."""
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(
            f"synthetic acceptance is {probability}; give a probability from 0 to 1, or None"
        )
    return round(probability * 2**32)


def _hash(position: Tensor, slot: Tensor) -> Tensor:
    """32 bits of a position and a slot in int64; factors below 2^31 keep products below 2^63."""
    x = (position * 0x1B873593 + slot * 0x2C1B3C6D) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x297A2D39) & 0xFFFFFFFF
    return x ^ (x >> 16)
