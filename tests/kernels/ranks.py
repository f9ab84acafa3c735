"""Simulated ranks that compute one at a time: Triton's interpreter runs one kernel at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tests.engine.rows import ThreadGroup, on_ranks

__all__ = ["in_turns"]

T = TypeVar("T")


class _TurnGroup(ThreadGroup):
    """A thread's rank that lets the others compute only while it waits for them."""

    def __init__(self, group: ThreadGroup, turn: threading.Lock) -> None:
        self.__dict__.update(vars(group))
        self._turn = turn

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack of every rank's tensor."""
        if x.is_cuda:
            torch.cuda.synchronize()
        self._turn.release()
        try:
            return super().all_gather(x)
        finally:
            self._turn.acquire()


def in_turns(size: int, work: Callable[[_TurnGroup], T]) -> list[T]:
    """Run `work` on every rank; results by rank."""
    turn = threading.Lock()

    def body(group: ThreadGroup) -> T:
        with turn:
            return work(_TurnGroup(group, turn))

    return on_ranks(size, body)
