"""Which drafted tokens stand, and what that changes: one launch, one program a request."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["commit"]


def commit(
    drafted: Tensor,
    picked: Tensor,
    faults: Tensor,
    slots: Tensor,
    page_slots: Tensor,
    anchors: Tensor,
    starts: Tensor,
    threshold: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """accepted [B], fault [B] bool and page slots [B · g]; anchors and starts change in place.

    Args:
        drafted, picked, faults: [B, g − 1], [B, g] and [B, g] of any strides.
        slots, page_slots: [B] and [B · g], dense.
        anchors, starts: [S] tables of any stride.
        threshold: proposals whose hash of 32 bits lies below it count as accepted; None compares
            them with the picks.
    """
    batch, rows = picked.shape
    accepted = torch.empty((batch,), dtype=torch.int64, device=slots.device)
    fault = torch.empty((batch,), dtype=torch.uint8, device=slots.device)
    kept = torch.empty((batch * rows,), dtype=torch.int64, device=slots.device)
    _commit[(batch,)](
        drafted,
        *drafted.stride(),
        picked,
        *picked.stride(),
        faults.view(torch.uint8),
        *faults.stride(),
        slots.contiguous(),
        page_slots.contiguous(),
        anchors,
        anchors.stride(0),
        starts,
        starts.stride(0),
        accepted,
        fault,
        kept,
        rows,
        starts.shape[0] - 1,
        THRESHOLD=-1 if threshold is None else threshold,
        BLOCK=max(int(triton.next_power_of_2(rows)), 32),
        num_warps=1,
    )
    return accepted, fault.view(torch.bool), kept


@triton.jit  # type: ignore[untyped-decorator]
def _hash(position: tl.tensor, slot: tl.tensor) -> Any:
    """32 bits of a position and a slot in int64; factors below 2^31 keep products below 2^63."""
    x = (position * 0x1B873593 + slot * 0x2C1B3C6D) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x297A2D39) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _commit(
    drafted: tl.tensor,
    drafted_stride: tl.tensor,
    drafted_step: tl.tensor,
    picked: tl.tensor,
    picked_stride: tl.tensor,
    picked_step: tl.tensor,
    faults: tl.tensor,
    faults_stride: tl.tensor,
    faults_step: tl.tensor,
    slots: tl.tensor,
    page_slots: tl.tensor,
    anchors: tl.tensor,
    anchors_stride: tl.tensor,
    starts: tl.tensor,
    starts_stride: tl.tensor,
    out_accepted: tl.tensor,
    out_fault: tl.tensor,
    out_kept: tl.tensor,
    rows: tl.tensor,
    idle_slot: tl.tensor,
    THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    is_row = row < rows
    is_proposal = row < rows - 1
    slot = tl.load(slots + request)
    start = tl.load(starts + slot * starts_stride)
    pick = tl.load(picked + request * picked_stride + row * picked_step, mask=is_row, other=0)

    if THRESHOLD >= 0:
        stands = _hash(start + 1 + row, slot) < THRESHOLD
    else:
        source = drafted + request * drafted_stride + row * drafted_step
        stands = tl.load(source, mask=is_proposal, other=0) == pick
    # The first row that does not stand; the last row holds no proposal and never does.
    accepted = tl.min(tl.where(is_proposal & stands, BLOCK, row), axis=0)
    bonus = tl.sum(tl.where(row == accepted, pick, 0), axis=0)
    reached = row <= accepted

    bad = tl.load(faults + request * faults_stride + row * faults_step, mask=is_row, other=0)
    fault = tl.max(tl.where(reached & (bad != 0), 1, 0), axis=0)
    place = page_slots + request * rows + row
    kept = tl.where(reached, tl.load(place, mask=is_row, other=0), 0)
    tl.store(out_kept + request * rows + row, kept, mask=is_row)
    tl.store(out_accepted + request, accepted.to(tl.int64))
    tl.store(out_fault + request, fault.to(tl.uint8))

    # The idle row belongs to every padding row of the batch at once; all write the same anchor.
    busy = slot != idle_slot
    tl.store(starts + slot * starts_stride, start + accepted + 1, mask=busy)
    tl.store(anchors + slot * anchors_stride, tl.where(busy, bonus, 0))
