"""Products of a draft in 8 bits against those in bfloat16: `python -m dflash_serve.bench.fp8`.

Every product of a Qwen3-8B draft at the row counts of small and large batches, with what stands
around it in a step: rows quantised before it, activation, residual and norm after it. The ways to
compute one product take turns in short rounds, since the clock of a card that reached its power
limit changes. Each result is compared with the product of the rounded operands in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.bench.fp8_jobs import ROWS, SHAPES, TOYS, Job, Shape, jobs_of
from dflash_serve.bench.machine import describe_machine
from dflash_serve.kernels import linear
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.fp8 import Fp8Weight, quantize_rows, quantize_weight
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import fp8, fp8_head
from dflash_serve.kernels.norm import add_norm
from dflash_serve.kernels.pick import best_keys, fuses, head_keys, unpack

__all__ = ["main"]

_EPS = 1e-6
_ROUNDS = 7
_ROUND_US = 1500.0
"""Time that a way has in one round, at least one pass over its weights."""
_SAMPLED_ROWS = 64
_BOUND = 4e-2
"""Largest error against |1 + result|: bfloat16 rounds, and tensor cores keep 14 bits of a sum."""


@dataclasses.dataclass
class Result:
    """A measured way.

    Attributes:
        microseconds: of one product with what stands around it, the median of the rounds.
        error: root mean square, relative, against the product of the rounded operands.
        right: every sampled number lies within the bound.
    """

    job: Job
    microseconds: float
    error: float
    right: bool

    def as_json(self) -> dict[str, Any]:
        """Figures and the tile's numbers."""
        tile = None if self.job.tile is None else dataclasses.asdict(self.job.tile)
        return {
            "shape": self.job.shape.name,
            "rows": self.job.rows,
            "way": self.job.way,
            "tile": tile,
            "apart": self.job.apart,
            "microseconds": self.microseconds,
            "error": self.error,
            "right": self.right,
        }


class Operands:
    """Weights of a shape in both types, and rows."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        size = (shape.columns, shape.depth)
        self.weights = [self._random(*size) * shape.depth**-0.5 for _ in range(shape.copies)]
        self.quantized = [quantize_weight(weight) for weight in self.weights]
        self.norm = self._random(shape.columns).abs() + 0.5

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """[T, K] rows, and a residual [T, N] where one is added."""
        residual = self._random(count, self.shape.columns if self.shape.kind == "add" else 1)
        return self._random(count, self.shape.depth), residual

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)


def compute(job: Job, operands: Operands, index: int, x: Tensor, residual: Tensor) -> Tensor:
    """One product of a job with the index-th weight: [T, N] before a norm, or keys of ids [T]."""
    kind, norm = job.shape.kind, operands.norm
    weight: Tensor | Fp8Weight = operands.weights[index]
    if kind == "pick" and job.way != "library" and not job.apart:
        return _picked(job, operands, index, x)
    if job.way == "bf16":
        if kind == "gated":
            return linear.gated_linear(x, weight)
        if kind == "add":
            return linear.linear_add_norm(x, weight, residual, norm, _EPS)[0]
        return linear.linear(x, weight)
    quantized = operands.quantized[index]
    data, scale = quantize_rows(x)
    if job.tile is None:
        out = torch._scaled_mm(
            data,
            quantized.data.t(),
            scale[:, None],
            quantized.scale[None, :],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        out = silu_mul(out) if kind == "gated" else out
    elif job.tile.parts > 1:
        out = fp8.part_sums(data, scale, quantized, job.tile)
    else:
        gated = kind == "gated"
        out = fp8.product(data, scale, quantized, job.tile, x.dtype, gated=gated)
    if kind == "pick":
        return best_keys(out, None, 0, job.shape.columns)
    return add_norm(out, residual, norm, _EPS)[0] if kind == "add" else out


def _picked(job: Job, operands: Operands, index: int, x: Tensor) -> Tensor:
    """Keys of the head product that picks, or that goes to the pick where that is faster."""
    columns = job.shape.columns
    if job.tile is not None:
        return fp8_head.head_keys(x, operands.quantized[index], None, 0, columns, 1.0, job.tile)
    weight = operands.weights[index]
    if fuses(x, weight, noisy=False):
        return head_keys(x, weight, None, 0, columns)
    return best_keys(linear.linear(x, weight), None, 0, columns)


def expected(job: Job, operands: Operands, x: Tensor, residual: Tensor) -> Tensor:
    """Some rows of the product with the first weight, in float32 from the rounded operands."""
    some = sampled(job.rows, x.device)
    if job.way == "bf16":
        rows, weight = x[some].float(), operands.weights[0].float()
    else:
        data, scale = quantize_rows(x[some])
        rows, weight = data.float() * scale[:, None], operands.quantized[0].dequantized()
    out: Tensor = rows @ weight.T
    if job.shape.kind == "gated":
        gate, up = out.to(x.dtype).float().view(len(out), -1, 2).unbind(-1)
        out = F.silu(gate) * up
    if job.shape.kind == "add":
        out = out + residual[some].float()
    return out


def sampled(rows: int, device: torch.device) -> Tensor:
    """Up to 64 rows from the first to the last."""
    count = min(rows, _SAMPLED_ROWS)
    return torch.linspace(0, rows - 1, count, device=device).round().long()


def compared(out: Tensor, reference: Tensor) -> tuple[bool, float]:
    """Whether a result, or the scores of the ids of keys, lie within the bound; relative error."""
    if out.dtype == torch.int64:
        ids = unpack(out)[0]
        out, reference = reference.gather(1, ids[:, None]), reference.amax(1, keepdim=True)
    difference = out.float() - reference
    right = bool((difference.abs() <= _BOUND * (1 + reference.abs())).all())
    return right, float(difference.square().mean().sqrt() / reference.square().mean().sqrt())


# -- timing -------------------------------------------------------------------------------------


def recorded(work: Callable[[], None], device: str) -> Callable[[], None]:
    """Work as one CUDA graph; on a CPU, as it is."""
    work()
    if device != "cuda":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(work: Callable[[], None], repeats: int, device: str) -> float:
    """Time of one of `repeats` runs."""
    if device != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) * 1e6 / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / repeats


def measure_together(jobs: Sequence[Job], operands: Operands) -> list[Result]:
    """Check and time the ways of one shape and row count in turn; what fails is named."""
    device, copies = operands.device, range(operands.shape.copies)
    x, residual = operands.rows(jobs[0].rows)
    ready: list[tuple[Job, float, bool, Callable[[], None]]] = []
    known: dict[bool, Tensor] = {}
    for job in jobs:
        rounded = job.way != "bf16"
        if rounded not in known:
            known[rounded] = expected(job, operands, x, residual)

        def work(job: Job = job) -> None:
            for index in copies:
                compute(job, operands, index, x, residual)

        try:
            out = compute(job, operands, 0, x, residual)[sampled(job.rows, x.device)]
            right, error = compared(out, known[rounded])
            ready.append((job, error, right, recorded(work, device)))
        except Exception as failure:  # any way may be refused; the others go on without it
            text = " ".join(str(failure).split())[:160]
            print(f"not measured: {operands.shape.name} {job.rows} {job.label}: {text}")
    times: list[list[float]] = [[] for _ in ready]
    repeats = [1] * len(ready)
    for turn in range(_ROUNDS + 1 if device == "cuda" else 2):
        for at, (_, _, _, work_once) in enumerate(ready):
            spent = microseconds(work_once, repeats[at], device)
            if turn == 0:  # the first round only tells how often to repeat
                repeats[at] = max(1, int(_ROUND_US / spent)) if device == "cuda" else 1
            else:
                times[at].append(spent)
    return [
        Result(job, statistics.median(spent) / len(copies), error, right)
        for (job, error, right, _), spent in zip(ready, times, strict=True)
    ]


# -- compiling ahead ----------------------------------------------------------------------------


def _compile(job: Job) -> None:
    """Run a job once in a process of its own, for the kernels it leaves in the cache on disk."""
    shape = dataclasses.replace(job.shape, columns=min(job.shape.columns, 4096), copies=1)
    job = dataclasses.replace(job, shape=shape)
    operands = Operands(shape, "cuda")
    compute(job, operands, 0, *operands.rows(job.rows))
    torch.cuda.synchronize()


def compile_ahead(jobs: Iterable[Job], deadline: float) -> None:
    """Compile every distinct kernel in parallel; what fails is named when it is measured."""
    distinct = {(j.tile, j.shape.kind, j.apart): j for j in jobs if j.tile is not None}
    workers = max(1, min(12, (os.cpu_count() or 2) - 2, len(distinct)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = [pool.submit(_compile, job) for job in distinct.values()]
        for done in pending:
            with contextlib.suppress(Exception):
                done.result(timeout=max(0.0, deadline - time.monotonic()))
        pool.shutdown(wait=False, cancel_futures=True)


# -- reporting ----------------------------------------------------------------------------------


def best(results: Iterable[Result], *ways: str) -> Result | None:
    """The fastest right result of some ways."""
    found = [r for r in results if r.job.way in ways and r.right]
    return min(found, key=lambda r: r.microseconds, default=None)


def lines_of(cell: Sequence[Result]) -> list[str]:
    """A cell in words: every way, the fastest of our own marked."""
    own, before = best(cell, "tile"), best(cell, "bf16")
    lines = [f"{cell[0].job.shape.name}, {cell[0].job.rows} rows"]
    for r in cell:
        ratio = "" if before is None else f"{before.microseconds / r.microseconds:6.2f}x"
        mark = " WRONG" if not r.right else " *" if r is own else ""
        lines.append(
            f"  {r.microseconds:9.2f} us {ratio}  error {r.error:.1e}  {r.job.label}{mark}"
        )
    return lines


def totals(cells: Sequence[Sequence[Result]]) -> list[str]:
    """Time of all products of a draft step by row count, bfloat16 against the fastest tiles."""
    lines = []
    for rows in sorted({cell[0].job.rows for cell in cells}):
        mine = [cell for cell in cells if cell[0].job.rows == rows]
        sums = dict.fromkeys(("bf16", "fp8", "library"), 0.0)
        for cell in mine:
            every = cell[0].job.shape.each_step
            for name, way in (("bf16", "bf16"), ("fp8", "tile"), ("library", "library")):
                fastest = best(cell, way)
                sums[name] += every * fastest.microseconds if fastest else float("nan")
        names = ", ".join(cell[0].job.shape.name for cell in mine)
        figures = ", ".join(f"{name} {value:.0f} us" for name, value in sums.items())
        lines.append(f"{rows} rows: {figures} a step ({names})")
    return lines


def tables(cells: Sequence[Sequence[Result]]) -> str:
    """The fastest tiles as lines of `kernels/gpu/fp8_tiles.py`."""
    lines = []
    titles = {"TILES": ("plain", "add"), "GATED_TILES": ("gated",), "HEAD_TILES": ("pick",)}
    for title, kinds in titles.items():
        lines.append(title)
        for name in dict.fromkeys(c[0].job.shape for c in cells):
            if name.kind not in kinds:
                continue
            lines.append(f"    ({name.columns}, {name.depth}): {{  # {name.name}")
            mine = [c for c in cells if c[0].job.shape == name]
            for cell in sorted(mine, key=lambda c: c[0].job.rows):
                fastest = best(cell, "tile")
                if fastest is not None:
                    note = "  # with a pick after it" if fastest.job.apart else ""
                    lines.append(f"        {cell[0].job.rows}: {fastest.job.tile},{note}")
            lines.append("    },")
    return "\n".join(lines)


def run(
    shapes: Sequence[Shape], rows: Sequence[int], device: str, deadline: float
) -> list[list[Result]]:
    """Measure until the deadline; prints every cell."""
    groups = jobs_of(shapes, rows, library=device == "cuda")
    if device == "cuda":
        compile_ahead((job for group in groups for job in group), deadline)
        print(f"{deadline - time.monotonic():.0f} s left after compiling", flush=True)
    operands: dict[str, Operands] = {}
    cells = []
    for number, group in enumerate(groups):
        if time.monotonic() > deadline:
            print(f"out of time: {len(groups) - number} of {len(groups)} cells are missing")
            break
        shape = group[0].shape
        if shape.name not in operands:
            operands[shape.name] = Operands(shape, device)
        if cell := measure_together(group, operands[shape.name]):
            cells.append(cell)
            print("\n".join(lines_of(cell)), flush=True)
    return cells


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m dflash_serve.bench.fp8")
    parser.add_argument("--shapes", nargs="*", default=[], help="some of the shapes, by name")
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--budget-s", type=float, default=85.0, help="start nothing after this")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.budget_s
    device = "cpu" if given.cpu_check else "cuda"
    shapes = [
        s
        for s in (TOYS if given.cpu_check else SHAPES)
        if not given.shapes or s.name in given.shapes
    ]
    with interpreted() if given.cpu_check else contextlib.nullcontext(), torch.inference_mode():
        cells = run(shapes, given.rows, device, deadline)
    found = {
        "machine": describe_machine(torch.device(device)),
        "results": [r.as_json() for cell in cells for r in cell],
        "totals": totals(cells),
        "tables": tables(cells),
    }
    wrong = sum(not r.right for cell in cells for r in cell)
    print("\n".join(["", *totals(cells), "", tables(cells), f"{wrong} wrong results"]))
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
