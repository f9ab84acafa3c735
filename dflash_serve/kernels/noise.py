"""Counter-based Gumbel noise: the same (seed, position, id) always gives the same number.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with the
request's 64-bit seed as key and (id // 4, position) as counter; lane id % 4 is the id's. Every
rank can compute its own ids' noise without talking to anybody, and draft and target rows for one
position share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel", "philox"]

_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(seed: Tensor, position: Tensor, block: Tensor) -> Tensor:
    """Four 32-bit words for each (row, block).

    Args:
        seed: [R] int64, the keys.
        position: [R] int64, second counter word.
        block: [C] int64, first counter word.

    Returns:
        [R, C, 4] int64 in 0…2³²−1.
    """
    shape = (seed.shape[0], block.shape[0])
    key_0 = (seed & _MASK)[:, None]
    key_1 = (seed >> 32 & _MASK)[:, None]
    x0 = (block & _MASK)[None, :].expand(shape)
    x1 = (position & _MASK)[:, None].expand(shape)
    x2 = (position >> 32 & _MASK)[:, None].expand(shape)
    x3 = torch.zeros(shape, dtype=torch.int64, device=seed.device)
    for _ in range(_ROUNDS):
        high_0, low_0 = _mul(x0, _MUL_0)
        high_1, low_1 = _mul(x2, _MUL_1)
        x0, x1, x2, x3 = high_1 ^ x1 ^ key_0, low_1, high_0 ^ x3 ^ key_1, low_0
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    return torch.stack([x0, x1, x2, x3], dim=-1)


def _mul(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 × 32-bit product.

    The product needs 64 unsigned bits; it is put together from two products that fit in int64.
    """
    low_part = (a & 0xFFFF) * b
    high_part = (a >> 16) * b + (low_part >> 16)
    return high_part >> 16, (high_part & 0xFFFF) << 16 | (low_part & 0xFFFF)


def gumbel(seed: Tensor, position: Tensor, first_id: int, count: int) -> Tensor:
    """Standard Gumbel variates −log(−log u), u = (word + 0.5) · 2⁻³².

    Args:
        seed, position: [R] int64; position is that of the token being sampled.
        first_id: first id of this rank's vocabulary shard.
        count: ids wanted.

    Returns:
        [R, count] float32.
    """
    first_block, last_block = first_id // 4, (first_id + count - 1) // 4
    block = torch.arange(first_block, last_block + 1, device=seed.device)
    words = philox(seed, position, block).flatten(1)
    words = words[:, first_id - 4 * first_block :][:, :count]
    return -torch.log(_exponential(words))


def _exponential(words: Tensor) -> Tensor:
    """−log u without losing digits near u = 1, where −log1p(u − 1) is taken instead."""
    scale = 2.0**-32
    below = -torch.log((words.float() + 0.5) * scale)
    above = -torch.log1p(-((_MASK - words).float() + 0.5) * scale)
    return torch.where(words < 2**31, below, above)
