"""Row parameters, plain references and simulated ranks for tests of the pick."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dflash_serve.parallel.pick import RowSampling

__all__ = ["ThreadGroup", "kept_ids", "on_ranks", "row_sampling"]

T = TypeVar("T")


def row_sampling(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
    position: int = 17,
) -> RowSampling:
    """The same parameters for every row, and a seed for each."""
    return RowSampling(
        temperature=torch.full((count,), temperature, dtype=torch.float64),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p, dtype=torch.float64),
        min_p=torch.full((count,), min_p, dtype=torch.float64),
        seed=torch.arange(first_seed, first_seed + count),
        position=torch.full((count,), position),
        noisy=temperature > 0,
        truncates=temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0),
    )


def kept_ids(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """Ids that truncation keeps, by a plain sort in float64; best first, ties by id."""
    values = logits.double().tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if top_k > 0:
        order = order[:top_k]
    scaled = torch.tensor([values[i] for i in order], dtype=torch.float64) / temperature
    share = torch.softmax(scaled, dim=0)
    before = share.cumsum(0) - share
    enough = share >= min_p * share[0] * (1 - 1e-12)
    keep = enough & ((before < top_p) if top_p < 1 else torch.ones_like(enough))
    return [i for i, k in zip(order, keep.tolist(), strict=True) if k]


class ThreadGroup:
    """One of several ranks that run as threads of this process."""

    def __init__(self, rank: int, board: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack of every rank's tensor."""
        self._board[self.rank] = x.clone()
        self._barrier.wait()
        parts = torch.stack([part for part in self._board if part is not None])
        self._barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.all_gather(x).sum(dim=0)

    def maximum(self, x: Tensor) -> Tensor:
        """Largest over ranks."""
        return self.all_gather(x).amax(dim=0)

    def close(self) -> None:
        """Nothing to leave."""


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on every rank at once; results by rank."""
    board: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, board, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
