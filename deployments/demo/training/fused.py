"""Fused kernels of the training step: Triton on the GPU, plain tensors elsewhere.

None of these needs a gradient: they serve the frozen target and the head's cross-entropy, whose
gradient is written by hand in :mod:`loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import add_rms_norm, rope, swiglu

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of torch comes without Triton
    triton = None

if triton is not None:

    @triton.jit
    def _split_rope(
        qkv, cos, sin, query, keys, values, length,
        HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
    ):  # fmt: skip
        """Rotate queries and keys of one token; store each head contiguously per sequence."""
        token = tl.program_id(0)
        sequence, at = token // length, token % length
        head, lane = tl.arange(0, PAD)[:, None], tl.arange(0, HALF)[None, :]
        total = HEADS + 2 * KV
        source = qkv + (token.to(tl.int64) * total + head) * 2 * HALF + lane
        live = (head < total) & (lane < HALF)
        a = tl.load(source, mask=live, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=live, other=0.0).to(tl.float32)
        turned = head < HEADS + KV
        c = tl.where(turned, tl.load(cos + at * HALF + lane), 1.0)
        s = tl.where(turned, tl.load(sin + at * HALF + lane), 0.0)
        first = (a * c - b * s).to(query.dtype.element_ty)
        second = (b * c + a * s).to(query.dtype.element_ty)
        wide = sequence.to(tl.int64)
        place = ((wide * HEADS + head) * length + at) * 2 * HALF + lane
        mine = live & (head < HEADS)
        tl.store(query + place, first, mask=mine)
        tl.store(query + place + HALF, second, mask=mine)
        place = ((wide * KV + head - HEADS) * length + at) * 2 * HALF + lane
        mine = live & (head >= HEADS) & (head < HEADS + KV)
        tl.store(keys + place, first, mask=mine)
        tl.store(keys + place + HALF, second, mask=mine)
        place = ((wide * KV + head - HEADS - KV) * length + at) * 2 * HALF + lane
        mine = live & (head >= HEADS + KV)
        tl.store(values + place, first, mask=mine)
        tl.store(values + place + HALF, second, mask=mine)

    @triton.jit
    def _add_norm(x, residual, weight, normed, total, eps, WIDTH: tl.constexpr, PAD: tl.constexpr):
        """Add one row to the residual and normalise the sum."""
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, PAD)
        live = lane < WIDTH
        value = tl.load(x + row * WIDTH + lane, mask=live, other=0.0).to(tl.float32)
        value += tl.load(residual + row * WIDTH + lane, mask=live, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + lane, value, mask=live)
        value = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value = value * scale * tl.load(weight + lane, mask=live, other=0.0).to(tl.float32)
        tl.store(normed + row * WIDTH + lane, value.to(normed.dtype.element_ty), mask=live)

    @triton.jit
    def _gate(gate_up, output, WIDTH: tl.constexpr, PAD: tl.constexpr):
        """Compute ``silu(gate) * up`` of one row."""
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, PAD)
        live = lane < WIDTH
        gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=live, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=live, other=0.0)
        value = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
        tl.store(output + row * WIDTH + lane, value.to(output.dtype.element_ty), mask=live)

    @triton.jit
    def _row_facts(logits, labels, lse, label_logit, top, vocabulary, STEP: tl.constexpr):
        """Log-sum-exp, label logit and largest logit of one row."""
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, STEP)
        base = logits + row * vocabulary
        peak = tl.full((STEP,), float("-inf"), tl.float32)
        mass = tl.zeros((STEP,), tl.float32)
        for start in range(0, vocabulary, STEP):
            value = tl.load(base + start + lane).to(tl.float32)
            higher = tl.maximum(peak, value)
            mass = mass * tl.exp(peak - higher) + tl.exp(value - higher)
            peak = higher
        highest = tl.max(peak, 0)
        total = tl.sum(mass * tl.exp(peak - highest), 0)
        tl.store(lse + row, highest + tl.log(total))
        tl.store(top + row, highest)
        tl.store(label_logit + row, tl.load(base + tl.load(labels + row)).to(tl.float32))

    @triton.jit
    def _spread(logits, lse, weight, vocabulary, STEP: tl.constexpr):
        """Replace logits by weighted probabilities in place."""
        row = tl.program_id(0).to(tl.int64)
        place = logits + row * vocabulary + tl.program_id(1) * STEP + tl.arange(0, STEP)
        value = tl.load(place).to(tl.float32)
        value = tl.exp(value - tl.load(lse + row)) * tl.load(weight + row)
        tl.store(place, value.to(logits.dtype.element_ty))


def split_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``qkv [N, L, heads, dim]`` and rotate; return ``[N, heads, L, dim]`` each."""
    count, length, _, dim = qkv.shape
    if not qkv.is_cuda:
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        return (
            rope(q, cos, sin).transpose(1, 2),
            rope(k, cos, sin).transpose(1, 2),
            v.transpose(1, 2),
        )
    query = qkv.new_empty(count, heads, length, dim)
    keys, values = (qkv.new_empty(count, kv_heads, length, dim) for _ in range(2))
    _split_rope[(count * length,)](
        qkv, cos, sin, query, keys, values, length,
        HEADS=heads, KV=kv_heads, HALF=dim // 2, PAD=16, num_warps=2,
    )  # fmt: skip
    return query, keys, values


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised sum and the sum."""
    if not x.is_cuda:
        return add_rms_norm(x, residual, weight, eps)
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    width = x.shape[-1]
    _add_norm[(x.numel() // width,)](
        x, residual, weight, normed, total, eps, WIDTH=width, PAD=1024, num_warps=4
    )
    return normed, total


def gate(gate_up: Tensor) -> Tensor:
    """Apply ``silu(gate) * up`` to a fused projection."""
    if not gate_up.is_cuda:
        return swiglu(gate_up)
    width = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], width)
    _gate[(output.numel() // width,)](gate_up, output, WIDTH=width, PAD=2048, num_warps=8)
    return output


def row_facts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, label logit and largest logit per row, in float32."""
    rows, vocabulary = logits.shape
    if not logits.is_cuda:
        wide = logits.float()
        picked = wide.gather(1, labels[:, None]).squeeze(1)
        return torch.logsumexp(wide, dim=-1), picked, wide.amax(dim=-1)
    lse, label_logit, top = (
        torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3)
    )
    _row_facts[(rows,)](logits, labels, lse, label_logit, top, vocabulary, STEP=4096, num_warps=8)
    return lse, label_logit, top


def spread(logits: Tensor, lse: Tensor, weight: Tensor) -> Tensor:
    """Turn ``logits`` into ``weight * softmax`` in place and return it."""
    rows, vocabulary = logits.shape
    if not logits.is_cuda:
        return logits.sub_(lse[:, None].to(logits.dtype)).exp_().mul_(weight[:, None])
    _spread[(rows, vocabulary // 8192)](logits, lse, weight, vocabulary, STEP=8192, num_warps=8)
    return logits
