"""Where the time of one decode step goes, kernel by kernel.

    python -m dflash_serve.bench.breakdown [--target dummy:qwen3-8b] [--draft dummy:qwen3-8b-b16]
        [--batch 1] [--context 1024] [--rows 16]

Replays the captured step under torch's profiler and sums the device time by kernel.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from dflash_serve.bench.dummy import resolve_dummy
from dflash_serve.bench.grid import GridBench
from dflash_serve.bench.roofline import H200
from dflash_serve.config import EngineConfig
from dflash_serve.engine.rank import load_sized_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.parallel.group import Single

__all__ = ["KernelTime", "kernel_times"]

_REPLAYS = 10


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kernel over a step: launches and microseconds in all."""

    name: str
    launches: float
    microseconds: float


def kernel_times(runner: Runner, batch: int, rows: int) -> list[KernelTime]:
    """Device time by kernel of the captured step of a batch, the longest first."""
    graphs = runner.graphs
    if graphs is None:
        raise RuntimeError("nothing is captured here; a breakdown needs CUDA without --eager")
    key = graphs.key(batch, rows, truncates=False)
    graphs.replay(key)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_REPLAYS):
            graphs.replay(key)
        torch.cuda.synchronize()
    launches: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            launches[event.name] += 1
            spent[event.name] += event.time_range.elapsed_us()
    return [
        KernelTime(name, launches[name] / _REPLAYS, time / _REPLAYS)
        for name, time in spent.most_common()
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="dummy:qwen3-8b")
    parser.add_argument("--draft", default="dummy:qwen3-8b-b16", help="'none' for plain decoding")
    parser.add_argument("--draft-quantization", choices=["fp8"], help="compute the draft in it")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Command line."""
    options = _arguments()
    draft = None if options.draft == "none" else options.draft
    rows = None if draft is None else options.rows
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            target=str(resolve_dummy(options.target, folder)),
            draft=None if draft is None else str(resolve_dummy(draft, folder)),
            load_format="dummy",
            draft_quantization=options.draft_quantization,
            max_running=options.batch,
            max_model_len=options.context + 8192,
        )
        pair = load_sized_pair(config, Single())
        runner = Runner(pair, config)
        cell = GridBench(pair, runner, H200).cell(options.batch, options.context, rows)
        times = kernel_times(runner, options.batch, rows or 1)
    drafted = (
        "" if options.draft_quantization is None else f", draft in {options.draft_quantization}"
    )
    table = Table(title=f"one step: {cell.device_ms:.3f} ms{drafted}", title_justify="left")
    for name in ("kernel", "launches", "µs", "µs each"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for time in times:
        each = time.microseconds / time.launches
        table.add_row(
            time.name[:60], f"{time.launches:g}", f"{time.microseconds:.1f}", f"{each:.2f}"
        )
    console = Console(width=110)
    console.print(table)
    busy = sum(time.microseconds for time in times)
    console.print(f"kernels {busy / 1e3:.3f} ms, between them {cell.device_ms - busy / 1e3:.3f} ms")
    if options.output is not None:
        asked = {name: v for name, v in vars(options).items() if name != "output"}
        figures: dict[str, Any] = {"step_ms": cell.device_ms, "arguments": asked}
        figures["kernels"] = [dataclasses.asdict(time) for time in times]
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
