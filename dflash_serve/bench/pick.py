"""Time of choosing ids from finished logits on a GPU, inside one CUDA graph.

    python -m dflash_serve.bench.pick --output pick.json
    python -m dflash_serve.bench.pick --head --budget 240 --output head.json
    python -m dflash_serve.bench.pick --cpu-check          # a toy size in Triton's interpreter

With --head the head product is timed too: with a pick after it, and with the pick in it.

A graph holds many picks, each with logits of its own that together exceed the L2 cache several
times over; a step would find a small batch's logits in the cache, so that small batches do better.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.rows import RowSampling
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.pick import pick
from dflash_serve.parallel.shard import VocabShard

__all__ = ["Case", "Timing", "main", "measure"]

VOCAB = 151_936
ROWS = (1, 16, 128, 512, 2048)
KINDS = ("greedy", "noisy", "truncated")
READ_TBPS = 4.2
_TRUNCATED_PASSES = 10  # the maximum, 7 histograms, ties, the pick
_CACHE_BYTES = 200e6
_MOST_PICKS = 512
_REPLAYS = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        kind: "greedy", "noisy" (T = 0.8) or "truncated" (T = 0.8, top-k 200, top-p 0.95).
        rows, vocab: shape of the logits.
        dtype: "float32" or "bfloat16".
    """

    kind: str
    rows: int
    vocab: int
    dtype: str

    @property
    def bytes_read(self) -> int:
        """Bytes of logits that one pick reads, over all passes."""
        passes = _TRUNCATED_PASSES if self.kind == "truncated" else 1
        return passes * self.rows * self.vocab * (4 if self.dtype == "float32" else 2)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Result of a case: microseconds a pick, terabytes per second, share of the read ceiling."""

    microseconds: float
    terabytes_per_second: float
    share_of_ceiling: float


def sampling(case: Case, device: torch.device) -> RowSampling:
    """One request a row."""
    count = case.rows

    def real(value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float64, device=device)

    truncated = case.kind == "truncated"
    temperature = 0.0 if case.kind == "greedy" else 0.8
    return RowSampling(
        temperature=real(temperature),
        top_k=torch.full((count,), 200 if truncated else 0, device=device),
        top_p=real(0.95 if truncated else 1.0),
        min_p=real(0.0),
        seed=torch.arange(count, device=device),
        position=torch.arange(count, device=device) + 1000,
        noisy=temperature > 0,
        truncates=truncated,
    )


def measure(case: Case, device: torch.device) -> Timing:
    """Time one case; without a GPU the figure is the interpreter's and means nothing."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    one = case.rows * case.vocab * dtype.itemsize
    picks = min(_MOST_PICKS, max(2, round(_CACHE_BYTES / one)))
    if device.type != "cuda":
        picks = 1
    batches = [
        torch.randn((case.rows, case.vocab), device=device, dtype=dtype).mul_(3.0)
        for _ in range(picks)
    ]
    rows, shard = sampling(case, device), VocabShard(0, case.vocab, case.vocab)

    def one_pick(logits: Tensor) -> None:
        pick(logits, rows, shard, Single(), noise=None)

    def all_picks() -> None:
        for logits in batches:
            one_pick(logits)

    one_pick(batches[0])
    seconds = _graph_seconds(all_picks) if device.type == "cuda" else _plain_seconds(all_picks)
    seconds /= picks
    rate = case.bytes_read / seconds / 1e12
    return Timing(seconds * 1e6, rate, rate / READ_TBPS)


def _graph_seconds(work: Callable[[], None]) -> float:
    """Median seconds of a graph that holds `work`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        began, ended = _event(), _event()
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / 1e3)
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _plain_seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(cases: list[Case], device: torch.device) -> list[dict[str, object]]:
    """Time all cases and print them; a case that fails says why in a line."""
    print(f"{'kind':>10} {'logits':>9} {'rows':>5} {'us':>9} {'TB/s':>6} {'of 4.2':>7}")
    results: list[dict[str, object]] = []
    for case in cases:
        result: dict[str, object] = dataclasses.asdict(case)
        label = f"{case.kind:>10} {case.dtype:>9} {case.rows:>5}"
        try:
            timing = measure(case, device)
        except Exception as error:  # the other cases still have something to say
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{label} {text}", flush=True)
            result["error"] = text
        else:
            result |= dataclasses.asdict(timing) | {"bytes_read": case.bytes_read}
            print(
                f"{label} {timing.microseconds:9.1f} {timing.terabytes_per_second:6.2f}"
                f" {timing.share_of_ceiling:7.1%}",
                flush=True,
            )
        results.append(result)
    return results


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="time the pick")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    parser.add_argument("--head", action="store_true", help="product and pick against both in one")
    parser.add_argument("--rows", type=int, nargs="+", help="row counts with --head")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds with --head")
    options = parser.parse_args(arguments)
    if options.head:
        _compare_heads(options)
        return
    if options.cpu_check:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, in the pick
        cases = [Case(kind, 2, 300, "float32") for kind in KINDS]
        with interpreted():
            results = run(cases, torch.device("cpu"))
        device = "interpreter"
    else:
        cases = [
            Case(kind, rows, VOCAB, dtype)
            for kind in KINDS
            for dtype in ("bfloat16", "float32")
            for rows in ROWS
        ]
        results = run(cases, torch.device("cuda"))
        device = torch.cuda.get_device_name()
    if options.output is not None:
        options.output.write_text(json.dumps({"device": device, "cases": results}, indent=1) + "\n")


def _compare_heads(options: argparse.Namespace) -> None:
    if options.cpu_check:
        os.environ["TRITON_INTERPRET"] = "1"
    from dflash_serve.bench import head_pick

    counts = tuple(options.rows or ((3, 130) if options.cpu_check else head_pick.ROWS))
    if options.cpu_check:
        with interpreted():
            head_pick.compare(counts, options.budget, options.output, torch.device("cpu"))
        return
    head_pick.compare(counts, options.budget, options.output, torch.device("cuda"))


if __name__ == "__main__":
    main()
