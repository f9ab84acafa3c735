"""Decode-time kernels of the generator: Triton on the GPU, plain tensors elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of torch comes without Triton
    triton = None

if triton is not None:

    @triton.jit
    def _rope_write(
        qkv, cos, sin, position, query, keys, values, capacity,
        HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        """Rotate one head of one row; store queries densely, keys and values in the cache."""
        row, head = tl.program_id(0), tl.program_id(1)
        lane = tl.arange(0, HALF)
        at = tl.load(position + row)
        source = qkv + (row * (HEADS + 2 * KV) + head) * 2 * HALF + lane
        a, b = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
        if head < HEADS + KV:
            c, s = tl.load(cos + at * HALF + lane), tl.load(sin + at * HALF + lane)
            a, b = a * c - b * s, b * c + a * s
        if head < HEADS:
            place = query + (row * HEADS + head) * 2 * HALF + lane
        elif head < HEADS + KV:
            place = keys + ((row * KV + head - HEADS).to(tl.int64) * capacity + at) * 2 * HALF
            place += lane
        else:
            place = (
                values + ((row * KV + head - HEADS - KV).to(tl.int64) * capacity + at) * 2 * HALF
            )
            place += lane
        tl.store(place, a.to(place.dtype.element_ty))
        tl.store(place + HALF, b.to(place.dtype.element_ty))

    @triton.jit
    def _attend(
        query, keys, values, position, output, capacity, scale,
        GROUP: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """One row and one KV head: online softmax over the cached positions."""
        row, head = tl.program_id(0), tl.program_id(1)
        length = tl.load(position + row) + 1
        member, lane, slot = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, STEP)
        inside = member[:, None] < GROUP
        rows = (row * KV + head) * GROUP + member
        q = tl.load(query + rows[:, None] * DIM + lane, mask=inside, other=0.0)
        base = (row * KV + head).to(tl.int64) * capacity * DIM
        top = tl.full((16,), float("-inf"), tl.float32)
        mass = tl.zeros((16,), tl.float32)
        mixed = tl.zeros((16, DIM), tl.float32)
        for start in range(0, length, STEP):
            place = base + (start + slot)[:, None] * DIM + lane
            live = (start + slot) < length
            k = tl.load(keys + place, mask=live[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k)) * scale
            score = tl.where(live, score, float("-inf"))
            peak = tl.maximum(top, tl.max(score, 1))
            share = tl.exp(score - peak[:, None])
            decay = tl.exp(top - peak)
            mass = mass * decay + tl.sum(share, 1)
            v = tl.load(values + place, mask=live[:, None], other=0.0)
            mixed = mixed * decay[:, None] + tl.dot(share.to(v.dtype), v)
            top = peak
        mixed = mixed / mass[:, None]
        place = output + rows[:, None] * DIM + lane
        tl.store(place, mixed.to(output.dtype.element_ty), mask=inside)

    @triton.jit
    def _pick(
        logits, temperature, min_log_p, seed, chosen, vocabulary,
        STEP: tl.constexpr,
    ):  # fmt: skip
        """Greedy token of a row, or a Gumbel-max sample above the probability floor."""
        row = tl.program_id(0)
        lane = tl.arange(0, STEP)
        base = logits + row.to(tl.int64) * vocabulary
        best, where = float("-inf"), 0
        for start in range(0, vocabulary, STEP):
            live = start + lane < vocabulary
            value = tl.load(base + start + lane, mask=live, other=float("-inf")).to(tl.float32)
            peak, index = tl.max(value, return_indices=True, axis=0)
            where = tl.where(peak > best, start + index, where)
            best = tl.maximum(best, peak)
        heat = tl.load(temperature + row)
        if heat > 0:
            number = tl.load(seed)
            top = best
            best = float("-inf")
            for start in range(0, vocabulary, STEP):
                live = start + lane < vocabulary
                value = tl.load(base + start + lane, mask=live, other=float("-inf")).to(tl.float32)
                gap = (value - top) / heat
                noise = tl.rand(number, row * vocabulary + start + lane)
                noise = -tl.log(-tl.log(tl.maximum(noise, 1e-9)))
                value = tl.where(gap >= min_log_p, gap + noise, float("-inf"))
                peak, index = tl.max(value, return_indices=True, axis=0)
                where = tl.where(peak > best, start + index, where)
                best = tl.maximum(best, peak)
        tl.store(chosen + row, where)


def rope_write(
    qkv: Tensor, tables: tuple[Tensor, Tensor], position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate ``qkv [B, heads, dim]``, write keys and values, return the queries."""
    batch, total, dim = qkv.shape
    kv = keys.shape[1]
    heads = total - 2 * kv
    cos, sin = tables
    if qkv.is_cuda:
        query = qkv.new_empty(batch, heads, dim)
        _rope_write[(batch, total)](
            qkv, cos, sin, position, query, keys, values, keys.shape[2],
            HEADS=heads, KV=kv, HALF=dim // 2, num_warps=1,
        )  # fmt: skip
        return query
    c, s = cos[position][:, None], sin[position][:, None]
    a, b = qkv[:, :-kv, : dim // 2].float(), qkv[:, :-kv, dim // 2 :].float()
    turned = torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(qkv.dtype)
    index = torch.arange(batch, device=qkv.device)
    keys[index, :, position] = turned[:, heads:]
    values[index, :, position] = qkv[:, -kv:]
    return turned[:, :heads]


def attend(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """Attend ``query [B, heads, dim]`` over cached positions up to ``position`` inclusive."""
    batch, heads, dim = query.shape
    kv, capacity = keys.shape[1:3]
    if query.is_cuda:
        output = torch.empty_like(query)
        _attend[(batch, kv)](
            query, keys, values, position, output, capacity, dim**-0.5,
            GROUP=heads // kv, KV=kv, DIM=dim, STEP=64, num_warps=2,
        )  # fmt: skip
        return output
    visible = torch.arange(capacity, device=query.device) <= position[:, None]
    mixed = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=visible[:, None, None], enable_gqa=True
    )
    return mixed[:, :, 0]


def pick(logits: Tensor, temperature: Tensor, min_p: float, seed: Tensor) -> Tensor:
    """Pick one token per row: greedy at temperature 0, otherwise a sample with a min-p floor."""
    floor = float(torch.tensor(min_p).log())
    if logits.is_cuda:
        chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        _pick[(logits.shape[0],)](
            logits, temperature, floor, seed, chosen, logits.shape[1], STEP=4096, num_warps=8
        )
        return chosen
    greedy = logits.argmax(-1)
    gap = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(1e-6)[:, None]
    noise = -torch.log(-torch.log(torch.rand_like(gap).clamp(1e-9, 1 - 1e-7)))
    sampled = torch.where(gap >= floor, gap + noise, -torch.inf).argmax(-1)
    return torch.where(temperature > 0, sampled, greedy)
