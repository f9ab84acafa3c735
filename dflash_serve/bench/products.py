"""Times the matrix products of a Qwen3-8B DFlash step with many tiles: a table for `gpu/tiles.py`.

    python -m dflash_serve.bench.products --part decode --output products.json
    python -m dflash_serve.bench.products --part large --shapes gate_up --rows 64 512 2048

Parts: the product of few rows (decode), of any number (large; without the norm before more than
128), and how the library's products of many rows look in a captured graph (library), to be run
with CUBLAS_WORKSPACE_CONFIG set this way and that.

Every figure is the median over replays of one CUDA graph that multiplies by every layer's weight
in turn, all of them resident: no weight is still in L2 when its turn comes again. The variants of a
product take turns, and the result of each is compared with the product in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.bench.product_jobs import SHAPES, TOYS, Job, Shape, jobs_of
from dflash_serve.bench.product_library import library_report
from dflash_serve.bench.product_report import (
    Result,
    large_summary,
    large_table,
    report,
    summary,
    table,
)
from dflash_serve.bench.product_timing import captured, take_turns
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear as few
from dflash_serve.kernels.gpu import linear_large as many
from dflash_serve.kernels.gpu.norm import rms_norm
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS

__all__ = ["Inputs", "compile_ahead", "main", "measure", "random_weights"]

_EPS = 1e-6
_USUAL_ROWS = {
    "decode": (128, 16, 64, 32),
    "large": (512, 2048, 256, 384, 1024, 8192, 192, 768, 1536),
    "library": (512, 2048, 256, 384, 192),
}


class Inputs:
    """Random rows, residual and norm weight of one shape."""

    def __init__(self, shape: Shape, rows: int, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.x = torch.randn(rows, shape.depth, device=device).to(dtype)
        self.residual = torch.randn(rows, shape.columns, device=device).to(dtype)
        self.given = self.residual.clone()  # for a product that may write into it
        self.norm = torch.rand(shape.depth, device=device).to(dtype) + 0.5


def random_weights(shape: Shape, device: str) -> list[Tensor]:
    """Weights of all copies; bf16 on a GPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        torch.randn(shape.columns, shape.depth, device=device, dtype=dtype) * shape.depth**-0.5
        for _ in range(shape.copies)
    ]


def run_job(job: Job, inputs: Inputs, weight: Tensor) -> Tensor:
    """One product of a job."""
    kind, x, tile = job.shape.kind, inputs.x, job.tile
    if tile is None:
        return _library(job, inputs, weight)
    residual = inputs.residual if kind == "add" else None
    out_dtype = torch.float32 if kind == "head" else None
    if job.fused:
        return many.product(x, weight, tile, gated=True)
    if job.large:
        product = many.product if tile.mode == "" else few.product
        out = product(x, weight, tile, residual=residual, out_dtype=out_dtype)
        return silu_mul(out) if job.activated else out
    if kind in ("norm", "gated"):
        x = rms_norm(x, inputs.norm, _EPS)
    gated = kind == "gated"
    return few.product(x, weight, tile, residual=residual, gated=gated, out_dtype=out_dtype)


def _library(job: Job, inputs: Inputs, weight: Tensor) -> Tensor:
    """The same through cuBLAS, with what surrounds the product in kernels of its own."""
    kind, x = job.shape.kind, inputs.x
    if kind in ("norm", "gated") and not job.large:
        x = rms_norm(x, inputs.norm, _EPS)
    if job.shape.consumed:
        return inputs.given.addmm_(x, weight.t())
    if kind == "add":
        return torch.addmm(inputs.residual, x, weight.t())
    if kind == "head" and x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    out = F.linear(x, weight)
    return silu_mul(out) if kind == "gated" else out


def _sample(rows: int, device: str) -> Tensor:
    """Up to 256 rows from the first to the last."""
    return torch.linspace(0, rows - 1, min(rows, 256), device=device).round().long()


def _expected(job: Job, inputs: Inputs, weight: Tensor) -> Tensor:
    """Some rows of the result in float32, rounded to the rows' type where it is."""
    some = _sample(job.rows, inputs.x.device.type)
    dtype = inputs.x.dtype
    x = inputs.x[some]
    if job.shape.kind in ("norm", "gated") and not job.large:
        x = rms_norm(x, inputs.norm, _EPS)
    out = x.float() @ weight.float().T
    if job.shape.kind == "gated":
        out = out.to(dtype).float()
        return F.silu(out[:, 0::2]).to(dtype).float() * out[:, 1::2]
    return out + inputs.residual[some].float() if job.shape.kind == "add" else out


def _close(out: Tensor, expected: Tensor) -> bool:
    """Within rounding of the inputs' type and the order of sums."""
    found = out[_sample(out.shape[0], out.device.type)].float()
    bound = 1e-4 if out.dtype == torch.float32 and not out.is_cuda else 4e-2
    return bool(((found - expected).abs() <= bound * (1 + expected.abs())).all())


# -- compiling ahead ----------------------------------------------------------------------------


def _compile(job: Job) -> str | None:
    """Run a job once in a process of its own, for the kernel it leaves in the cache on disk."""
    try:
        shape = job.shape
        # The weight's contents do not matter here.
        weight = torch.empty(shape.columns, shape.depth, dtype=torch.bfloat16, device="cuda")
        run_job(job, Inputs(dataclasses.replace(shape, copies=1), 16, "cuda"), weight)
        torch.cuda.synchronize()
    except Exception as error:  # any variant may be refused; the sweep goes on without it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None


def compile_ahead(jobs: Iterable[Job], deadline: float) -> set[tuple[object, ...]]:
    """Compile every distinct kernel in parallel; returns the keys of those that fail."""
    distinct = {_kernel_key(job): job for job in jobs if job.tile is not None}
    failed: set[tuple[object, ...]] = set()
    workers = max(1, min(12, (os.cpu_count() or 2) - 2, len(distinct)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        pending = {key: pool.submit(_compile, job) for key, job in distinct.items()}
        for key, future in pending.items():
            try:
                error = future.result(timeout=max(0.0, deadline - time.monotonic()))
            except Exception as broken:
                error = f"{type(broken).__name__}: {broken}"
            if error is not None:
                print(f"not usable: {distinct[key].shape.kind} {distinct[key].label}: {error}")
                failed.add(key)
        pool.shutdown(wait=False, cancel_futures=True)
    return failed


def _kernel_key(job: Job) -> tuple[object, ...]:
    """What a kernel is compiled for."""
    kind = job.shape.kind
    return (job.tile, kind if kind in ("gated", "add", "head") else "", job.large)


# -- running and reporting ----------------------------------------------------------------------


def measure(
    jobs: list[Job], device: str, failed: set[tuple[object, ...]], deadline: float
) -> list[Result]:
    """Time the jobs until the deadline; what fails is named and left out."""
    weights: dict[str, list[Tensor]] = {}
    results: list[Result] = []
    begun = 0
    for (shape, _), group in itertools.groupby(jobs, lambda job: (job.shape, job.rows)):
        if time.monotonic() > deadline:
            print(f"out of time: {len(jobs) - begun} of {len(jobs)} variants were not measured")
            break
        mine = list(group)
        begun += len(mine)
        if shape.name not in weights:
            weights[shape.name] = random_weights(shape, device)
        usable = [job for job in mine if job.tile is None or _kernel_key(job) not in failed]
        results += _measure_one(usable, weights[shape.name], device, deadline)
    return results


def _measure_one(
    jobs: list[Job], weights: list[Tensor], device: str, deadline: float
) -> list[Result]:
    """The variants of one shape and row count, which take turns."""
    if not jobs:
        return []
    shape, rows, large = jobs[0].shape, jobs[0].rows, jobs[0].large
    inputs = Inputs(shape, rows, device)
    if large:
        weights = weights[: 4 if rows > 2048 else 10]
    expected = _expected(jobs[0], inputs, weights[0])
    ready: list[tuple[Job, bool, Callable[[], object]]] = []
    for job in jobs:

        def work(job: Job = job) -> None:
            for weight in weights:
                run_job(job, inputs, weight)

        try:
            right = _close(run_job(job, inputs, weights[0]), expected)
            ready.append((job, right, captured(work, device)))
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            print(f"not measured: {shape.name} {rows} {job.label}: {type(error).__name__}: {text}")
    turns = take_turns([run for _, _, run in ready], device, deadline)
    return [
        Result(job, statistics.median(times) / len(weights), right, max(times) / min(times))
        for (job, right, _), times in zip(ready, turns, strict=True)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write what the flags ask for."""
    parser = argparse.ArgumentParser(description="Tiles of the matrix products, timed.")
    parser.add_argument("--part", choices=tuple(_USUAL_ROWS), default="decode")
    parser.add_argument("--shapes", nargs="*", default=[], help="some of the shapes, by name")
    parser.add_argument("--rows", nargs="*", type=int, default=[])
    parser.add_argument("--budget-s", type=float, default=85.0, help="start nothing after this")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--library", help="of --part library: cublas or cublaslt")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.budget_s
    device = "cpu" if given.cpu_check else "cuda"
    shapes = TOYS if given.cpu_check else SHAPES
    shapes = tuple(s for s in shapes if not given.shapes or s.name in given.shapes)
    if given.part == "decode" and max(given.rows, default=0) > INVARIANT_ROWS:
        parser.error(f"--part decode takes at most {INVARIANT_ROWS} rows; use --part large")
    rows = given.rows or _USUAL_ROWS[given.part]
    if given.part == "library":
        found = library_report(shapes, rows, device, deadline, given.library)
    else:
        jobs = jobs_of(given.part, shapes, rows, given.cpu_check)
        failed = set() if given.cpu_check else compile_ahead(jobs, deadline)
        print(f"{len(jobs)} variants; {deadline - time.monotonic():.0f} s left after compiling")
        results = measure(jobs, device, failed, deadline)
        report(results)
        few_rows = [r for r in results if not r.job.large]
        many_rows = [r for r in results if r.job.large]
        text = [table(few_rows)] if few_rows else []
        text += [large_table(many_rows)] if many_rows else []
        found = {
            "part": given.part,
            "results": [r.as_json() for r in results],
            "table": "\n".join(text),
        }
        print("\n" + (summary(results) if given.part == "decode" else large_summary(results)))
        print(f"\n{found['table']}")
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
