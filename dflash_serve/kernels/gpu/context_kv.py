"""Keys and values of the draft's context, for all draft layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.kernels.gpu.launch import chained, follow
from dflash_serve.kernels.gpu.norm import check_weight_type
from dflash_serve.kernels.gpu.qkv import HEADS, half_block, normalise, rotate, warps

__all__ = ["store_context"]


def store_context(
    kv: Tensor,
    key_norms: Tensor,
    eps: float,
    rope: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
) -> None:
    """`kernels.context_kv.store_context` in one launch; row-invariant for any number of tokens.

    Rows whose slot lies in the dummy page are skipped.

    Args:
        kv: [T, N · 2 · kv_heads · head_dim], dense last axis, any row stride.
        pages: [N, 2, num_pages, page_size, kv_heads, head_dim], dense within a layer's keys.

    Raises:
        ConfigError: key norms of another type than kv, or an odd head_dim.
    """
    check_weight_type("k_norm", key_norms, kv)
    layers, _, _, page_size, kv_heads, head_dim = pages.shape
    pool = pages.view(layers, 2, -1, kv_heads * head_dim)
    half = half_block(head_dim)
    if kv.stride(-1) != 1:
        kv = kv.contiguous()
    tokens, width = kv.shape
    grid = (tokens, triton.cdiv(layers * 2 * kv_heads, HEADS))
    _store_context[grid](
        kv,
        key_norms.contiguous(),
        eps,
        rope,
        positions.contiguous(),
        slots.contiguous(),
        pool,
        kv.stride(0) if tokens > 1 else width,
        rope.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        LAYERS=layers,
        PAGE_SIZE=page_size,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=half,
        HEADS=HEADS,
        num_warps=warps(half),
        enable_fp_fusion=False,  # see `rotate`
        **chained(kv),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _store_context(
    kv: tl.tensor,
    key_norms: tl.tensor,
    eps: tl.tensor,
    rope: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    pool: tl.tensor,
    kv_stride: tl.tensor,
    rope_stride: tl.tensor,
    layer_stride: tl.tensor,
    kind_stride: tl.tensor,
    slot_stride: tl.tensor,
    LAYERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    follow(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < PAGE_SIZE:  # page 0 is nobody's
        return
    position = tl.load(positions + token)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF_BLOCK)
    inside = column < HALF
    exists = (head < LAYERS * 2 * KV_HEADS)[:, None] & inside[None, :]

    # Heads lie as layer, then keys before values, then head.
    part = head // KV_HEADS
    layer = part // 2
    is_value = (part % 2 == 1)[:, None]
    source = kv + token * kv_stride + head[:, None] * HEAD_DIM + column[None, :]
    raw_first = tl.load(source, mask=exists, other=0.0)
    raw_second = tl.load(source + HALF, mask=exists, other=0.0)
    # Read once a head: spreading one row over the heads would go through shared memory.
    angle = rope + position * rope_stride + (head[:, None] * 0 + column[None, :])
    cosine = tl.load(angle, mask=exists, other=0.0)
    sine = tl.load(angle + HALF, mask=exists, other=0.0)
    weight = key_norms + layer[:, None] * HEAD_DIM + column[None, :]
    weight_first = tl.load(weight, mask=exists, other=0.0)
    weight_second = tl.load(weight + HALF, mask=exists, other=0.0)

    first, second = normalise(raw_first, raw_second, weight_first, weight_second, eps, HEAD_DIM)
    first, second = rotate(first, second, cosine, sine)
    first = tl.where(is_value, raw_first, first)
    second = tl.where(is_value, raw_second, second)

    place = layer.to(tl.int64) * layer_stride + (part % 2).to(tl.int64) * kind_stride
    place = place + slot * slot_stride + head % KV_HEADS * HEAD_DIM
    target = pool + place[:, None] + column[None, :]
    tl.store(target, first.to(pool.dtype.element_ty), mask=exists)
    tl.store(target + HALF, second.to(pool.dtype.element_ty), mask=exists)
