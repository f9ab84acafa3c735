"""Which drafted tokens stand, and what that changes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

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
    """
    rows = picked.shape[1]
    accepted, bonus = accept(drafted, picked)
    idle = slots == starts.shape[0] - 1
    starts[slots] += torch.where(idle, 0, accepted + 1)
    anchors[slots] = torch.where(idle, 0, bonus)
    reached = torch.arange(rows, device=slots.device) <= accepted[:, None]
    kept = valid_slots(page_slots.view(-1, rows), accepted)
    return Committed(accepted, (faults & reached).any(dim=1), kept.flatten())
