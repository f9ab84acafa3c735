"""One decode step and one prefill chunk, from page table to committed tokens.

A step reads no value back to the host between its parts, so that it can be captured whole.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from dflash_serve.engine.drafters import DecodeBlock, Drafter, head_rows
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.state import DeviceState
from dflash_serve.kernels.accept import accept
from dflash_serve.kernels.block import block_positions, page_slots
from dflash_serve.kernels.context_kv import valid_slots
from dflash_serve.models.layers import RowBatch
from dflash_serve.parallel.pick import row_noise

__all__ = ["DecodeOutput", "decode", "prefill"]


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Result of a decode step on the device.

    Attributes:
        drafted: [B, g − 1] proposals.
        picked: [B, g] the target's token after each row.
        accepted: [B]; picked[:, :accepted + 1] are the committed tokens.
        fault: [B] rows that matter held a NaN.
    """

    drafted: Tensor
    picked: Tensor
    accepted: Tensor
    fault: Tensor


def decode(
    pair: Pair,
    state: DeviceState,
    drafter: Drafter | None,
    slots: Tensor,
    rows: int,
    longest: int,
    *,
    noisy: bool,
    truncates: bool,
) -> DecodeOutput:
    """Draft, verify, accept, inject and advance B slots by one step of g rows.

    Args:
        slots: [B].
        rows: g; 1 verifies the anchor alone and still injects its context.
        longest: host bound on committed length + g.
        noisy, truncates: whether any slot needs noise, or truncation.
    """
    anchor, start = state.anchor[slots], state.start[slots]
    batch = _row_batch(state, slots, start, rows, longest, pair.page_size)
    sampling = state.sampling(
        slots, block_positions(start + 1, rows), noisy=noisy, truncates=truncates
    )
    noise = row_noise(sampling, pair.target.head.shard)

    if rows > 1 and drafter is not None:
        block = _draft_view(slots, anchor, batch, state, noise, truncates=truncates)
        drafted = drafter.propose(block)
    else:
        drafted = anchor.new_empty((slots.shape[0], 0))
    ids = torch.cat([anchor[:, None], drafted], dim=1)
    hidden, taps = pair.target(ids.flatten(), batch, pair.target_kv)
    picked, fault = head_rows(
        pair.target, hidden, sampling, pair.group, noise=noise, limit=pair.logits_rows
    )
    picked, fault = picked.view(-1, rows), fault.view(-1, rows)

    accepted, bonus = accept(drafted, picked)
    if taps is not None:
        valid = valid_slots(batch.slots.view(-1, rows), accepted)
        pair.inject(taps, batch.positions, valid.flatten())
    state.start[slots] = start + accepted + 1
    state.anchor[slots] = bonus
    reached = torch.arange(rows, device=slots.device) <= accepted[:, None]
    return DecodeOutput(drafted, picked, accepted, (fault & reached).any(dim=1))


def _draft_view(
    slots: Tensor,
    anchor: Tensor,
    batch: RowBatch,
    state: DeviceState,
    noise: Tensor | None,
    *,
    truncates: bool,
) -> DecodeBlock:
    """Proposal j is for the position that verify row j − 1 chooses, hence the same noise."""
    rows = batch.rows
    proposals = state.sampling(
        slots,
        block_positions(batch.start + 1, rows - 1),
        noisy=noise is not None,
        truncates=truncates,
    )
    if noise is not None:
        noise = noise.view(slots.shape[0], rows, -1)[:, :-1].flatten(0, 1)
    return DecodeBlock(slots, anchor, batch, proposals, noise)


def prefill(
    pair: Pair,
    state: DeviceState,
    slot: int,
    token_ids: Tensor,
    start: int,
    *,
    sample: bool,
    noisy: bool,
    truncates: bool,
) -> tuple[Tensor | None, Tensor]:
    """Run one chunk of known tokens of one request and inject its context.

    Args:
        token_ids: [n] ids of positions start…start+n−1.
        sample: also choose the next token, which becomes the anchor.

    Returns:
        id [1] when sampled, and fault [1]: the last row, which reads every key before it, held
        a NaN.
    """
    count = token_ids.shape[0]
    slots = torch.tensor([slot], device=state.device)
    batch = _row_batch(state, slots, state.start[slots], count, start + count, pair.page_size)
    hidden, taps = pair.target(token_ids, batch, pair.target_kv)
    if taps is not None:
        pair.inject(taps, batch.positions, batch.slots)
    state.start[slot] = start + count
    if not sample:
        return None, hidden[-1:].isnan().any(dim=1)
    position = torch.tensor([[start + count]], device=state.device)
    sampling = state.sampling(slots, position, noisy=noisy, truncates=truncates)
    noise = row_noise(sampling, pair.target.head.shard)
    picked, fault = head_rows(
        pair.target, hidden[-1:], sampling, pair.group, noise=noise, limit=pair.logits_rows
    )
    state.anchor[slot] = picked[0]
    return picked, fault


def _row_batch(
    state: DeviceState, slots: Tensor, start: Tensor, rows: int, longest: int, page_size: int
) -> RowBatch:
    table = state.page_table[slots]
    positions = block_positions(start, rows)
    return RowBatch(
        start=start,
        positions=positions.flatten(),
        slots=page_slots(table, positions, page_size).flatten(),
        page_table=table,
        rows=rows,
        longest=longest,
    )
