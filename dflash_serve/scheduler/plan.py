"""What one step does, decided on rank 0 and executed by every rank (no torch).

A plan is complete: ranks take no decision of their own, since ranks that disagree deadlock.
An empty plan is legal.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "DecodeResult",
    "PrefillChunk",
    "SlotSetup",
    "StepPlan",
    "StepResult",
    "TraceOrder",
]


class SlotSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot.

    Attributes:
        slot: index in the device tables.
        start: tokens whose pages were found in the prefix cache.
        anchor: the last known token of a continued request; 0 for a new one, whose anchor is
            the first token sampled.
    """

    slot: int
    start: int
    anchor: int
    seed: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Known tokens of one request to run through the target.

    Attributes:
        token_ids: ids of positions start…start+len−1.
        sample: choose the token after the last one; it becomes the anchor.
    """

    slot: int
    start: int
    token_ids: list[int]
    sample: bool
    truncates: bool = False
    noisy: bool = False


class TraceOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Profile so many steps, and write the traces into a folder."""

    steps: int
    folder: str


class StepPlan(msgspec.Struct, kw_only=True):
    """One step: first set-ups and new pages, then prefill chunks, then one decode batch.

    Attributes:
        pages: (slot, index of the first new page in the slot's table, page ids).
        decode: slots to decode together.
        rows: g, rows verified for each of them.
        longest: largest committed length in the decode batch, plus `rows`.
        noisy: whether any decoding slot has a temperature above 0.
        truncates: whether any decoding slot truncates its distribution.
        draft_scale: factor on the draft's logits where it is fitted; 0 leaves it as it is.
        trace: profile this step and those after it.
        stop: leave the loop after this plan.
    """

    step: int
    setups: list[SlotSetup] = []
    pages: list[tuple[int, int, list[int]]] = []
    prefill: list[PrefillChunk] = []
    decode: list[int] = []
    rows: int = 1
    longest: int = 0
    noisy: bool = False
    truncates: bool = False
    draft_scale: float = 0.0
    trace: TraceOrder | None = None
    stop: bool = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.prefill or self.decode or self.setups or self.stop)


class DecodeResult(msgspec.Struct, kw_only=True):
    """What a decode batch brought to one slot.

    Attributes:
        picked: the target's token after each verified row; the first accepted + 1 are committed.
        accepted: drafts that the target confirmed.
        fault: the logits held a NaN; nothing of this slot may be used.
    """

    picked: list[int]
    accepted: int
    fault: bool


class StepResult(msgspec.Struct, kw_only=True):
    """Outcome of a plan, the same on every rank.

    Attributes:
        sampled: per prefill chunk the token sampled, or None where none was asked for, or −1
            where the chunk came out as NaN, asked or not.
        decoded: one entry per decoding slot, in the plan's order.
    """

    sampled: list[int | None] = []
    decoded: list[DecodeResult] = []
