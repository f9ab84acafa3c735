"""How the library's products of many rows look in a captured graph: time, kernels, other nodes.

Some of its kernels bring memset nodes along, each with a gap before and after it. Which ones
depends on its workspace, hence on CUBLAS_WORKSPACE_CONFIG, which it reads once in a process.
"""

from __future__ import annotations

import collections
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dflash_serve.bench.product_jobs import Shape

__all__ = ["library_report"]

_SHAPES = ("gate_up", "down", "qkv", "o")
_WEIGHTS = 10
_REPLAYS = 12

_Form = Callable[[Tensor, Tensor, Tensor, Tensor], object]

# Of rows, weight, output and residual.
_FORMS: dict[str, _Form] = {
    "linear": lambda x, w, out, residual: F.linear(x, w),
    "mm out=": lambda x, w, out, residual: torch.mm(x, w.t(), out=out),
    "addmm, copied": lambda x, w, out, residual: torch.addmm(residual, x, w.t()),
    "addmm_ in place": lambda x, w, out, residual: residual.addmm_(x, w.t()),
}


def library_report(
    shapes: Iterable[Shape],
    counts: Iterable[int],
    device: str,
    deadline: float,
    library: str | None = None,
) -> dict[str, Any]:
    """Measure and print every form of every layer shape until the deadline.

    Args:
        shapes: only those of a layer are taken.
        counts: row counts.
        device: "cuda", or "cpu" for a check without figures of a graph.
        deadline: of `time.monotonic`; nothing is begun after it.
        library: "cublas", "cublaslt", or None for torch's choice.
    """
    if library is not None and device == "cuda":
        torch.backends.cuda.preferred_blas_library(library)
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    print(f"CUBLAS_WORKSPACE_CONFIG={config}, preferred library {library or 'by torch'}")
    print("us: a product in a graph of ten; busy: of that, kernels; memset, memcpy: nodes of ten")
    taken = {shape.name: shape for shape in shapes if shape.name in _SHAPES}
    if device == "cuda":  # the profiler's first window can come out empty
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
    lines: list[dict[str, Any]] = []
    for name in (name for name in _SHAPES if name in taken):
        weights = _weights(taken[name], device)
        for rows in counts:
            for form in _FORMS:
                if time.monotonic() > deadline:
                    print("out of time")
                    return {"part": "library", "config": config, "results": lines}
                line = _measured(form, taken[name], rows, weights)
                lines.append({"shape": name, "rows": rows, "form": form, **line})
                print(
                    f"{name:8} {rows:5} {form:16} {line['us']:8.1f} us, busy {line['busy_us']:8.1f}"
                    f" us, memset {line['memset']:2}, memcpy {line['memcpy']:2}  {line['kernels']}"
                )
    return {"part": "library", "config": config, "library": library, "results": lines}


def _weights(shape: Shape, device: str) -> list[Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        torch.randn(shape.columns, shape.depth, device=device, dtype=dtype) * shape.depth**-0.5
        for _ in range(min(_WEIGHTS, shape.copies))
    ]


def _measured(form: str, shape: Shape, rows: int, weights: list[Tensor]) -> dict[str, Any]:
    """Microseconds of a product, the part of them that kernels run, and the nodes of a graph."""
    like = weights[0]
    x = torch.randn(rows, shape.depth, device=like.device).to(like.dtype)
    out, residual = (
        torch.zeros(rows, shape.columns, device=like.device, dtype=like.dtype) for _ in range(2)
    )

    def work() -> None:
        for weight in weights:
            _FORMS[form](x, weight, out, residual)

    work()
    if not x.is_cuda:
        return {"us": 0.0, "busy_us": 0.0, "memset": 0, "memcpy": 0, "kernels": {}}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(_REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return {"us": statistics.median(times) * 1e3 / len(weights), **_nodes(graph, len(weights))}


def _nodes(graph: torch.cuda.CUDAGraph, products: int) -> dict[str, Any]:
    """What one replay runs, by the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    counts: collections.Counter[str] = collections.Counter()
    busy = 0.0
    for event in found.events() or []:
        if not str(event.device_type).endswith("CUDA"):
            continue
        counts[event.name] += 1
        busy += 0.0 if event.name.startswith("Mem") else event.device_time
    kernels = {name[:70]: n for name, n in counts.items() if not name.startswith("Mem")}
    return {
        "busy_us": busy / products,
        "memset": sum(n for name, n in counts.items() if name.startswith("Memset")),
        "memcpy": sum(n for name, n in counts.items() if name.startswith("Memcpy")),
        "kernels": kernels,
    }
