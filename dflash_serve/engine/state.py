"""What the device knows of the running requests: one row per slot."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_serve.kernels.block import ChunkRows, StepRows, gather_chunks, gather_step
from dflash_serve.parallel.pick import RowSampling
from dflash_serve.scheduler.plan import PrefillChunk, SlotSetup, StepPlan

__all__ = ["DeviceState"]

_SETUP = struct.Struct("=4q4d")
"""A slot's row: anchor, start, seed, top-k, temperature, top-p, min-p, unused."""

_WIDTH = 8


class DeviceState:
    """Per-slot tables and a step's inputs, in one block of integers; every rank holds the same.

    The tables have one row more than there are slots. It belongs to no request: rows that pad a
    batch to a captured size stand there, with the dummy page under them.

    Attributes:
        anchor: [S + 1] the known token at position `start`, which has no keys and values yet.
        start: [S + 1] tokens whose keys and values are committed.
        page_table: [S + 1, P] page ids in position order; 0 is the dummy page.
        batch: [S] slots of the decode batch, padded with `dummy`.
        tokens: ids of the prefill chunks, one after the other.
        chunk_slots: [S] slots of the chunks computed in one pass, padded with `dummy`.
        row_starts: [S + 1] which of the tokens are whose, as in `AttentionView`; those that pad
            have none.
        sampling_chunks: [≤ S] which of the chunks choose a token.
        scale: [1] float32, the factor on the draft's logits where it is fitted.
        dummy: index of the row that is nobody's.
    """

    def __init__(
        self, slots: int, pages_per_slot: int, prefill_tokens: int, device: torch.device
    ) -> None:
        self.device = device
        self.dummy = slots
        sizes = {
            "slots": (slots + 1) * _WIDTH,
            "pages": (slots + 1) * pages_per_slot,
            "batch": slots,
            "chunks": 3 * slots + 1,
            "tokens": prefill_tokens,
        }
        self._memory = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=device)
        table, pages, self.batch, packing, self.tokens = torch.split(
            self._memory, list(sizes.values())
        )
        firsts = itertools.accumulate(sizes.values(), initial=0)
        self._first = dict(zip(sizes, firsts, strict=False))
        self.chunk_slots, self.row_starts, self.sampling_chunks = torch.split(
            packing, [slots, slots + 1, slots]
        )
        self._slots = table.view(-1, _WIDTH)
        self.page_table = pages.view(-1, pages_per_slot)
        self.anchor, self.start = self._slots[:, 0], self._slots[:, 1]
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        self._scale = 1.0
        self._staging = _Staging(device)
        self._batch: list[int] = []
        idle = _row(SlotSetup(slot=0, start=0, anchor=0, seed=0, temperature=0.0))
        self._slots.copy_(torch.tensor([idle] * (slots + 1)))
        self.batch.fill_(slots)

    def apply(self, plan: StepPlan, *, pack: bool = False) -> None:
        """Take over a plan's new requests, pages, decode batch and prompt tokens.

        One copy to the device, whatever changed; none when nothing did.

        Args:
            pack: also say where the chunks stand in one pass.
        """
        edits: list[tuple[int, list[int]]] = []
        for setup in plan.setups:
            self.page_table[setup.slot].zero_()
            edits.append((setup.slot * _WIDTH, _row(setup)))
        width = self.page_table.shape[1]
        for slot, first, pages in plan.pages:
            edits.append((self._first["pages"] + slot * width + first, pages))
        if plan.prefill:
            ids = [token for chunk in plan.prefill for token in chunk.token_ids]
            edits.append((self._first["tokens"], ids))
            edits += self._packing(plan.prefill) if pack else []
        if plan.decode and plan.decode != self._batch:
            self._batch = list(plan.decode)
            padding = [self.dummy] * (self.batch.shape[0] - len(plan.decode))
            edits.append((self._first["batch"], plan.decode + padding))
        if plan.draft_scale not in (0.0, self._scale):
            self._scale = plan.draft_scale
            self.scale.fill_(plan.draft_scale)
        if edits:
            self._staging.write(self._memory, edits)

    def pack(self, chunks: Sequence[PrefillChunk]) -> None:
        """Take over chunks to be computed in one pass, without a plan."""
        ids = [token for chunk in chunks for token in chunk.token_ids]
        edits = [(self._first["tokens"], ids), *self._packing(chunks)]
        self._staging.write(self._memory, edits)

    def _packing(self, chunks: Sequence[PrefillChunk]) -> list[tuple[int, list[int]]]:
        """Edits of slots and row starts, for as many chunks as there are slots: kernels are
        compiled for that one number."""
        slots = self.chunk_slots.shape[0]
        missing = slots - len(chunks)
        ends = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        whose = [chunk.slot for chunk in chunks] + [self.dummy] * missing
        values = [*whose, 0, *ends, *ends[-1:] * missing]
        values += [i for i, chunk in enumerate(chunks) if chunk.sample]
        return [(self._first["chunks"], values)]

    def rest(self) -> None:
        """Put every place of the batch on the slot that is nobody's, whose length stays 0."""
        self.batch.fill_(self.dummy)
        self._batch = []

    def gather(
        self, slots: Tensor, rows: int, page_size: int, mask_id: int = 0, *, ahead: int = 1
    ) -> StepRows:
        """What a step of `rows` rows for each of [B] slots needs; see `kernels.block`."""
        return gather_step(
            self._slots, self.page_table, slots, rows, page_size, mask_id, ahead=ahead
        )

    def gather_chunks(self, rows: int, page_size: int) -> ChunkRows:
        """What one pass over all chunks, of `rows` tokens, needs; see `kernels.block`."""
        return gather_chunks(
            self._slots, self.page_table, self.chunk_slots, self.row_starts, rows, page_size
        )

    @staticmethod
    def sampling(
        state: Tensor, first: Tensor, count: int, *, noisy: bool, truncates: bool
    ) -> RowSampling:
        """Sampling parameters of the first `count` rows of each request of a step.

        Args:
            state: [B, C] the requests' rows of the slot table.
            first: [B] position of the token that a request's first row chooses.
        """
        whole, real = state, state.view(torch.float64)
        return RowSampling(
            temperature=real[:, 4],
            top_k=whole[:, 3],
            top_p=real[:, 5],
            min_p=real[:, 6],
            seed=whole[:, 2],
            position=first,
            count=count,
            noisy=noisy,
            truncates=truncates,
        )


class _Staging:
    """Carries edits of the tables to the device: two pinned buffers, used in turn.

    A buffer is written again only when the copy out of it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty((2, 0), dtype=torch.int64)] * 2
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def write(self, memory: Tensor, edits: list[tuple[int, list[int]]]) -> None:
        """memory[first + i] = values[i] for every (first, values); no index comes twice."""
        index = np.concatenate([np.arange(first, first + len(v)) for first, v in edits])
        values = np.concatenate([np.asarray(v, dtype=np.int64) for _, v in edits])
        both = torch.from_numpy(np.stack([index, values]))
        if self._pinned:
            both = self._copy(both, memory.device)
        memory[both[0]] = both[1]

    def _copy(self, both: Tensor, device: torch.device) -> Tensor:
        self._turn = turn = 1 - self._turn
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        count = both.shape[1]
        if self._buffers[turn].numel() < 2 * count:
            self._buffers[turn] = torch.empty(4 * count + 256, dtype=torch.int64, pin_memory=True)
        staged = self._buffers[turn][: 2 * count].view(2, count)
        staged.copy_(both)
        moved = staged.to(device, non_blocking=True)
        event = self._copied[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return moved


def _row(setup: SlotSetup) -> list[int]:
    packed = _SETUP.pack(
        setup.anchor,
        setup.start,
        setup.seed,
        setup.top_k,
        setup.temperature,
        setup.top_p,
        setup.min_p,
        0.0,
    )
    return list(struct.unpack("=8q", packed))
