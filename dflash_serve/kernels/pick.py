"""Packed (score, id) keys: one int64 whose order is higher score first, then lower id.

Packing makes the best of several vocabulary shards a plain integer maximum: one all-gather gives
every rank the same winner, ties included.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.fp8 import Fp8Weight
from dflash_serve.kernels.linear import Weight, linear
from dflash_serve.kernels.rows import RowSampling

__all__ = [
    "EMPTY",
    "FAULT",
    "NOISY_ROWS",
    "Kept",
    "KeptMask",
    "best",
    "best_keys",
    "fuses",
    "head_keys",
    "order_keys",
    "score_of",
    "score_order",
    "unpack",
    "unpack_id",
]

EMPTY = -(2**63)
"""Key of a shard without any allowed id: loses against every other."""

FAULT = 2**63 - 1
"""Key of a row that holds a NaN: wins against every other, so that all ranks see it."""

NOISY_ROWS = 64
"""Up to so many rows that need noise are picked inside the head product: of more, a kernel of many
small programs makes the noise faster (H200, 512 rows: 1.20 ms, product included, against 1.43)."""

_LOW = 0xFFFFFFFF


class Kept:
    """What truncation leaves of this rank's ids; only `best_keys` looks inside."""


@dataclasses.dataclass(frozen=True)
class KeptMask(Kept):
    """`Kept` of the plain torch path.

    Attributes:
        allowed: [R, C] bool.
        broken: [R] bool, rows whose shares cannot be computed.
    """

    allowed: Tensor
    broken: Tensor


def best_keys(
    logits: Tensor,
    rows: RowSampling | None,
    first_id: int,
    valid: int,
    *,
    scale: float | Tensor = 1.0,
    noise: Tensor | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """Key of each row's best id by logit · scale + T · G: [R, ≥ valid] → [R] int64.

    Args:
        logits: float32 or bfloat16, rows of any stride; columns from `valid` on never win.
        rows: whose noise is added (on a GPU, inside the kernel); None for the bare logits.
        first_id: global id of column 0.
        scale: a number, or [1] float32 where it changes under a captured graph.
        noise: [R, valid] T · G, on CPU only; None adds nothing there.
        kept: what truncation leaves; None for everything.
    """
    if compiled(logits):
        _refuse_noise(noise)
        from dflash_serve.kernels.gpu.pick import best_keys as triton_best_keys

        return triton_best_keys(logits, rows, first_id, valid, scale, kept)
    local = logits[:, :valid].float()
    score = local if isinstance(scale, float) and scale == 1.0 else local * scale
    if noise is not None:
        score = score + noise
    if kept is None:
        return best(score, first_id)
    assert isinstance(kept, KeptMask)
    return best(score, first_id, kept.allowed).masked_fill(kept.broken, FAULT)


def fuses(hidden: Tensor, weight: Weight, *, noisy: bool) -> bool:
    """Whether `head_keys` shall pick for rows [R, K] from a head [V, K], without logits.

    Args:
        noisy: some row has a temperature above 0; whatever is said here, it gets its noise.
    """
    if not compiled(hidden):
        return False
    from dflash_serve.kernels.gpu import head_tiles

    if noisy and hidden.shape[0] > NOISY_ROWS:
        return False
    return head_tiles.fuses(weight.shape[0], weight.shape[1], hidden.shape[0], hidden.dtype)


def head_keys(
    hidden: Tensor,
    weight: Weight,
    rows: RowSampling | None,
    first_id: int,
    valid: int,
    *,
    scale: float | Tensor = 1.0,
    noise: Tensor | None = None,
) -> Tensor:
    """`best_keys` of the logits hidden @ weight.T: [R, K] by [≥ valid, K] → [R] int64.

    On a GPU no logits are written, and up to `INVARIANT_ROWS` rows the keys are the same bit for
    bit if `fuses` says yes.

    Args:
        hidden, weight: of one type, float32, bfloat16 or float16; to it the logits are rounded.
            A quantised weight takes rows of any of them.
        rows, first_id, scale, noise: see `best_keys`.
        valid: rows of the weight from here on never win.

    Raises:
        ConfigError: on a GPU, other types, rows or a weight that are not dense, or noise.
    """
    if compiled(hidden):
        _refuse_noise(noise)
        if isinstance(weight, Fp8Weight):
            from dflash_serve.kernels.gpu import fp8_head

            return fp8_head.head_keys(hidden, weight, rows, first_id, valid, scale)
        from dflash_serve.kernels.gpu import head_pick

        return head_pick.head_keys(hidden, weight, rows, first_id, valid, scale)
    logits = linear(hidden, weight)
    return best_keys(logits, rows, first_id, valid, scale=scale, noise=noise)


def _refuse_noise(noise: Tensor | None) -> None:
    if noise is not None:
        raise ConfigError("noise is a tensor; on a GPU it must be None, the kernel makes its own")


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [R] int64 (0 for a fault) and faults [R] bool of keys [R]."""
    if compiled(keys):
        from dflash_serve.kernels.gpu.pick import unpack as triton_unpack

        return triton_unpack(keys)
    fault = keys == FAULT
    return unpack_id(keys).masked_fill(fault, 0), fault


def score_order(score: Tensor) -> Tensor:
    """Int32 numbers in the order of float32 scores; −0 counts as +0."""
    bits = (score.float() + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def score_of(key: Tensor) -> Tensor:
    """The float32 score inside a key; NaN for a fault and for an empty shard."""
    ordered = (key >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def order_keys(score: Tensor, first_id: int) -> Tensor:
    """Keys of [R, C] float32 scores of ids first_id…first_id+C−1.

    −0 counts as +0. Infinities keep their place; NaN must have been dealt with before.
    """
    ids = torch.arange(first_id, first_id + score.shape[1], device=score.device)
    return score_order(score).long() << 32 | (_LOW - ids)


def best(score: Tensor, first_id: int, allowed: Tensor | None = None) -> Tensor:
    """Best key of each row: [R, C] → [R] int64.

    Args:
        score: [R, C] float32; C may be 0.
        first_id: global id of column 0.
        allowed: [R, C] bool; ids outside never win. None allows all.
    """
    if score.shape[1] == 0:
        return torch.full((score.shape[0],), EMPTY, dtype=torch.int64, device=score.device)
    score = score.float()
    if allowed is None:
        value, column = score.max(dim=1)  # first maximum, hence the lowest id
        fault = value.isnan()  # a maximum passes a NaN on
    else:
        value, column = torch.where(allowed, score, -math.inf).max(dim=1)
        fault = score.isnan().any(dim=1)
        some, first = allowed.max(dim=1)
        column = torch.where(value == -math.inf, first, column)
    keys = order_keys(value[:, None], 0)[:, 0] - first_id - column
    if allowed is not None:
        keys = keys.masked_fill(~some, EMPTY)
    return torch.where(fault, FAULT, keys)


def unpack_id(key: Tensor) -> Tensor:
    """The id inside a key."""
    return _LOW - (key & _LOW)
