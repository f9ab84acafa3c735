"""A rank's hands: executes plans on its shard of both models."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_serve.config import EngineConfig
from dflash_serve.engine.drafters import DFlashDrafter, Drafter
from dflash_serve.engine.graphs import StepGraphs, StepKey, batch_buckets
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.readback import Outbox, Pending
from dflash_serve.engine.state import DeviceState
from dflash_serve.engine.step import decode, prefill, prefill_packed
from dflash_serve.kernels.pick import NOISY_ROWS
from dflash_serve.log import get_logger
from dflash_serve.scheduler.plan import PrefillChunk, SlotSetup, StepPlan, StepResult

__all__ = ["Runner"]

logger = get_logger(__name__)

_ROW_COUNTS = (1, 2, 16, 17, 33, 65, 129)
"""From each of these on a product may take another kernel."""


class Runner:
    """Executes plans; every rank runs the same ones in the same order.

    Args:
        pair: this rank's models and pages.
    """

    def __init__(self, pair: Pair, config: EngineConfig) -> None:
        geometry = pair.settings.geometry
        length = pair.settings.max_model_len + 2 * geometry.block
        slots = config.max_running
        self.pair = pair
        self.state = DeviceState(
            slots, -(-length // pair.page_size), config.prefill_chunk, pair.device
        )
        # Tests put another drafter here; context is injected all the same.
        scale = self.state.scale if config.draft_scale == "auto" else config.draft_scale
        self.drafter = _drafter(pair, scale)
        self._captured_drafter = self.drafter
        self._longest = length
        packs = config.pack_prompts
        self._pack_prompts = not config.row_invariant if packs is None else packs
        self._slots = torch.arange(slots + 1, device=pair.device)
        self._outbox = Outbox(pair.device)
        self.graphs: StepGraphs | None = None
        self.eager_steps = 0
        self.startup: dict[str, float] = {}
        if _captures(pair, config):
            idle = torch.full((slots,), self.state.dummy, device=pair.device)
            self.graphs = StepGraphs(
                self._step, self.state.batch, idle, batch_buckets(slots), NOISY_ROWS
            )

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan and read its outcome back to the host."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Queue one plan on the device; its outcome can be waited for later."""
        packs = self._pack_prompts and len(plan.prefill) > 1
        self.state.apply(plan, pack=packs)
        sampled = None
        if plan.prefill:
            compute = self._prefill_packed if packs else self._prefill
            sampled = compute(plan.prefill)
        decoded = self._decode(plan) if plan.decode else None
        return self._outbox.send(plan, sampled, decoded, self._scrub)

    def _decode(self, plan: StepPlan) -> Tensor:
        """[≥ B, g + 2] packed results; see `_step`."""
        batch = len(plan.decode)
        if self.graphs is not None and self.drafter is self._captured_drafter:
            key = self.graphs.key(
                batch, plan.rows, truncates=plan.truncates, noisy=plan.noisy or plan.truncates
            )
            return self.graphs.replay(key)
        self.eager_steps += 1
        key = StepKey(batch, plan.rows, plan.truncates, plan.noisy)
        return self._step(key, self.state.batch[:batch], plan.longest)

    def _step(self, key: StepKey, slots: Tensor, longest: int | None = None) -> Tensor:
        """One decode step: [B, g + 2] the target's tokens, the accepted count, the fault."""
        out = decode(
            self.pair,
            self.state,
            self.drafter,
            slots,
            key.rows,
            longest or self._longest,
            noisy=key.noisy,
            truncates=key.truncates,
        )
        return torch.cat([out.picked, out.accepted[:, None], out.fault[:, None].long()], 1)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """[chunks, 2] the sampled id, or −1 where none was asked for, and the fault."""
        first, results = 0, []
        for chunk in chunks:
            count = len(chunk.token_ids)
            picked, fault = prefill(
                self.pair,
                self.state,
                self._slots[chunk.slot : chunk.slot + 1],
                self.state.tokens[first : first + count],
                chunk.start,
                sample=chunk.sample,
                noisy=chunk.noisy,
                truncates=chunk.truncates,
            )
            if picked is None:
                picked = torch.full_like(fault, -1, dtype=torch.int64)
            results.append(torch.stack([picked, fault.long()], dim=1))
            first += count
        return torch.cat(results)

    def _prefill_packed(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """`_prefill` in one pass; the scheduler bounds the sum of the chunks as it does one."""
        return prefill_packed(self.pair, self.state, chunks)

    @torch.inference_mode()
    def _scrub(self, slots: Sequence[int]) -> None:
        """Take NaNs out of the pages of slots and out of the dummy page.

        Masked keys weigh 0, but 0 · NaN is NaN: left there, they would reach whoever reads those
        pages next. Sound values in shared pages stay as they are.
        """
        tables = self.state.page_table[list(slots)].flatten()
        pages = torch.cat([tables, tables.new_zeros(1)])  # repeats get the same values
        for kv in (self.pair.target_kv, self.pair.draft_kv):
            for part in [part for layer in kv.layers for part in layer] if kv is not None else []:
                part[pages] = part[pages].nan_to_num(0.0, 0.0, 0.0)

    @torch.inference_mode()
    def warm_up(self, lengths: Sequence[int]) -> None:
        """Run one whole step, so that a pair that cannot run fails before it is called ready.

        Leaves the pages it used empty; slots are set up anew for every request. On CUDA then
        captures the steps of every batch size.

        Args:
            lengths: values of g to capture.
        """
        pair, rows = self.pair, self.pair.settings.geometry.verify_rows
        pages = list(range(1, 2 + rows // pair.page_size))
        chunk = PrefillChunk(slot=0, start=0, token_ids=[0], sample=True)
        self.execute(
            StepPlan(
                step=-1,
                setups=[SlotSetup(slot=0, start=0, anchor=0, seed=0, temperature=0.0)],
                pages=[(0, 0, pages)],
                prefill=[chunk],
                decode=[0],
                rows=rows,
                longest=1 + rows,
            )
        )
        pools = [pair.target_kv] if pair.draft_kv is None else [pair.target_kv, pair.draft_kv]
        for kv in pools:
            kv.pool[:, :, : pages[-1] + 1].zero_()
        # Or slot 0 would grow with every step that is timed, beyond its pages in the end.
        self.state.rest()
        if pair.device.type == "cuda":
            self._compile_prefill()
        if self.graphs is not None:
            self._capture(self.graphs, lengths)
        self.eager_steps = 0

    def _compile_prefill(self) -> None:
        """Run a chunk of every row count that kernels are made for, with and without truncation.

        A kernel compiled while requests wait costs them seconds.
        """
        counts = {*_ROW_COUNTS, self.state.tokens.shape[0]}
        for count in sorted({min(c, self.state.tokens.shape[0], self._longest) for c in counts}):
            for truncates in (False, True):
                self._idle_prefill(count, truncates=truncates)
        # Ids behind those of another chunk may lie at an address that is no multiple of 16.
        for first in (1, 2):
            if first < self.state.tokens.shape[0]:
                self._idle_prefill(1, first=first, truncates=False)
        if self._pack_prompts:
            self._compile_packed()

    def _compile_packed(self) -> None:
        """What chunks in one pass run beside the products above: the gather and attention of
        requests of different lengths, and the head for every number of chunks."""
        most, tokens = self._most_packed()
        for chunks in sorted({min(count, most) for count in (*_ROW_COUNTS, most)}):
            for noisy, truncates in ((False, False), (True, False), (True, True)):
                self._idle_packed(chunks, chunks, noisy=noisy, truncates=truncates)
        # The sum of the chunks may be more than one alone may have.
        self._idle_packed(most, tokens, noisy=True, truncates=True)

    def _most_packed(self) -> tuple[int, int]:
        """Most chunks of one pass, and most tokens of so many."""
        tokens = self.state.tokens.shape[0]
        chunks = min(tokens, self.state.chunk_slots.shape[0])
        return chunks, min(tokens, chunks * self._longest)

    def _idle_prefill(self, count: int, *, first: int = 0, truncates: bool) -> None:
        """A chunk on the slot that is nobody's."""
        slot, tokens = self._slots[self.state.dummy :], self.state.tokens[first : first + count]
        options = {"sample": True, "noisy": True, "truncates": truncates}
        prefill(self.pair, self.state, slot, tokens, 0, **options)
        self.state.start[self.state.dummy] = 0

    def _idle_packed(self, chunks: int, tokens: int, *, noisy: bool, truncates: bool) -> None:
        """`tokens` tokens in so many chunks of about one length, all of which sample, on the slot
        that is nobody's."""
        bounds = [tokens * i // chunks for i in range(chunks + 1)]
        planned = [
            PrefillChunk(
                slot=self.state.dummy,
                start=0,
                token_ids=[0] * (stop - first),
                sample=True,
                noisy=noisy,
                truncates=truncates,
            )
            for first, stop in itertools.pairwise(bounds)
        ]
        self.state.pack(planned)
        self._prefill_packed(planned)
        self.state.start[self.state.dummy] = 0

    @torch.inference_mode()
    def time_steps(self, lengths: Sequence[int]) -> dict[tuple[int, int], float]:
        """Seconds of a decode step by (batch bucket, g), on slots without context.

        The median of several runs on CUDA, where a step is short; the better of two elsewhere,
        for the smallest and the largest batch alone.
        """
        began = time.perf_counter()
        try:
            return self._time_steps(lengths)
        finally:
            self.startup["timing_s"] = time.perf_counter() - began

    def _time_steps(self, lengths: Sequence[int]) -> dict[tuple[int, int], float]:
        slots = self.state.batch.shape[0]
        if self.graphs is not None:
            replay = self.graphs.replay
            return {
                (key.batch, key.rows): _median_seconds(functools.partial(replay, key))
                for key in self.graphs.keys(lengths, noisy=(False,))
            }
        found = {}
        for batch in sorted({1, slots}):
            for rows in lengths:
                began = []
                for _ in range(3):
                    began.append(time.perf_counter())
                    self._step(StepKey(batch, rows), self.state.batch[:batch], rows).tolist()
                began.append(time.perf_counter())
                found[batch, rows] = min(began[2] - began[1], began[3] - began[2])
        return found

    @torch.inference_mode()
    def rehearse_prefill(self) -> None:
        """Run the largest chunk, and the largest sum of chunks, on the slot that is nobody's."""
        self._idle_prefill(min(self.state.tokens.shape[0], self._longest), truncates=True)
        if self._pack_prompts:
            self._idle_packed(*self._most_packed(), noisy=True, truncates=True)

    @torch.inference_mode()
    def rehearse_decode(self) -> None:
        """Run the largest decode step on the slot that is nobody's."""
        rows = self.pair.settings.geometry.verify_rows
        batch = self.state.batch
        self._step(StepKey(batch.shape[0], rows, truncates=True, noisy=True), batch)

    def _capture(self, graphs: StepGraphs, lengths: Sequence[int]) -> None:
        def log(done: int, of: int) -> None:
            if done == of or done * 4 // of != (done - 1) * 4 // of:
                logger.info("%d of %d graphs captured", done, of)

        before = torch.cuda.memory_reserved()
        graphs.capture(graphs.keys(lengths), log)
        self.startup |= {
            "graphs": len(graphs),
            "first_runs_s": graphs.first_seconds,
            "capture_s": graphs.capture_seconds,
            "graph_bytes": torch.cuda.memory_reserved() - before,
        }


def _median_seconds(run: Callable[[], object], times: int = 5) -> float:
    """Median device time of a few runs after one more."""
    marks = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(times + 1)
    ]
    for mark in marks:
        run()
        mark.record()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return float(spans[times // 2]) / 1e3


def _captures(pair: Pair, config: EngineConfig) -> bool:
    """Whether steps are captured: CUDA, unless refused, or gloo, whose collectives cannot be."""
    return pair.device.type == "cuda" and not config.eager and not config.share_gpu


def _drafter(pair: Pair, scale: float | Tensor) -> Drafter | None:
    if pair.draft is None or pair.draft_kv is None or pair.settings.mask_id is None:
        return None
    return DFlashDrafter(
        pair.draft,
        pair.target,
        pair.draft_kv,
        pair.group,
        scale,
        pair.logits_rows,
        pair.draft_head,
    )
