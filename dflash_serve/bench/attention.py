"""Time of the attention kernels at Qwen3-8B's shapes, with the pools of all layers resident.

    python -m dflash_serve.bench.attention --output attention.json

Every figure is the median replay of one CUDA graph that holds a call per layer, each on its own
layer's pages in shuffled order, so that the L2 cache holds nothing useful. Decode cases state the
bytes of keys and values read per second, prompts the FLOPs of the scores a causal mask leaves.

Every variant is checked on one layer: against torch, and bit for bit against the first request
computed alone, taken whole. `--tiers` measures other sizes of splits and `--also` further ones
(the cases of the section 'sizes'), each in a process of its own, since they are constants of the
kernels.
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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_serve.bench import attention_check
from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention import DecodeTiles, Sharing, decode_attention, share
from dflash_serve.kernels.gpu.attention_splits import split_count
from dflash_serve.kernels.gpu.prefill import PrefillTiles, prefill_attention

__all__ = ["main"]

_READ_TB_S = 4.2
_TFLOP_S = 790.0
_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE, _LAYERS = 32, 8, 128, 64, 41
_REPLAYS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` requests of `rows` query rows whose last row sees `context` keys.

    Their page tables have room for `room` keys, if that is more.
    """

    batch: int
    context: int
    rows: int
    room: int = 0

    @property
    def table_width(self) -> int:
        """Pages of a request that a table has room for."""
        return -(-max(self.context, self.room) // _PAGE)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a case is computed; without `sharing` as the shapes ask for."""

    tiles: DecodeTiles | PrefillTiles
    sharing: Sharing | None = None

    @property
    def name(self) -> str:
        """Short text for the table."""
        t, of = self.tiles, self.sharing
        if isinstance(t, PrefillTiles):
            return f"{t.row_tile}x{t.key_tile} w{t.warps} s{t.stages}"
        name = "default" if of is None else of.mode + (f" p{of.programs}" * (of.mode == "split"))
        if of is not None and of.short_keys:
            name += f" short {of.short_keys}/{of.short_slices}"
        name += f" v{t.value_tile}" if t.value_tile != _TILE.value_tile else ""
        name += f" s{t.stages}" if t.stages != _TILE.stages else ""
        merge = (t.merge_rows, t.merge_warps)
        changed = merge != (_TILE.merge_rows, _TILE.merge_warps)
        return name + (f" merge {merge[0]}w{merge[1]}" if changed else "")


Section = Literal["first", "second", "sizes", "rest", "prefill"]
_CASES: dict[Section, list[Case]] = {
    "first": [Case(8, 1040, 16), Case(1, 1040, 16), Case(8, 1025, 1)],
    "second": [
        Case(4, 1040, 16),
        Case(12, 1040, 16),
        Case(16, 1040, 16),
        Case(8, 2064, 16),
        Case(8, 4112, 16),
        Case(8, 1028, 4, 40960),
        Case(2, 1040, 16),
        Case(16, 16384, 16),
    ],
    "sizes": [
        Case(8, 32768, 16),
        Case(1, 32768, 16),
        Case(1, 8208, 16),
        Case(1, 1040, 16),
        Case(4, 2064, 16),
        Case(4, 8208, 16),
        Case(1, 4112, 16),
        Case(8, 8208, 16),
        Case(8, 32768, 1),
    ],
    "rest": [
        Case(128, 1040, 16),
        Case(32, 1040, 16),
        Case(128, 1025, 1),
        Case(32, 8192, 16),
    ],
    "prefill": [Case(8, 1024, 1024), Case(1, 8192, 8192)],
}
_TOY: dict[Section, list[Case]] = {
    "first": [Case(1, 280, 2), Case(1, 64, 1, 300)],
    "sizes": [Case(1, 300, 2)],
    "prefill": [Case(2, 40, 40)],
}

_TILE = DecodeTiles(64, 64, 128)
_PREFILL_TILES = [PrefillTiles(128, 64, 128, 8, 3), PrefillTiles(128, 128, 128, 8, 3)]


def variants(case: Case) -> Iterator[Variant]:
    """The sweep of one case, the default first."""
    if case.rows > 16:
        yield from (Variant(tiles) for tiles in _PREFILL_TILES)
        return
    yield Variant(_TILE)
    pairs = case.batch * _KV_HEADS
    half = dataclasses.replace(_TILE, value_tile=64)
    if case.batch >= 32:
        return
    splits = split_count(case.table_width * _PAGE)
    programs = min(splits, 264 // pairs)
    plain = Sharing("split", programs)
    if case.context > 4112 and case.batch < 16:
        yield from _variants_long(case, programs)
        return
    whole, short = Sharing("whole", 1), min(splits, max(2, programs))
    yield Variant(_TILE, plain)
    yield Variant(_TILE, whole)
    yield Variant(half, whole)
    yield Variant(_TILE, Sharing("split", short, 8192, 1))
    yield Variant(_TILE, Sharing("split", short, 8192, 2))
    if case.batch <= 4:
        yield Variant(half, Sharing("split", min(splits, 132 // pairs)))
    if case in _CASES["first"]:
        for rows, warps in ((2, 4), (2, 2), (4, 2), (1, 1), (8, 4)):
            tiles = dataclasses.replace(_TILE, merge_rows=rows, merge_warps=warps)
            yield Variant(tiles, plain)
        yield Variant(dataclasses.replace(_TILE, stages=2), Sharing("split", short, 8192, 2))
        yield Variant(dataclasses.replace(_TILE, stages=2), plain)


def _variants_long(case: Case, programs: int) -> Iterator[Variant]:
    """Long contexts in split mode: without the code for short requests, and more programs."""
    if share(case.batch * _KV_HEADS, programs, _TILE).short_keys:
        yield Variant(_TILE, Sharing("split", programs))
        yield Variant(_TILE, Sharing("split", 2 * programs, 2048, 2))
        yield Variant(_TILE, Sharing("whole", 1))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and at what size to run; toy sizes in the interpreter show that the script works."""

    device: torch.device
    dtype: torch.dtype
    layers: int
    cases: list[Case]

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
        table = torch.nn.functional.pad(table, (0, case.table_width - width))
        return AttentionView(table, start, case.rows, case.context, _PAGE, True)


def call(case: Case, variant: Variant, query: Tensor, pages: Tensor, view: AttentionView) -> Tensor:
    """Attention of one layer; pages [2, ...]."""
    if isinstance(variant.tiles, PrefillTiles):
        return prefill_attention(query, pages[0], pages[1], view, tiles=variant.tiles)
    return decode_attention(
        query, pages[0], pages[1], view, tiles=variant.tiles, sharing=variant.sharing
    )


def compile_variant(case: Case, variant: Variant, tiers: str | None) -> str:
    """Put a variant's kernels into Triton's cache on disk; their needs, or the error's first line.

    Runs in a process of its own.
    """
    attention_check.use_tiers(tiers)
    device = torch.device("cuda")
    pages = torch.zeros((2, 4, _PAGE, _KV_HEADS, _HEAD_DIM), dtype=torch.bfloat16, device=device)
    table = torch.zeros((1, case.table_width), dtype=torch.int64, device=device)
    start = torch.zeros((1,), dtype=torch.int64, device=device)
    view = AttentionView(table, start, case.rows, case.context, _PAGE, True)
    query = torch.zeros((1, case.rows, _HEADS, _HEAD_DIM), dtype=torch.bfloat16, device=device)
    try:
        call(case, variant, query, pages, view)
        torch.cuda.synchronize()
        return f"{variant.name:32} {attention_check.needs()}"
    except Exception as error:  # whatever a compiler may raise; the sweep goes on
        return f"{variant.name:32} {_line(error)}"


def compile_all(cases: list[Case], most: int, budget_s: float, tiers: str | None) -> None:
    """Compile the first `most` variants of each case in processes; print what they need."""
    jobs: dict[tuple[object, ...], tuple[Case, Variant, str | None]] = {}
    for case in cases:
        for variant in itertools.islice(variants(case), most):
            aligned = case.table_width % 16 == 0  # a different kernel otherwise
            of = variant.sharing or share(case.batch * _KV_HEADS, 26, _TILE)
            key = (variant.tiles, dataclasses.replace(of, programs=1), aligned)
            variant = dataclasses.replace(variant, sharing=of)
            jobs.setdefault(key, (case, variant, tiers))
    workers = max(1, min(len(jobs), 14, (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn)
    futures = [pool.submit(compile_variant, *job) for job in jobs.values()]
    done, late = concurrent.futures.wait(futures, timeout=budget_s)
    lines = {str(f.exception() or f.result()) for f in done}
    pool.shutdown(wait=False, cancel_futures=True)
    print(*sorted(lines), f"compiled {len(done)} kernels, {len(late)} not ready", sep="\n")


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
        out = call(case, variant, query, pool[0], view)
        row["wrong"] = attention_check.faults(out, query, pool[0], view, _first_tiles(case))
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


def _distinct(case: Case) -> list[Variant]:
    return list(dict.fromkeys(variants(case)))


def _first_tiles(case: Case) -> DecodeTiles | None:
    tiles = next(variants(case)).tiles
    return tiles if isinstance(tiles, DecodeTiles) else None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[
        :160
    ]


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    room = f" of {row['room']}" if row["room"] else ""
    head = f"{row['batch']:4} x {row['context']:6}{room} g{row['rows']:<5} {row['variant']:32}"
    if "error" in row:
        print(f"{head} {row['error']}", flush=True)
        return
    rate = f"{row['tb_s']:7.3f} TB/s" if "tb_s" in row else f"{row['tflop_s']:7.1f} TFLOP/s"
    wrong = f"  {row['wrong']}" if row["wrong"] else ""
    print(f"{head} {row['ms']:9.3f} ms {rate} {row['share']:6.1%}{wrong}", flush=True)


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--budget-s", type=float, default=90.0, help="stop starting work after")
    parser.add_argument(
        "--only", action="append", choices=[*_CASES], help="these sections; all but prefill"
    )
    parser.add_argument("--quick", action="store_true", help="the first variant of a case only")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    parser.add_argument("--tiers", help="as 1024:256,4096:512,8192:1024,2048")
    parser.add_argument("--also", action="append", default=[], help="tiers to run afterwards")
    options = parser.parse_args()
    began = time.perf_counter()
    attention_check.use_tiers(options.tiers)
    device = torch.device("cpu" if options.cpu_check else "cuda")
    sections = _TOY if options.cpu_check else _CASES
    some = options.only or [name for name in sections if name != "prefill"]
    cases = [case for name in some for case in sections.get(name, [])]
    dtype, layers = (torch.float32, 2) if options.cpu_check else (torch.bfloat16, _LAYERS)
    setting = Setting(device, dtype, layers, cases)
    print(f"splits of {options.tiers or 'the default sizes'}")
    rows = sweep(setting, options.budget_s, quick=options.quick, tiers=options.tiers)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    if options.output:
        result = {"layers": layers, "tiers": options.tiers, "read_tb_s": _READ_TB_S, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for tiers in options.also:
        again(options, tiers)


def again(options: argparse.Namespace, tiers: str) -> None:
    """The defaults for the cases of 'sizes' with other sizes of splits, in another process."""
    command = [sys.executable, "-m", __spec__.name, "--tiers", tiers, "--only", "sizes"]
    command += ["--quick", "--budget-s", str(options.budget_s / 3)]
    command += ["--cpu-check"] if options.cpu_check else []
    if options.output:
        command += ["--output", str(options.output.with_suffix(f".{tiers}.json"))]
    subprocess.run(command, check=False)


def sweep(
    setting: Setting, budget_s: float, *, quick: bool, tiers: str | None
) -> list[dict[str, Any]]:
    """All variants of all cases; what does not fit into the time is left out."""
    began = time.perf_counter()
    toy = setting.device.type != "cuda"
    most = 1 if quick else 6 if toy else 99
    if not toy:
        compile_all(setting.cases, most, budget_s * 0.6, tiers)
    pool = setting.pool()
    rows, skipped = [], 0
    for case in setting.cases:
        for variant in itertools.islice(_distinct(case), most):
            if time.perf_counter() - began > budget_s:
                skipped += 1
                continue
            rows.append(measure(setting, case, variant, pool))
            show(rows[-1])
    if skipped:
        print(f"{skipped} variants skipped for time")
    return rows


if __name__ == "__main__":
    main()
