"""A rank's hands: executes plans on its shard of both models."""

from __future__ import annotations

import torch

from dflash_serve.engine.drafters import DFlashDrafter, Drafter
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.state import DeviceState
from dflash_serve.engine.step import DecodeOutput, decode, prefill
from dflash_serve.scheduler.plan import (
    DecodeResult,
    PrefillChunk,
    SlotSetup,
    StepPlan,
    StepResult,
)

__all__ = ["Runner"]


class Runner:
    """Executes plans; every rank runs the same ones in the same order.

    Args:
        pair: this rank's models and pages.
        slots: rows of the device tables.
        draft_scale: factor on the draft's logits.
    """

    def __init__(self, pair: Pair, slots: int, draft_scale: float = 1.0) -> None:
        geometry = pair.settings.geometry
        length = pair.settings.max_model_len + 2 * geometry.block
        self.pair = pair
        self.state = DeviceState(slots, -(-length // pair.page_size), pair.device)
        # Tests put another drafter here; context is injected all the same.
        self.drafter = _drafter(pair, draft_scale)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and read its outcome back to the host."""
        self.state.apply(plan)
        result = StepResult(sampled=[self._prefill(chunk) for chunk in plan.prefill])
        if plan.decode:
            result.decoded = _read_back(self._decode(plan))
        faulty = [c.slot for c, s in zip(plan.prefill, result.sampled, strict=True) if s == -1]
        faulty += [s for s, d in zip(plan.decode, result.decoded, strict=True) if d.fault]
        if faulty:
            self._scrub(faulty)
        return result

    def _scrub(self, slots: list[int]) -> None:
        """Take NaNs out of the pages of slots and out of the dummy page.

        Masked keys weigh 0, but 0 · NaN is NaN: left there, they would reach whoever reads those
        pages next. Sound values in shared pages stay as they are.
        """
        tables = self.state.page_table[slots].flatten()
        pages = torch.cat([tables, tables.new_zeros(1)])  # repeats get the same values
        for kv in (self.pair.target_kv, self.pair.draft_kv):
            for part in [part for layer in kv.layers for part in layer] if kv is not None else []:
                part[pages] = part[pages].nan_to_num(0.0, 0.0, 0.0)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one whole step, so that a pair that cannot run fails before it is called ready.

        Leaves the pages it used empty; slots are set up anew for every request.
        """
        pair, rows = self.pair, self.pair.settings.geometry.verify_rows
        pages = list(range(1, 2 + rows // pair.page_size))
        setup = SlotSetup(
            slot=0, start=0, anchor=0, seed=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
        )
        chunk = PrefillChunk(slot=0, start=0, token_ids=[0], sample=True)
        self.execute(
            StepPlan(
                step=-1,
                setups=[setup],
                pages=[(0, 0, pages)],
                prefill=[chunk],
                decode=[0],
                rows=rows,
                longest=1 + rows,
            )
        )
        pools = [pair.target_kv] if pair.draft_kv is None else [pair.target_kv, pair.draft_kv]
        for pool in pools:
            for keys, values in pool.layers:
                keys[: pages[-1] + 1].zero_()
                values[: pages[-1] + 1].zero_()

    def _prefill(self, chunk: PrefillChunk) -> int | None:
        picked, fault = prefill(
            self.pair,
            self.state,
            chunk.slot,
            torch.tensor(chunk.token_ids, dtype=torch.int64, device=self.pair.device),
            chunk.start,
            sample=chunk.sample,
            noisy=chunk.noisy,
            truncates=chunk.truncates,
        )
        if bool(fault[0]):
            return -1
        return None if picked is None else int(picked[0])

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
