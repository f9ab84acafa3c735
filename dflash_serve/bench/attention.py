"""Time of the attention kernels at Qwen3-8B's shapes, with the pools of all layers resident.

    python -m dflash_serve.bench.attention --output attention.json

Every figure is the median replay of one CUDA graph that holds a call per layer, each on its own
layer's pages in shuffled order, so that the L2 cache holds nothing useful. Decode cases state the
bytes of keys and values read per second, prompts the FLOPs of the scores a causal mask leaves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention import DecodeTiles, Mode, decode_attention
from dflash_serve.kernels.gpu.prefill import PrefillTiles, prefill_attention

__all__ = ["main"]

_READ_TB_S = 4.2
_TFLOP_S = 790.0
_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE, _LAYERS = 32, 8, 128, 16, 36
_REPLAYS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` requests of `rows` query rows whose last row sees `context` keys."""

    batch: int
    context: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a case is computed; `waves` scales the programs that share a request's splits."""

    tiles: DecodeTiles | PrefillTiles
    mode: Mode | None = None
    waves: float = 1.0

    @property
    def name(self) -> str:
        """Short text for the table."""
        t = self.tiles
        shape = f"{t.row_tile}x{t.key_tile} w{t.warps} s{t.stages}"
        if isinstance(t, PrefillTiles):
            return shape
        extra = (" dot" if t.sum_by_dot else "") + ("" if t.evict_first else " keep")
        return f"{self.mode:5} {shape}{extra}" + (f" x{self.waves:g}" if self.waves != 1 else "")


_DECODE = [
    Case(1, 1024, 16),
    Case(1, 1024, 1),
    Case(8, 1024, 16),
    Case(8, 1024, 1),
    Case(32, 1024, 16),
    Case(32, 1024, 1),
    Case(128, 1024, 16),
    Case(128, 1024, 1),
    Case(8, 32768, 16),
    Case(32, 8192, 16),
    Case(1, 32768, 1),
]
_PREFILL = [Case(8, 1024, 1024), Case(1, 8192, 8192)]
_TOY_DECODE = [Case(1, 96, 2), Case(2, 64, 1)]
_TOY_PREFILL = [Case(2, 40, 40)]

_TILES = [
    DecodeTiles(64, 64, 128, 4, 3),
    DecodeTiles(64, 64, 128, 4, 2),
    DecodeTiles(64, 64, 128, 4, 5),
    DecodeTiles(64, 128, 128, 4, 2),
    DecodeTiles(64, 32, 128, 4, 3),
    DecodeTiles(64, 32, 128, 4, 5),
    DecodeTiles(64, 64, 128, 4, 3, sum_by_dot=True),
    DecodeTiles(64, 64, 128, 4, 3, evict_first=False),
]
_FEW_ROW_TILES = [
    DecodeTiles(16, 32, 128, 1, 3, sum_by_dot=True),
    DecodeTiles(16, 64, 128, 4, 3, sum_by_dot=True),
    DecodeTiles(32, 32, 128, 2, 3, sum_by_dot=True),
]
_PREFILL_TILES = [
    PrefillTiles(128, 128, 128, 8, 2),
    PrefillTiles(128, 64, 128, 8, 3),
    PrefillTiles(128, 64, 128, 8, 2),
    PrefillTiles(64, 64, 128, 4, 3),
    PrefillTiles(64, 128, 128, 4, 2),
]


def variants(case: Case) -> Iterator[Variant]:
    """The sweep of one case, the default first."""
    if case.rows > 16:
        yield from (Variant(tiles) for tiles in _PREFILL_TILES)
        return
    programs = case.batch * _KV_HEADS
    modes: list[Mode] = ["split", "whole"] if programs < 132 else ["whole", "split"]
    for tiles in _TILES + (_FEW_ROW_TILES if case.rows == 1 else []):
        yield Variant(tiles, modes[0])
    if programs < 2048 and case.context < 32768:
        yield Variant(_TILES[0], modes[1])
    if modes[0] == "split":
        yield from (Variant(_TILES[0], "split", waves) for waves in (0.5, 2.0))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and at what size to run; toy sizes in the interpreter show that the script works."""

    device: torch.device
    dtype: torch.dtype
    layers: int
    decode: list[Case]
    prefill: list[Case]

    @property
    def cases(self) -> list[Case]:
        """All of them."""
        return self.decode + self.prefill

    def pool(self) -> Tensor:
        """[layers, 2, pages, page_size, kv_heads, head_dim] for the largest case."""
        pages = 1 + max(case.batch * -(-case.context // _PAGE) for case in self.cases)
        shape = (self.layers, 2, pages, _PAGE, _KV_HEADS, _HEAD_DIM)
        pool = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer in pool:
            layer.normal_()
        return pool

    def view(self, case: Case, pages: int) -> AttentionView:
        """A view of a case onto random pages of `pages`."""
        width = -(-case.context // _PAGE)
        order = torch.randperm(pages - 1, device=self.device)[: case.batch * width] + 1
        start = torch.full((case.batch,), case.context - case.rows, device=self.device)
        table = order.view(case.batch, width)
        return AttentionView(table, start, case.rows, case.context, _PAGE, True)


def call(case: Case, variant: Variant, query: Tensor, pages: Tensor, view: AttentionView) -> Tensor:
    """Attention of one layer; pages [2, ...]."""
    if isinstance(variant.tiles, PrefillTiles):
        return prefill_attention(query, pages[0], pages[1], view, tiles=variant.tiles)
    programs = None  # what the kernel chooses by itself
    if variant.waves != 1.0:
        programs = max(1, round(variant.waves * 264 / (case.batch * _KV_HEADS)))
    return decode_attention(
        query, pages[0], pages[1], view, tiles=variant.tiles, mode=variant.mode, programs=programs
    )


def compile_variant(case: Case, variant: Variant) -> str | None:
    """Put a variant's kernels into Triton's cache on disk; the error's first line, if any."""
    device = torch.device("cuda")
    small = Case(1, case.context, case.rows)
    pages = torch.zeros((2, 4, _PAGE, _KV_HEADS, _HEAD_DIM), dtype=torch.bfloat16, device=device)
    width = -(-case.context // _PAGE)
    table = torch.zeros((1, width), dtype=torch.int64, device=device)
    start = torch.zeros((1,), dtype=torch.int64, device=device)
    view = AttentionView(table, start, case.rows, case.context, _PAGE, True)
    query = torch.zeros((1, case.rows, _HEADS, _HEAD_DIM), dtype=torch.bfloat16, device=device)
    try:
        call(small, variant, query, pages, view)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler may raise; the sweep goes on
        return _line(error)
    return None


def compile_all(cases: list[Case], budget_s: float) -> None:
    """Compile every distinct variant in processes of their own."""
    jobs: dict[tuple[object, object, bool], tuple[Case, Variant]] = {}
    for case in cases:
        for variant in variants(case):
            aligned = -(-case.context // _PAGE) % 16 == 0  # a different kernel otherwise
            jobs.setdefault((variant.tiles, variant.mode, aligned), (case, variant))
    workers = max(1, min(len(jobs), 12, (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn)
    futures = [pool.submit(compile_variant, *job) for job in jobs.values()]
    done, late = concurrent.futures.wait(futures, timeout=budget_s)
    failed = sum(future.exception() is not None or bool(future.result()) for future in done)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"compiled {len(done) - failed} kernels, {failed} failed, {len(late)} not ready")


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of `work`: of replays of its graph on a GPU, of one plain call elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(2):
        graph.replay()
    events: list[Any] = [_event() for _ in range(_REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median([float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure(setting: Setting, case: Case, variant: Variant, pool: Tensor) -> dict[str, Any]:
    """One row of the result."""
    shape = (case.batch, case.rows, _HEADS, _HEAD_DIM)
    query = torch.randn(shape, dtype=setting.dtype, device=setting.device)
    view = setting.view(case, pool.shape[2])

    def layers() -> None:
        for pages in pool:
            call(case, variant, query, pages, view)

    row: dict[str, Any] = {**dataclasses.asdict(case), "variant": variant.name}
    try:
        ms = milliseconds(layers, setting.device)
    except Exception as error:  # a variant that does not fit must not end the sweep
        return {**row, "error": _line(error)}
    row["ms"] = round(ms, 4)
    if case.rows > 16:
        flops = 2.0 * case.batch * case.context**2 * _HEADS * _HEAD_DIM * setting.layers
        row["tflop_s"] = round(flops / ms / 1e9, 1)
        row["share"] = round(row["tflop_s"] / _TFLOP_S, 3)
    else:
        moved = case.batch * case.context * pool[0, :, 0, 0].nbytes * setting.layers
        row["bytes"] = moved
        row["tb_s"] = round(moved / ms / 1e9, 3)
        row["share"] = round(row["tb_s"] / _READ_TB_S, 3)
    return row


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
        :160
    ]


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    head = f"{row['batch']:4} x {row['context']:6} g{row['rows']:<5} {row['variant']:28}"
    if "error" in row:
        print(f"{head} {row['error']}", flush=True)
        return
    rate = f"{row['tb_s']:7.3f} TB/s" if "tb_s" in row else f"{row['tflop_s']:7.1f} TFLOP/s"
    print(f"{head} {row['ms']:9.3f} ms {rate} {row['share']:6.1%}", flush=True)


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--budget-s", type=float, default=90.0, help="stop starting work after")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one half of the cases")
    parser.add_argument("--quick", action="store_true", help="the first variant of each case only")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    options = parser.parse_args()
    if options.cpu_check:
        setting = Setting(torch.device("cpu"), torch.float32, 2, _TOY_DECODE, _TOY_PREFILL)
    else:
        device = torch.device("cuda")
        setting = Setting(device, torch.bfloat16, _LAYERS, _DECODE, _PREFILL)
    if options.only == "decode":
        setting = dataclasses.replace(setting, prefill=[])
    elif options.only == "prefill":
        setting = dataclasses.replace(setting, decode=[])
    began = time.perf_counter()
    if not options.cpu_check and not options.quick:
        compile_all(setting.cases, options.budget_s / 2)
    pool = setting.pool()
    rows, skipped = [], 0
    limit = 1 if options.quick else 2 if options.cpu_check else 99
    for case in setting.cases:
        for index, variant in enumerate(variants(case)):
            if index >= limit:
                break
            if index and time.perf_counter() - began > options.budget_s:
                skipped += 1
                continue
            rows.append(measure(setting, case, variant, pool))
            show(rows[-1])
    print(f"{time.perf_counter() - began:.0f} s, {skipped} variants skipped for time")
    if options.output:
        result = {"layers": setting.layers, "read_tb_s": _READ_TB_S, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
