"""CUDA graphs of the whole decode step, one per (batch bucket, verified rows, feature set)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepGraphs", "StepKey", "batch_buckets"]


@dataclasses.dataclass(frozen=True, order=True)
class StepKey:
    """What a captured step is fixed to.

    Attributes:
        batch: requests, padding included.
        rows: g, rows verified for each.
        truncates: whether top-k, top-p and min-p are looked at.
        noisy: made for requests with a temperature; right for any, only slower without.
    """

    batch: int
    rows: int
    truncates: bool = False
    noisy: bool = False


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a graph, ascending: padding never adds more than half, later a quarter."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    sizes += range(80, max(largest, 80) + 16, 16)
    return (*[s for s in sizes if s < largest], largest)


class StepGraphs:
    """Captures steps and replays them.

    Args:
        run: executes a step on the slots given, for a key; reads no value back to the host and
            returns the packed result.
        batch: [S] static slots; a captured step reads its first `key.batch` entries.
        idle: [S] slots that belong to nobody, for the run that precedes a capture.
        buckets: batch sizes, ascending.
        quiet_rows: rows (batch · g) up to which a step is the same with and without noise.

    Attributes:
        replays: steps run from a graph.
        late: graphs captured after `capture`, hence while requests were waiting.
        first_seconds: spent in the runs that precede a capture; kernels are compiled there.
        capture_seconds: spent capturing.
    """

    def __init__(
        self,
        run: Callable[[StepKey, Tensor], Tensor],
        batch: Tensor,
        idle: Tensor,
        buckets: Sequence[int],
        quiet_rows: int = 0,
    ) -> None:
        self._run = run
        self._batch = batch
        self._idle = idle
        self._buckets = tuple(buckets)
        self._quiet_rows = quiet_rows
        self._graphs: dict[StepKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # an opaque handle
        self.replays = 0
        self.late = 0
        self.first_seconds = 0.0
        self.capture_seconds = 0.0

    def __len__(self) -> int:
        return len(self._graphs)

    def keys(self, rows: Iterable[int], *, noisy: Sequence[bool] = (False, True)) -> list[StepKey]:
        """Keys of every bucket without truncation, the largest first: smaller steps reuse memory.

        Args:
            noisy: which of the two kinds; a step that is the same in both has one key.
        """
        found = {
            self.key(b, r, truncates=False, noisy=kind)
            for b in self._buckets
            for r in rows
            for kind in noisy
        }
        return sorted(found, key=lambda key: (-key.batch * key.rows, key))

    def capture(self, keys: Sequence[StepKey], progress: Callable[[int, int], None]) -> None:
        """Capture steps; `progress` is called with (captured, of)."""
        for done, key in enumerate(keys, start=1):
            self._capture(key)
            progress(done, len(keys))

    def key(self, batch: int, rows: int, *, truncates: bool, noisy: bool = False) -> StepKey:
        """The smallest captured size that holds a batch."""
        bucket = next(b for b in self._buckets if b >= batch)
        return StepKey(bucket, rows, truncates, noisy and bucket * rows > self._quiet_rows)

    def replay(self, key: StepKey) -> Tensor:
        """Run a step; returns its packed result, which the next replay overwrites."""
        if key not in self._graphs:
            self._capture(key)
            self.late += 1
        graph, packed = self._graphs[key]
        graph.replay()
        self.replays += 1
        return packed

    def _capture(self, key: StepKey) -> None:
        # Kernels are compiled and libraries set up by a first run, which cannot be captured.
        began = time.perf_counter()
        self._run(key, self._idle[: key.batch])
        torch.cuda.synchronize()
        ready = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            packed = self._run(key, self._batch[: key.batch])
        self._pool = self._pool or graph.pool()
        self._graphs[key] = (graph, packed)
        self.first_seconds += ready - began
        self.capture_seconds += time.perf_counter() - ready
