"""A rank's hands: executes plans on its shard of both models."""

from __future__ import annotations

import torch

from dflash_serve.engine.drafters import DFlashDrafter, Drafter
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.state import DeviceState
from dflash_serve.engine.step import DecodeOutput, decode, prefill
from dflash_serve.scheduler.plan import DecodeResult, PrefillChunk, StepPlan, StepResult

__all__ = ["Runner"]


class Runner:
    """Executes plans; every rank runs the same ones in the same order.

    Args:
        pair: this rank's models and pages.
        slots: rows of the device tables.
        draft_scale: factor on the draft's logits.
        drafter: replaces the draft's proposals (tests); context is injected all the same.
    """

    def __init__(
        self, pair: Pair, slots: int, draft_scale: float = 1.0, drafter: Drafter | None = None
    ) -> None:
        geometry = pair.settings.geometry
        length = pair.settings.max_model_len + 2 * geometry.block
        self.pair = pair
        self.state = DeviceState(slots, -(-length // pair.page_size), pair.device)
        self.drafter = drafter if drafter is not None else _drafter(pair, draft_scale)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and read its outcome back to the host."""
        self.state.apply(plan)
        result = StepResult(sampled=[self._prefill(chunk) for chunk in plan.prefill])
        if plan.decode:
            result.decoded = _read_back(self._decode(plan))
        return result

    def _prefill(self, chunk: PrefillChunk) -> int | None:
        sampled = prefill(
            self.pair,
            self.state,
            chunk.slot,
            torch.tensor(chunk.token_ids, dtype=torch.int64, device=self.pair.device),
            chunk.start,
            sample=chunk.sample,
            noisy=chunk.noisy,
            truncates=chunk.truncates,
        )
        if sampled is None:
            return None
        picked, fault = sampled
        return -1 if bool(fault[0]) else int(picked[0])

    def _decode(self, plan: StepPlan) -> DecodeOutput:
        return decode(
            self.pair,
            self.state,
            self.drafter,
            torch.tensor(plan.decode, dtype=torch.int64, device=self.pair.device),
            plan.rows,
            plan.longest,
            noisy=plan.noisy,
            truncates=plan.truncates,
        )


def _drafter(pair: Pair, scale: float) -> Drafter | None:
    if pair.draft is None or pair.draft_kv is None or pair.settings.mask_id is None:
        return None
    return DFlashDrafter(
        pair.draft,
        pair.target,
        pair.draft_kv,
        pair.group,
        pair.settings.mask_id,
        scale,
        pair.logits_rows,
    )


def _read_back(output: DecodeOutput) -> list[DecodeResult]:
    """One copy to the host for the whole batch."""
    packed = torch.cat([output.picked, output.accepted[:, None], output.fault[:, None].long()], 1)
    return [
        DecodeResult(picked=row[:-2], accepted=row[-2], fault=bool(row[-1]))
        for row in packed.tolist()
    ]
