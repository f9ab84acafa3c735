"""What the device knows of the running requests: one row per slot."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.parallel.pick import RowSampling
from dflash_serve.scheduler.plan import SlotSetup, StepPlan

__all__ = ["DeviceState"]


class DeviceState:
    """Per-slot tensors; every rank holds the same ones.

    Attributes:
        anchor: [S] the known token at position `start`, which has no keys and values yet.
        start: [S] tokens whose keys and values are committed.
        page_table: [S, P] page ids in position order; 0 is the dummy page.
    """

    def __init__(self, slots: int, pages_per_slot: int, device: torch.device) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.device = device
        self.anchor = integers(slots)
        self.start = integers(slots)
        self.page_table = integers(slots, pages_per_slot)
        self._seed = integers(slots)
        self._top_k = integers(slots)
        self._temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self._top_p = torch.ones(slots, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(slots, dtype=torch.float64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take over a plan's new requests and pages."""
        for setup in plan.setups:
            self._set_up(setup)
        for slot, first, pages in plan.pages:
            self.page_table[slot, first : first + len(pages)] = torch.tensor(
                pages, dtype=torch.int64, device=self.device
            )

    def _set_up(self, setup: SlotSetup) -> None:
        slot = setup.slot
        self.start[slot] = setup.start
        self.anchor[slot] = setup.anchor
        self.page_table[slot] = 0
        self._seed[slot] = setup.seed
        self._temperature[slot] = setup.temperature
        self._top_k[slot] = setup.top_k
        self._top_p[slot] = setup.top_p
        self._min_p[slot] = setup.min_p

    def sampling(
        self, slots: Tensor, positions: Tensor, *, noisy: bool, truncates: bool
    ) -> RowSampling:
        """Sampling parameters of rows.

        Args:
            slots: [B].
            positions: [B, R] position of the token that each row chooses.

        Returns:
            parameters of B · R rows, request by request.
        """
        rows = slots.repeat_interleave(positions.shape[1])
        return RowSampling(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            position=positions.flatten(),
            noisy=noisy,
            truncates=truncates,
        )
