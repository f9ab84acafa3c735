"""Philox4x32-10 and Gumbel noise inside a kernel: the numbers of `kernels.noise`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gumbel", "philox", "philox_ids"]


@triton.jit
def philox(seed, position, block):  # type: ignore[no-untyped-def]
    """Four uint32 words for each block: seed and position int64 scalars, block int32 [C].

    32 × 32-bit products are taken as 64-bit ones: one wide multiplication gives both halves.
    """
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    x0 = block.to(tl.uint32)
    zero = tl.zeros_like(x0)
    x1 = zero + position.to(tl.uint32)
    x2 = zero + (position >> 32).to(tl.uint32)
    x3 = zero
    for _ in tl.static_range(10):
        product_0 = x0.to(tl.uint64) * 0xD2511F53
        product_1 = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (product_1 >> 32).to(tl.uint32) ^ x1 ^ key_0
        x2 = (product_0 >> 32).to(tl.uint32) ^ x3 ^ key_1
        x1 = product_1.to(tl.uint32)
        x3 = product_0.to(tl.uint32)
        key_0 = key_0 + 0x9E3779B9
        key_1 = key_1 + 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit  # type: ignore[untyped-decorator]
def philox_ids(seed, position, first_block, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The words of ids 4 · first_block … + COUNT − 1: uint32 [COUNT]."""
    block = first_block + tl.arange(0, COUNT // 4)
    x0, x1, x2, x3 = philox(seed, position, block)
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [COUNT])


@triton.jit
def gumbel(words):  # type: ignore[no-untyped-def]
    """−log(−log u), u = (word + 0.5) · 2⁻³²: uint32 → float32.

    In the upper half u is 1 − v and −log1p(−v) is taken as log(w) · v / (w − 1) with w = 1 − v
    as rounded, whose error cancels (Kahan).
    """
    lower = words < 0x80000000
    v = (tl.where(lower, words, words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = tl.where(lower, v, 1.0 - v)
    log = tl.log(w)
    whole = w == 1.0
    upper = tl.where(whole, v, log * (v / tl.where(whole, 1.0, w - 1.0)))
    return -tl.log(tl.where(lower, -log, upper))
