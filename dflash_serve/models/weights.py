"""Which checkpoint tensors make up a rank's parameters, as data.

A model declares each parameter through a `WeightPlan`; the loader then reads exactly the declared
slices. Packing (q, k and v in one matrix), sharding and replication are all just slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_serve.model_config import TransformerConfig
from dflash_serve.parallel.shard import HeadShard, VocabShard, split

__all__ = ["Piece", "WeightPlan"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a checkpoint tensor and where it goes.

    Attributes:
        name: tensor name in the checkpoint.
        shape: its full shape there.
        select: slices to read, one per axis.
        into: rows of the parameter to fill; every n-th where n matrices alternate.
    """

    name: str
    shape: tuple[int, ...]
    select: tuple[slice, ...]
    into: slice


class WeightPlan:
    """Parameters of one rank and the pieces that fill them.

    Args:
        rank, size: tensor-parallel rank and width.
        dtype, device: of every parameter.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.dtype = dtype
        self.device = device
        self.pieces: list[tuple[Tensor, Piece]] = []

    # -- kinds of parameters ----------------------------------------------------------------

    def replicated(self, name: str, *shape: int) -> Tensor:
        """The whole tensor on every rank."""
        return self._fill(self._new(*shape), name, shape, tuple(slice(0, n) for n in shape))

    def columns(self, parts: Sequence[tuple[str, int, slice]], inputs: int) -> Tensor:
        """Output rows of several matrices, one after the other (column-parallel product).

        Args:
            parts: (name, full output width, this rank's rows) of each matrix.
            inputs: input width.
        """
        weight = self._new(sum(rows.stop - rows.start for _, _, rows in parts), inputs)
        at = 0
        for name, outputs, rows in parts:
            into = slice(at, at + rows.stop - rows.start)
            self._fill(weight, name, (outputs, inputs), (rows, slice(0, inputs)), into)
            at = into.stop
        return weight

    def alternating(self, names: Sequence[str], outputs: int, rows: slice, inputs: int) -> Tensor:
        """Output rows of several matrices of one size in turn (column-parallel product).

        Args:
            names: of n matrices; row n·i + j of the parameter is row i of the j-th.
            outputs: full output width of each.
            rows: this rank's rows of each.
            inputs: input width.
        """
        count = len(names) * (rows.stop - rows.start)
        weight = self._new(count, inputs)
        for at, name in enumerate(names):
            into = slice(at, count, len(names))
            self._fill(weight, name, (outputs, inputs), (rows, slice(0, inputs)), into)
        return weight

    def rows(self, name: str, outputs: int, inputs: int, columns: slice) -> Tensor:
        """Input columns of a matrix (row-parallel product; the results are summed over ranks)."""
        weight = self._new(outputs, columns.stop - columns.start)
        return self._fill(weight, name, (outputs, inputs), (slice(0, outputs), columns))

    def vocabulary(self, name: str, vocab: int, width: int, shard: VocabShard) -> Tensor:
        """This rank's vocabulary rows."""
        rows = slice(shard.first, shard.first + shard.rows)
        return self._fill(
            self._new(shard.rows, width), name, (vocab, width), (rows, slice(0, width))
        )

    # -- shards -----------------------------------------------------------------------------

    def heads(self, model: TransformerConfig) -> HeadShard:
        """This rank's attention heads."""
        return HeadShard.of(model, self.rank, self.size)

    def part(self, total: int) -> slice:
        """This rank's equal part of a width."""
        return split(total, self.rank, self.size)

    @property
    def bytes(self) -> int:
        """Memory of all parameters."""
        unique = {id(p): p.numel() * p.element_size() for p, _ in self.pieces}
        return sum(unique.values())

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _fill(
        self,
        parameter: Tensor,
        name: str,
        shape: tuple[int, ...],
        select: tuple[slice, ...],
        into: slice | None = None,
    ) -> Tensor:
        into = slice(0, parameter.shape[0]) if into is None else into
        self.pieces.append((parameter, Piece(name, shape, select, into)))
        return parameter
