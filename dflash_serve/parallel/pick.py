"""Choosing one id per row from logits that are spread over the ranks.

Plain decoding, verification, drafting and greedy decoding all come through `pick`. The choice is

    argmax over allowed ids of  logit + T · G(seed, position, id)

with the noise of `kernels.noise`; T = 0 is the same formula. Every rank ends with the same id.
Nothing is read back to the host, and the number of collectives depends on no value.
"""

from __future__ import annotations

from torch import Tensor

from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.linear import Weight
from dflash_serve.kernels.noise import gumbel
from dflash_serve.kernels.pick import Kept, best_keys, head_keys, unpack
from dflash_serve.kernels.rows import RowSampling
from dflash_serve.kernels.truncate import DIGITS, search
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.shard import VocabShard

__all__ = ["RowSampling", "pick", "pick_head", "row_noise"]


def row_noise(rows: RowSampling, shard: VocabShard) -> Tensor | None:
    """T · G for this rank's valid ids: [R, valid] float32.

    None when every row is greedy, and on a GPU, where the pick makes the noise itself.
    """
    if not rows.noisy or compiled(rows.seed):
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
    scale: float | Tensor = 1.0,
    truncate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose an id per row.

    Args:
        logits: [R, shard.rows]; columns past `shard.valid` never win.
        noise: `row_noise(rows, shard)`.
        scale: factor on the logits (drafts only), see `best_keys`.
        truncate: apply top-k, top-p and min-p where rows ask for them.

    Returns:
        ids [R] int64 and faults [R] bool: rows whose logits held a NaN, or whose largest is
            infinite where they truncate (their id is 0).
    """
    kept = _kept(logits, rows, shard, group) if truncate and rows.truncates else None
    keys = best_keys(logits, rows, shard.first, shard.valid, scale=scale, noise=noise, kept=kept)
    return unpack(group.maximum(keys))


def pick_head(
    hidden: Tensor,
    weight: Weight,
    rows: RowSampling,
    shard: VocabShard,
    group: Group,
    *,
    noise: Tensor | None,
    scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """`pick` without truncation among the logits hidden @ weight.T, which stay unwritten on a GPU.

    Args:
        hidden: [R, K].
        weight: [shard.rows, K], quantised or not.
        rows, shard, group, noise, scale: see `pick`.

    Returns:
        ids [R] int64 and faults [R] bool, as `pick`.
    """
    keys = head_keys(hidden, weight, rows, shard.first, shard.valid, scale=scale, noise=noise)
    return unpack(group.maximum(keys))


def _kept(logits: Tensor, rows: RowSampling, shard: VocabShard, group: Group) -> Kept:
    """What top-k, top-p and min-p leave of this rank's ids."""
    top = group.maximum(best_keys(logits, None, shard.first, shard.valid))
    found = search(logits, rows, top, shard.first, shard.valid)
    first = group.all_reduce(found.histogram(0))
    found.choose(first)
    for digit in range(1, DIGITS):
        found.choose(group.all_reduce(found.histogram(digit)))
    found.turn_to_mass()
    found.choose(first)
    for digit in range(1, DIGITS):
        found.choose(group.all_reduce(found.histogram(digit)))
    found.settle()
    if group.size == 1:
        return found.kept(None)
    ties = group.all_gather(found.ties())
    return found.kept(ties[: group.rank].sum(dim=0))
