"""Sampling parameters of the rows of a batch, as tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["RowSampling"]


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
