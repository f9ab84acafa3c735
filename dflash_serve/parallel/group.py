"""The tensor-parallel group: the collectives a step needs, on NCCL, gloo or a single rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["Distributed", "Group", "Single", "bind_store", "connect"]

_ORDERED_BYTES = 1 << 20
"""Sums up to this size are taken in rank order, so that a row's sum never depends on how many
rows travel with it (ring algorithms start their sum at a rank that depends on the position)."""


class Group(Protocol):
    """Collectives over the ranks of one engine. Every rank must call the same ones in order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack of every rank's tensor: [size, *x.shape]."""

    def maximum(self, x: Tensor) -> Tensor:
        """Element-wise maximum over ranks."""

    def close(self) -> None:
        """Leave the group."""


class Single:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def maximum(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nothing to leave."""


class Distributed:
    """A torch.distributed process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() * x.element_size() > _ORDERED_BYTES:
            dist.all_reduce(x)
            return x
        parts = self.all_gather(x.contiguous())
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(out.unbind()), x.contiguous())
        return out

    def maximum(self, x: Tensor) -> Tensor:
        return self.all_gather(x).amax(dim=0)

    def close(self) -> None:
        dist.destroy_process_group()


def bind_store(host: str = "127.0.0.1") -> TCPStore:
    """Rank 0's rendezvous store, bound to a port of the system's choosing (`store.port`)."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def connect(
    rank: int,
    size: int,
    *,
    backend: str,
    host: str,
    port: int,
    timeout_s: float,
    store: TCPStore | None = None,
) -> Group:
    """Join the group; returns once every rank is there.

    Args:
        backend: "gloo" or "nccl".
        host, port: where rank 0's store listens.
        store: rank 0's own store.

    Raises:
        torch.distributed.DistError: not all ranks came within `timeout_s`.
    """
    if size == 1:
        return Single()
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    group = Distributed(rank, size)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    if int(group.all_reduce(torch.ones(1, device=device))[0]) != size:
        raise RuntimeError(f"the first all-reduce over {size} ranks gave a wrong sum")
    return group
