"""Which drafted tokens stand."""

from __future__ import annotations

from torch import Tensor

__all__ = ["accept"]


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
