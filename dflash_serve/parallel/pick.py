"""Choosing one id per row from logits that are spread over the ranks.

Plain decoding, verification, drafting and greedy decoding all come through `pick`. The choice is

    argmax over allowed ids of  logit + T · G(seed, position, id)

with the noise of `kernels.noise`; T = 0 is the same formula. Every rank ends with the same id.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from dflash_serve.kernels.noise import gumbel
from dflash_serve.kernels.pick import EMPTY, FAULT, best, order_keys, unpack_id
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.shard import VocabShard

__all__ = ["RowSampling", "pick", "row_noise"]

_MASS_BITS = 40
"""Probability mass is counted in units of 2^-40 of the largest: integer sums do not depend on
the order of summation, and 2^18 ids of full mass still fit in 64 bits."""


@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of the rows of a batch of B requests with `count` rows each.

    Row r belongs to request r // count and chooses the token at position[r // count] + r % count.
    Tensors are [B] and may be strided views of a table.

    Attributes:
        temperature, top_p, min_p: floating point.
        top_k: int64, 0 keeps all.
        seed: int64.
        position: int64, position of the token that the request's first row chooses.
        noisy: whether any temperature is above 0 (known on the host).
        truncates: whether any row has a top-k, top-p or min-p in force (known on the host).
        count: rows of each request.
        first: index of the first row meant; above 0 where a batch is cut into parts.
        length: rows meant, from `first` on; None for all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    noisy: bool
    truncates: bool
    count: int = 1
    first: int = 0
    length: int | None = None

    def __len__(self) -> int:
        if self.length is not None:
            return self.length
        return self.seed.shape[0] * self.count - self.first

    def rows(self, start: int, stop: int) -> RowSampling:
        """The parameters of rows start…stop−1."""
        return dataclasses.replace(
            self, first=self.first + start, length=min(stop, len(self)) - start
        )

    def per_row(self) -> RowSampling:
        """The same with one entry per row."""
        row = self.first + torch.arange(len(self), device=self.seed.device)
        request = row // self.count
        return RowSampling(
            temperature=self.temperature[request].float(),
            top_k=self.top_k[request],
            top_p=self.top_p[request].double(),
            min_p=self.min_p[request].double(),
            seed=self.seed[request],
            position=self.position[request] + row % self.count,
            noisy=self.noisy,
            truncates=self.truncates,
        )


def row_noise(rows: RowSampling, shard: VocabShard) -> Tensor | None:
    """T · G for this rank's valid ids: [R, valid] float32, or None when every row is greedy."""
    if not rows.noisy:
        return None
    rows = rows.per_row()
    noise = gumbel(rows.seed, rows.position, shard.first, shard.valid)
    return rows.temperature[:, None] * noise


def pick(
    logits: Tensor,
    rows: RowSampling,
    shard: VocabShard,
    group: Group,
    *,
    noise: Tensor | None,
    scale: float = 1.0,
    truncate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose an id per row.

    Args:
        logits: [R, shard.rows]; columns past `shard.valid` never win.
        noise: `row_noise(rows, shard)`.
        scale: factor on the logits (drafts only).
        truncate: apply top-k, top-p and min-p where rows ask for them.

    Returns:
        ids [R] int64 and faults [R] bool: rows whose logits held a NaN, or whose largest is
            infinite where they truncate (their id is 0).
    """
    local = logits[:, : shard.valid].float()
    score = local * scale if scale != 1.0 else local
    if noise is not None:
        score = score + noise
    if truncate and rows.truncates:
        key = _truncated(local, score, rows.per_row(), shard, group)
    else:
        key = group.maximum(best(score, shard.first))
    fault = key == FAULT
    return unpack_id(key).masked_fill(fault, 0), fault


def _truncated(
    logits: Tensor, score: Tensor, rows: RowSampling, shard: VocabShard, group: Group
) -> Tensor:
    """Best key among the ids that top-k, top-p and min-p keep.

    The kept ids are a prefix of the order (logit descending, id ascending), so one candidate
    needs one masked sum: if too much mass lies before it, it and all after it are out.
    """
    order = order_keys(logits, shard.first)
    kept_k = order >= _kth_key(order, rows, group)[:, None]
    top = _row_max(logits, group)
    broken = ~top.isfinite()  # shares of an infinite maximum are NaN
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0).double()[:, None]
    log_share = (logits.double() - top[:, None]) / temperature
    mass = (log_share.exp() * 2**_MASS_BITS).round().long().masked_fill(~kept_k, 0)
    bound = rows.top_p * group.all_reduce(mass.sum(dim=1)).double()
    cut = (rows.top_p < 1.0) & (rows.temperature > 0) & ~broken
    allowed = kept_k & (log_share >= rows.min_p.log()[:, None])
    allowed |= (rows.temperature <= 0)[:, None]
    while True:
        key = group.maximum(best(score, shard.first, allowed))
        place = group.maximum(_order_of(key, order, shard))
        before = group.all_reduce(mass.masked_fill(order <= place[:, None], 0).sum(dim=1))
        settled = ~cut | (before.double() < bound) | (key == FAULT)
        if bool(settled.all()):
            return key.masked_fill(broken & (rows.temperature > 0), FAULT)
        allowed &= settled[:, None] | (order > place[:, None])


def _kth_key(order: Tensor, rows: RowSampling, group: Group) -> Tensor:
    """Order key of each row's k-th largest logit; EMPTY where top-k is off."""
    off = (rows.top_k <= 0) | (rows.temperature <= 0)
    if bool(off.all()):
        return torch.full_like(rows.top_k, EMPTY)
    most = int(rows.top_k.masked_fill(off, 1).max())
    local = order.topk(min(most, order.shape[1]), dim=1).values
    padded = torch.full((order.shape[0], most), EMPTY, dtype=torch.int64, device=order.device)
    padded[:, : local.shape[1]] = local
    every = group.all_gather(padded).transpose(0, 1).flatten(1)
    ranked = every.topk(most, dim=1).values
    kth = ranked.gather(1, (rows.top_k - 1).clamp(0, most - 1)[:, None])[:, 0]
    return kth.masked_fill(off, EMPTY)


def _row_max(logits: Tensor, group: Group) -> Tensor:
    """Largest logit of each row over all ranks, float64."""
    if logits.shape[1] == 0:
        local = torch.full((logits.shape[0],), -math.inf, device=logits.device)
    else:
        local = logits.amax(dim=1)
    return group.maximum(local).double()


def _order_of(key: Tensor, order: Tensor, shard: VocabShard) -> Tensor:
    """Order key of each row's candidate where this rank owns it, else EMPTY."""
    column = unpack_id(key) - shard.first
    mine = (column >= 0) & (column < order.shape[1]) & (key != FAULT)
    if order.shape[1] == 0:
        return torch.full_like(key, EMPTY)
    value = order.gather(1, column.clamp(0, order.shape[1] - 1)[:, None])[:, 0]
    return torch.where(mine, value, EMPTY)
