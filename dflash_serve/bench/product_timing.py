"""Times variants of one product against each other.

Under load a GPU lowers its clocks step by step until its power stays within bounds, so that what
is measured first would look fastest. The variants therefore take turns, several short ones each.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["captured", "take_turns"]

_ROUNDS = 7
_FEWEST_ROUNDS = 3
_REPLAYS = 2  # timed in a turn, after one that is not

Run = Callable[[], object]


def captured(work: Run, device: str) -> Run:
    """`work` as one CUDA graph that has run once; on a CPU, itself."""
    work()
    if device != "cuda":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def take_turns(runs: Sequence[Run], device: str, deadline: float) -> list[list[float]]:
    """Milliseconds of every run in every turn.

    Rounds begin with another run each and go through them forwards and backwards by turns. After
    the deadline no round is begun but the first few. On a CPU there is one turn each.
    """
    if device != "cuda":
        return [[_host_time(run)] for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        order = list(range(len(runs)))
        first = number * len(runs) // _ROUNDS
        order = order[first:] + order[:first]
        marks = {at: _replayed(runs[at]) for at in (order if number % 2 == 0 else order[::-1])}
        torch.cuda.synchronize()
        for at, events in marks.items():
            times[at] += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return times


def _replayed(run: Run) -> list[torch.cuda.Event]:
    """Events around the timed replays of one turn."""
    run()
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(_REPLAYS + 1)
    ]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    return events


def _host_time(run: Run) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3
