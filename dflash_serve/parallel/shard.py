"""Which part of a model each rank holds: heads, columns and vocabulary rows (no torch)."""

from __future__ import annotations

import dataclasses

from dflash_serve.model_config import TransformerConfig

__all__ = ["HeadShard", "VocabShard", "split"]


def split(total: int, rank: int, size: int) -> slice:
    """Rank's equal part of `total`, which `size` must divide."""
    part = total // size
    return slice(rank * part, (rank + 1) * part)


@dataclasses.dataclass(frozen=True)
class HeadShard:
    """Attention heads of one rank; key heads are replicated when there are fewer than ranks."""

    heads: slice
    kv_heads: slice

    @classmethod
    def of(cls, model: TransformerConfig, rank: int, size: int) -> HeadShard:
        heads = split(model.num_heads, rank, size)
        if model.num_kv_heads >= size:
            return cls(heads, split(model.num_kv_heads, rank, size))
        first = rank * model.num_kv_heads // size
        return cls(heads, slice(first, first + 1))

    @property
    def num_heads(self) -> int:
        return _length(self.heads)

    @property
    def num_kv_heads(self) -> int:
        return _length(self.kv_heads)


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """Vocabulary rows of one rank.

    Attributes:
        first: global id of the first row.
        rows: rows stored; the last shards may hold fewer than the others, or none.
        valid: of those, how many are ids that may be produced.
    """

    first: int
    rows: int
    valid: int

    @classmethod
    def of(cls, vocab: int, valid_vocab: int, rank: int, size: int) -> VocabShard:
        part = -(-vocab // size)
        first = min(rank * part, vocab)
        rows = min(part, vocab - first)
        return cls(first, rows, max(0, min(rows, valid_vocab - first)))
