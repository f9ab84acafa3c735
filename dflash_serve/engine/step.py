"""One decode step and prefill chunks, from page table to committed tokens.

A step reads no value back to the host between its parts, so that it can be captured whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_serve.engine.drafters import DecodeBlock, Drafter, head_rows
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.state import DeviceState
from dflash_serve.kernels.accept import commit
from dflash_serve.kernels.block import StepRows
from dflash_serve.models.layers import RowBatch
from dflash_serve.parallel.pick import RowSampling, row_noise
from dflash_serve.scheduler.plan import PrefillChunk

__all__ = ["DecodeOutput", "decode", "prefill", "prefill_packed"]


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
    step = state.gather(slots, rows, pair.page_size, pair.settings.mask_id or 0)
    batch, anchor = RowBatch(**vars(step.block), rows=rows, longest=longest), step.anchor
    sampling = state.sampling(step.state, step.first, rows, noisy=noisy, truncates=truncates)
    noise = row_noise(sampling, pair.target.head.shard)

    if rows > 1 and drafter is not None:
        drafted = drafter.propose(_draft_view(slots, step, batch, sampling, noise))
    else:
        drafted = anchor.new_empty((slots.shape[0], 0))
    ids = torch.cat([anchor[:, None], drafted], dim=1)
    hidden, taps = pair.target(ids.flatten(), batch, pair.target_kv)
    picked, faults = head_rows(
        pair.target, hidden, sampling, pair.group, noise=noise, limit=pair.logits_rows
    )
    picked, faults = picked.view(-1, rows), faults.view(-1, rows)

    done = commit(
        drafted,
        picked,
        faults,
        slots,
        batch.slots,
        state.anchor,
        state.start,
        synthetic=pair.synthetic_acceptance,
    )
    if taps is not None:
        pair.inject(taps, batch.positions, done.slots)
    return DecodeOutput(drafted, picked, done.accepted, done.fault)


def _draft_view(
    slots: Tensor, step: StepRows, batch: RowBatch, sampling: RowSampling, noise: Tensor | None
) -> DecodeBlock:
    """Proposal j is for the position that verify row j − 1 chooses, hence the same noise."""
    rows = batch.rows
    if noise is not None:
        noise = noise.view(slots.shape[0], rows, -1)[:, :-1].flatten(0, 1)
    proposals = dataclasses.replace(sampling, count=rows - 1)
    return DecodeBlock(slots, step.anchor, step.ids, batch, proposals, noise)


def prefill(
    pair: Pair,
    state: DeviceState,
    slots: Tensor,
    token_ids: Tensor,
    start: int,
    *,
    sample: bool,
    noisy: bool,
    truncates: bool,
) -> tuple[Tensor | None, Tensor]:
    """Run one chunk of known tokens of one request and inject its context.

    Args:
        slots: [1] the request's slot.
        token_ids: [n] ids of positions start…start+n−1.
        sample: also choose the next token, which becomes the anchor.

    Returns:
        id [1] when sampled, and fault [1]: the last row, which reads every key before it, held
        a NaN.
    """
    count = token_ids.shape[0]
    step = state.gather(slots, count, pair.page_size, ahead=count)
    batch = RowBatch(**vars(step.block), rows=count, longest=start + count)
    hidden, taps = pair.target(token_ids, batch, pair.target_kv)
    if taps is not None:
        pair.inject(taps, batch.positions, batch.slots)
    state.start.index_fill_(0, slots, start + count)
    if not sample:
        return None, hidden[-1:].isnan().any(dim=1)
    sampling = state.sampling(step.state, step.first, 1, noisy=noisy, truncates=truncates)
    noise = row_noise(sampling, pair.target.head.shard)
    picked, fault = head_rows(
        pair.target, hidden[-1:], sampling, pair.group, noise=noise, limit=pair.logits_rows
    )
    state.anchor[slots] = picked
    return picked, fault


def prefill_packed(pair: Pair, state: DeviceState, chunks: Sequence[PrefillChunk]) -> Tensor:
    """Run one chunk each of several requests in one pass, as `prefill` runs one.

    Their ids and places must be on the device already (`DeviceState.apply`, `DeviceState.pack`);
    of the chunks themselves only what the host decides by is read. Where one chunk asks for noise
    or truncation, all go the way of those that do, which leaves the others' choices as they are.

    Returns:
        [chunks, 2] the id, or −1 where none was asked for, and the fault.
    """
    counts = [len(chunk.token_ids) for chunk in chunks]
    rows, longest = sum(counts), max(chunk.start + len(chunk.token_ids) for chunk in chunks)
    step = state.gather_chunks(rows, pair.page_size)
    batch = RowBatch(
        **vars(step.block), rows=max(counts), longest=longest, row_starts=state.row_starts
    )
    hidden, taps = pair.target(state.tokens[:rows], batch, pair.target_kv)
    if taps is not None:
        pair.inject(taps, batch.positions, batch.slots)
    slots = state.chunk_slots[: len(chunks)]
    state.start.index_copy_(0, slots, step.stop[: len(chunks)])

    last = hidden[state.row_starts[1 : len(chunks) + 1] - 1]
    fault = last.isnan().any(dim=1).long()
    results = torch.stack([torch.full_like(fault, -1), fault], dim=1)
    sampling_chunks = [chunk for chunk in chunks if chunk.sample]
    if not sampling_chunks:
        return results
    which = state.sampling_chunks[: len(sampling_chunks)]
    sampling = state.sampling(
        step.state[which],
        step.stop[which],
        1,
        noisy=any(chunk.noisy for chunk in sampling_chunks),
        truncates=any(chunk.truncates for chunk in sampling_chunks),
    )
    noise = row_noise(sampling, pair.target.head.shard)
    picked, faults = head_rows(
        pair.target, last[which], sampling, pair.group, noise=noise, limit=pair.logits_rows
    )
    state.anchor[slots[which]] = picked
    results[which] = torch.stack([picked, faults.long()], dim=1)
    return results
