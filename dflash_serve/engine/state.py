"""What the device knows of the running requests: one row per slot."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from dflash_serve.parallel.pick import RowSampling
from dflash_serve.scheduler.plan import SlotSetup, StepPlan

__all__ = ["DeviceState"]

_SETUP = struct.Struct("=4q4d")
"""A slot's row: anchor, start, seed, top-k, temperature, top-p, min-p, unused."""


class DeviceState:
    """Per-slot tables; every rank holds the same ones.

    The tables have one row more than there are slots. It belongs to no request: rows that pad a
    batch to a captured size stand there, with the dummy page under them.

    Attributes:
        anchor: [S + 1] the known token at position `start`, which has no keys and values yet.
        start: [S + 1] tokens whose keys and values are committed.
        page_table: [S + 1, P] page ids in position order; 0 is the dummy page.
        dummy: index of the row that is nobody's.
    """

    def __init__(self, slots: int, pages_per_slot: int, device: torch.device) -> None:
        self.device = device
        self.dummy = slots
        idle = _row(SlotSetup(slot=0, start=0, anchor=0, seed=0, temperature=0.0))
        # Integers and floats of a slot side by side, so that one gather fetches all of them.
        self._slots = torch.tensor([idle] * (slots + 1), dtype=torch.int64, device=device)
        self.page_table = torch.zeros((slots + 1, pages_per_slot), dtype=torch.int64, device=device)
        self.anchor = self._slots[:, 0]
        self.start = self._slots[:, 1]

    def apply(self, plan: StepPlan) -> None:
        """Take over a plan's new requests and pages."""
        for setup in plan.setups:
            self.page_table[setup.slot] = 0
            self._slots[setup.slot] = torch.tensor(_row(setup), device=self.device)
        for slot, first, pages in plan.pages:
            self.page_table[slot, first : first + len(pages)] = torch.tensor(
                pages, dtype=torch.int64, device=self.device
            )

    def sampling(
        self, slots: Tensor, count: int, *, ahead: int = 1, noisy: bool, truncates: bool
    ) -> RowSampling:
        """Sampling parameters of rows that choose the tokens from start + ahead on.

        Args:
            slots: [B].
            count: rows of each request.
            ahead: 1 where the anchor stands at `start`; 0 right after a prefill, which chooses it.
        """
        rows = self._slots[slots]
        real = rows.view(torch.float64)
        return RowSampling(
            temperature=real[:, 4],
            top_k=rows[:, 3],
            top_p=real[:, 5],
            min_p=real[:, 6],
            seed=rows[:, 2],
            position=rows[:, 1] + ahead,
            count=count,
            noisy=noisy,
            truncates=truncates,
        )


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
