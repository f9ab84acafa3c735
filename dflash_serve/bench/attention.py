"""Time of the attention kernels at Qwen3-8B's shapes, with the pools of all layers resident.

    python -m dflash_serve.bench.attention --output attention.json

A variant of a case is one CUDA graph that holds a call per layer, each on its own layer's pages in
shuffled order, so that the L2 cache holds nothing useful. The variants of a case take turns in
short rounds, since the card slows down under load, and every figure is the median replay. Decode
cases state the bytes of keys and values read per second, prompts the FLOPs of the scores a causal
mask leaves.

Every variant is checked on one layer: against torch, and bit for bit with tiles of 64 rows that
take the request whole and add weights in the same way, in calls of 1, 4 and 16 rows. `--tiers`
measures other sizes of splits and `--also` further ones (the cases of the section 'sizes'), each in
a process of its own, since they are constants of the kernels.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_serve.bench import attention_check
from dflash_serve.bench.attention_cases import (
    CASES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    TOY,
    Case,
    Variant,
    variants,
)
from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention import DecodeTiles, decode_attention
from dflash_serve.kernels.gpu.prefill import PrefillTiles, prefill_attention

__all__ = ["main"]

_READ_TB_S = 4.2
_TFLOP_S = 790.0
_LAYERS = 41
_ROUNDS, _REPLAYS = 6, 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and at what size to run; toy sizes in the interpreter show that the script works."""

    device: torch.device
    dtype: torch.dtype
    layers: int
    cases: list[Case]

    def pool(self) -> Tensor:
        """[layers, 2, pages, page_size, kv_heads, head_dim] for the largest case."""
        pages = 1 + max(case.batch * -(-case.context // PAGE) for case in self.cases)
        shape = (self.layers, 2, pages, PAGE, KV_HEADS, HEAD_DIM)
        pool = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer in pool:
            layer.normal_()
        return pool

    def view(self, case: Case, pages: int) -> AttentionView:
        """A view of a case onto random pages of `pages`."""
        width = -(-case.context // PAGE)
        order = torch.randperm(pages - 1, device=self.device)[: case.batch * width] + 1
        start = torch.full((case.batch,), case.context - case.rows, device=self.device)
        table = order.view(case.batch, width)
        table = torch.nn.functional.pad(table, (0, case.table_width - width))
        return AttentionView(table, start, case.rows, case.context, PAGE, True)


def call(variant: Variant, query: Tensor, pages: Tensor, view: AttentionView) -> Tensor:
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
    pages = torch.zeros((2, 4, PAGE, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
    table = torch.zeros((1, case.table_width), dtype=torch.int64, device=device)
    start = torch.zeros((1,), dtype=torch.int64, device=device)
    view = AttentionView(table, start, case.rows, case.context, PAGE, True)
    query = torch.zeros((1, case.rows, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
    try:
        call(variant, query, pages, view)
        torch.cuda.synchronize()
        return f"{variant.name:40} {attention_check.needs()}"
    except Exception as error:  # whatever a compiler may raise; the sweep goes on
        return f"{variant.name:40} {_line(error)}"


def compile_all(cases: list[Case], most: int, budget_s: float, tiers: str | None) -> None:
    """Compile the first `most` variants of each case in processes; print what they need."""
    jobs: dict[tuple[object, ...], tuple[Case, Variant, str | None]] = {}
    for case in cases:
        for variant in itertools.islice(variants(case), most):
            aligned = case.table_width % 16 == 0  # a different kernel otherwise
            of = variant.sharing and dataclasses.replace(variant.sharing, programs=1)
            jobs.setdefault((variant.tiles, of, aligned), (case, variant, tiers))
    workers = max(1, min(len(jobs), 14, (os.cpu_count() or 2) - 2))
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn)
    futures = [pool.submit(compile_variant, *job) for job in jobs.values()]
    done, late = concurrent.futures.wait(futures, timeout=budget_s)
    lines = {str(f.exception() or f.result()) for f in done}
    pool.shutdown(wait=False, cancel_futures=True)
    print(*sorted(lines), f"compiled {len(done)} kernels, {len(late)} not ready", sep="\n")


@dataclasses.dataclass
class Contestant:
    """A variant of a case with what was found out about it; `replay` unless it failed."""

    variant: Variant
    row: dict[str, Any]
    replay: Callable[[], object] | None = None
    times: list[float] = dataclasses.field(default_factory=list)


def enter(
    setting: Setting, case: Case, variant: Variant, query: Tensor, pool: Tensor, view: AttentionView
) -> Contestant:
    """Check one variant and capture its calls."""
    contestant = Contestant(variant, {**dataclasses.asdict(case), "variant": variant.name})

    def layers() -> None:
        for pages in pool:
            call(variant, query, pages, view)

    try:
        out = call(variant, query, pool[0], view)
        contestant.row["wrong"] = attention_check.faults(out, query, pool[0], view)
        if isinstance(variant.tiles, DecodeTiles):
            bits = attention_check.bits(out, query, pool[0], view, variant.tiles, variant.sharing)
            contestant.row["bits"] = bits
        contestant.replay = _captured(layers) if setting.device.type == "cuda" else layers
    except Exception as error:  # a variant that does not fit must not end the sweep
        contestant.row["error"] = _line(error)
    return contestant


def _captured(work: Callable[[], None]) -> Callable[[], object]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph.replay


def milliseconds(replay: Callable[[], object], device: torch.device) -> list[float]:
    """Times of a few calls in a row, the first of which is not counted on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        replay()
        return [(time.perf_counter() - began) * 1e3]
    events: list[Any] = [_event() for _ in range(_REPLAYS + 1)]
    replay()
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure(setting: Setting, case: Case, pool: Tensor, most: int) -> list[dict[str, Any]]:
    """A row of the result for each of the first `most` variants, which take turns."""
    shape = (case.batch, case.rows, HEADS, HEAD_DIM)
    query = torch.randn(shape, dtype=setting.dtype, device=setting.device)
    view = setting.view(case, pool.shape[2])
    chosen = list(itertools.islice(dict.fromkeys(variants(case)), most))
    field = [enter(setting, case, variant, query, pool, view) for variant in chosen]
    for turn in range(_ROUNDS if setting.device.type == "cuda" else 1):
        for contestant in field if turn % 2 == 0 else reversed(field):
            if contestant.replay is not None:
                contestant.times += milliseconds(contestant.replay, setting.device)
    for contestant in field:
        if contestant.times:
            moved = case.batch * case.context * pool[0, :, 0, 0].nbytes * setting.layers
            contestant.row |= _rates(case, statistics.median(contestant.times), moved, setting)
    return [contestant.row for contestant in field]


def _rates(case: Case, ms: float, moved: int, setting: Setting) -> dict[str, float]:
    if case.rows > 32:
        flops = 2.0 * case.batch * case.context**2 * HEADS * HEAD_DIM * setting.layers
        rate = flops / ms / 1e9
        return {"ms": round(ms, 4), "tflop_s": round(rate, 1), "share": round(rate / _TFLOP_S, 3)}
    rate = moved / ms / 1e9
    return {
        "ms": round(ms, 4),
        "bytes": moved,
        "tb_s": round(rate, 3),
        "share": round(rate / _READ_TB_S, 3),
    }


def _line(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}"[:160]


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    head = f"{row['batch']:4} x {row['context']:6} g{row['rows']:<5} {row['variant']:46}"
    if "error" in row:
        print(f"{head} {row['error']}", flush=True)
        return
    rate = f"{row['tb_s']:7.3f} TB/s" if "tb_s" in row else f"{row['tflop_s']:7.1f} TFLOP/s"
    bits = f"  bits {row['bits']}" if "bits" in row else ""
    wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
    print(f"{head} {row['ms']:9.4f} ms {rate} {row['share']:6.1%}{bits}{wrong}", flush=True)


def summary(rows: list[dict[str, Any]]) -> None:
    """Print for each variant whether its bits are those of tiles of 64 rows in every case."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if "bits" in row:
            found.setdefault(row["variant"], set()).add(row["bits"])
    print("bits of calls of 1, 4 and 16 rows beside tiles of 64 rows, taken whole:")
    for name, bits in found.items():
        print(f"  {name:46} {'equal' if bits == {'equal'} else ' | '.join(sorted(bits))}")


def main() -> None:
    """Compile, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--budget-s", type=float, default=95.0, help="stop starting work after")
    parser.add_argument(
        "--only", action="append", choices=[*CASES], help="these sections; else 'decisive'"
    )
    parser.add_argument("--quick", action="store_true", help="the first variant of a case only")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    parser.add_argument("--tiers", help="as 1024:256,4096:512,8192:1024,2048")
    parser.add_argument("--also", action="append", default=[], help="tiers to run afterwards")
    options = parser.parse_args()
    began = time.perf_counter()
    attention_check.use_tiers(options.tiers)
    device = torch.device("cpu" if options.cpu_check else "cuda")
    sections = TOY if options.cpu_check else CASES
    cases = [case for name in options.only or ["decisive"] for case in sections.get(name, [])]
    dtype, layers = (torch.float32, 2) if options.cpu_check else (torch.bfloat16, _LAYERS)
    setting = Setting(device, dtype, layers, cases)
    print(f"splits of {options.tiers or 'the default sizes'}")
    rows = sweep(setting, options.budget_s, quick=options.quick, tiers=options.tiers)
    summary(rows)
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
    most = 1 if quick else 4 if toy else 99
    if not toy:
        compile_all(setting.cases, most, budget_s * 0.6, tiers)
        print(f"{time.perf_counter() - began:.0f} s for compiling", flush=True)
    pool = setting.pool()
    rows: list[dict[str, Any]] = []
    skipped = 0
    for case in setting.cases:
        if time.perf_counter() - began > budget_s:
            skipped += 1
            continue
        measured = measure(setting, case, pool, most)
        for row in measured:
            show(row)
        rows += measured
    if skipped:
        print(f"{skipped} cases skipped for time")
    return rows


if __name__ == "__main__":
    main()
