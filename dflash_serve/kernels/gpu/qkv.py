"""From the joint q/k/v product to rotated queries, and keys and values in their pages.

A program takes one token and a block of heads. A head is held as its two halves, so that the
rotation pairs registers of one thread and a 16-byte load feeds each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.norm import check_weight_type

__all__ = ["HEADS", "half_block", "normalise", "rope_and_store", "rotate", "warps"]

HEADS = 8
"""Heads of a program, whatever the number of tokens: the layout of the norm's sum must not
change with it. 16 tokens of Qwen3-8B make 96 programs, 8,192 tokens make 49,152 of 2 KB each."""


def half_block(head_dim: int) -> int:
    """Columns of a tile that holds half a head.

    Raises:
        ConfigError: a head that has no halves.
    """
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary embedding needs an even one")
    return max(int(triton.next_power_of_2(head_dim // 2)), 8)


def warps(half: int) -> int:
    """Warps of a program with tiles of HEADS × half: eight values of each half a thread."""
    return min(max(HEADS * half // 256, 1), 8)


def rope_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
    num_heads: int,
) -> Tensor:
    """`kernels.qkv.rope_and_store` in one launch; row-invariant for any number of tokens.

    Args:
        qkv: [T, (num_heads + 2 · kv_heads) · head_dim], dense last axis, any row stride.
        pages: dense within a slot; keys and values share one layout.

    Raises:
        ConfigError: norm weights of another type than qkv, or an odd head_dim.
    """
    kv_heads, head_dim = pages[0].shape[2:]
    keys, values = (p.view(-1, kv_heads * head_dim) for p in pages)
    half = half_block(head_dim)
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    tokens, width = qkv.shape
    norm = q_norm is not None and k_norm is not None
    for what, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_weight_type(what, weight, qkv)
    query = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    grid = (tokens, triton.cdiv(num_heads + 2 * kv_heads, HEADS))
    _rope_and_store[grid](
        qkv,
        q_norm if norm else qkv,
        k_norm if norm else qkv,
        eps,
        rope,
        positions.contiguous(),
        slots.contiguous(),
        query,
        keys,
        values,
        qkv.stride(0) if tokens > 1 else width,
        rope.stride(0),
        keys.stride(0),
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=half,
        HEADS=HEADS,
        NORM=norm,
        num_warps=warps(half),
        enable_fp_fusion=False,  # see `rotate`
        **chained(qkv),
    )
    return query


@triton.jit  # type: ignore[untyped-decorator]
def normalise(
    first: tl.tensor,
    second: tl.tensor,
    weight_first: tl.tensor,
    weight_second: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> Any:
    """RMSNorm of heads given as two halves: [H, half] each, zero where padded.

    Every value is rounded to the type it came in before the weight and after it; the halves are
    returned in that type.
    """
    a, b = first.to(tl.float32), second.to(tl.float32)
    mean = tl.sum(a * a + b * b, axis=1) / HEAD_DIM
    scale = tl.rsqrt(mean + eps)[:, None]
    a = (a * scale).to(first.dtype).to(tl.float32) * weight_first.to(tl.float32)
    b = (b * scale).to(second.dtype).to(tl.float32) * weight_second.to(tl.float32)
    return a.to(first.dtype), b.to(second.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def rotate(first: tl.tensor, second: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> Any:
    """Rotate heads given as two halves by float32 angles, all [H, half]; same types out.

    Cosine, sine and each product are rounded to the type of the heads, as the separate torch
    operations do. Kernels that call this are launched with enable_fp_fusion=False: the compiler
    turns products that are rounded to bf16 into bf16 products, and would fuse these with the sum
    that follows, leaving out their rounding.
    """
    a, b = first.to(tl.float32), second.to(tl.float32)
    c, s = cosine.to(first.dtype).to(tl.float32), sine.to(first.dtype).to(tl.float32)
    ac, bs = (a * c).to(first.dtype).to(tl.float32), (b * s).to(first.dtype).to(tl.float32)
    bc, as_ = (b * c).to(first.dtype).to(tl.float32), (a * s).to(first.dtype).to(tl.float32)
    return (ac - bs).to(first.dtype), (bc + as_).to(first.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _rope_and_store(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    rope: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    qkv_stride: tl.tensor,
    rope_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_BLOCK)
    inside = column < HALF

    is_query = (head < NUM_HEADS)[:, None] & inside[None, :]
    is_value = (head >= NUM_HEADS + KV_HEADS)[:, None]
    exists = (head < NUM_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    within = head[:, None] * HEAD_DIM + column[None, :]
    # Weights and angles are read once a head, as tiles: spreading a row of them over the heads
    # would go through shared memory.
    tile = head[:, None] * 0 + column[None, :]
    source = qkv + token * qkv_stride + within
    raw_first = tl.load(source, mask=exists, other=0.0)
    raw_second = tl.load(source + HALF, mask=exists, other=0.0)
    angle = rope + position * rope_stride + tile
    cosine = tl.load(angle, mask=exists, other=0.0)
    sine = tl.load(angle + HALF, mask=exists, other=0.0)

    first, second = raw_first, raw_second
    if NORM:
        is_key = exists & (head >= NUM_HEADS)[:, None]
        q_first = tl.load(q_norm + tile, mask=is_query, other=0.0)
        q_second = tl.load(q_norm + HALF + tile, mask=is_query, other=0.0)
        k_first = tl.load(k_norm + tile, mask=is_key, other=0.0)
        k_second = tl.load(k_norm + HALF + tile, mask=is_key, other=0.0)
        weight_first = tl.where(is_query, q_first, k_first)
        weight_second = tl.where(is_query, q_second, k_second)
        first, second = normalise(first, second, weight_first, weight_second, eps, HEAD_DIM)
    first, second = rotate(first, second, cosine, sine)

    target = query + token * (NUM_HEADS * HEAD_DIM) + within
    tl.store(target, first, mask=is_query)
    tl.store(target + HALF, second, mask=is_query)

    # Heads count on from q through k to v, so a key's place in its slot is its own less q's.
    target = keys + slot * slot_stride + (within - NUM_HEADS * HEAD_DIM)
    mask = exists & (head >= NUM_HEADS)[:, None] & (head < NUM_HEADS + KV_HEADS)[:, None]
    tl.store(target, first.to(keys.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(keys.dtype.element_ty), mask=mask)

    target = values + slot * slot_stride + (within - (NUM_HEADS + KV_HEADS) * HEAD_DIM)
    mask = exists & is_value
    tl.store(target, raw_first.to(values.dtype.element_ty), mask=mask)
    tl.store(target + HALF, raw_second.to(values.dtype.element_ty), mask=mask)
