"""Who proposes the tokens that a step verifies.

The engine drafts with `DFlashDrafter`. Tests put another drafter into the same seam: verification
hides every fault of a draft, so only drafters with a known behaviour reach all accepted lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from dflash_serve.cache.paged import PagedKV
from dflash_serve.kernels.linear import Weight
from dflash_serve.kernels.pick import fuses
from dflash_serve.models.decoder import DenseDecoder
from dflash_serve.models.dflash import DFlashDraft
from dflash_serve.models.layers import Head, RowBatch
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.pick import RowSampling, pick, pick_head

__all__ = ["DFlashDrafter", "DecodeBlock", "Drafter", "head_rows"]


@dataclasses.dataclass(frozen=True)
class DecodeBlock:
    """One decode batch as a drafter sees it.

    Attributes:
        slots, anchor: [B].
        ids: [B, g] the anchor and g − 1 masks.
        batch: where the B · g rows stand.
        sampling: parameters of the B · (g − 1) proposals.
        noise: their noise on this rank, [B · (g − 1), valid ids], or None when all are greedy.
    """

    slots: Tensor
    anchor: Tensor
    ids: Tensor
    batch: RowBatch
    sampling: RowSampling
    noise: Tensor | None


class Drafter(Protocol):
    """Proposes d_1…d_{g−1} for every request of a batch."""

    def propose(self, block: DecodeBlock) -> Tensor:
        """[B, g − 1] ids. Whatever they are, the output stays the target's."""


class DFlashDrafter:
    """The draft model with the target's embedding and head.

    Args:
        head: a copy of the target's head to draft with; None takes the target's own.
        scale: factor on the draft's logits, a number or [1] float32.
        logits_rows: most rows sent through the head at once.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        target: DenseDecoder,
        kv: PagedKV,
        group: Group,
        scale: float | Tensor,
        logits_rows: int,
        head: Head | None = None,
    ) -> None:
        self._draft = draft
        self._target = target
        self._head = head
        self._kv = kv
        self._group = group
        self._scale = scale
        self._logits_rows = logits_rows

    def propose(self, block: DecodeBlock) -> Tensor:
        """Row j ≥ 1 of the block predicts the token at its own position."""
        rows = block.batch.rows
        hidden = self._draft(self._target.embed(block.ids.flatten()), block.batch, self._kv)
        hidden = hidden.view(-1, rows, hidden.shape[-1])[:, 1:].flatten(0, 1)
        drafted, _ = head_rows(
            self._target,
            hidden,
            block.sampling,
            self._group,
            noise=block.noise,
            limit=self._logits_rows,
            scale=self._scale,
            truncate=False,
            head=self._head,
        )
        return drafted.view(-1, rows - 1)


def head_rows(
    target: DenseDecoder,
    hidden: Tensor,
    sampling: RowSampling,
    group: Group,
    *,
    noise: Tensor | None,
    limit: int,
    scale: float | Tensor = 1.0,
    truncate: bool = True,
    head: Head | None = None,
) -> tuple[Tensor, Tensor]:
    """Head product and pick of [R, H] rows.

    On a GPU in one kernel where nothing truncates, else with the logits of at most `limit` rows
    at once.

    Args:
        head: in place of the target's.

    Returns:
        ids [R] and faults [R], as `parallel.pick.pick`.
    """
    head = head or target.head
    weight = _plain_weight(head)
    whole = weight is not None and not (truncate and sampling.truncates)
    if weight is not None and whole and fuses(hidden, weight, noisy=sampling.noisy):
        return pick_head(hidden, weight, sampling, head.shard, group, noise=noise, scale=scale)
    parts = []
    for first in range(0, hidden.shape[0], limit):
        some = slice(first, first + limit)
        parts.append(
            pick(
                head.apply(hidden[some]),
                sampling.rows(first, first + limit),
                head.shard,
                group,
                noise=None if noise is None else noise[some],
                scale=scale,
                truncate=truncate,
            )
        )
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([faults for _, faults in parts])


def _plain_weight(head: Head) -> Weight | None:
    """The weight of a head whose logits are hidden @ weight.T and nothing more.

    That is what `Head.apply` computes; None for a head with an `apply` of another class or of its
    own.
    """
    return head.weight if getattr(head.apply, "__func__", None) is Head.apply else None
