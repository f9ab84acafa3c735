"""Times of the small kernels of a decode step inside a CUDA graph.

    python -m dflash_serve.bench.small_kernels --output small_kernels.json
    python -m dflash_serve.bench.small_kernels --cpu-check      # toy sizes, no figures

Shapes are those of Qwen3-8B with a 5-layer draft. Each figure is the median of replays of one
graph that holds at least 200 launches, which go round the buffers of 36 layers. With few tokens
those buffers fit the L2 cache; so do they in a step, where the product before has just written
them, and there the microseconds count rather than the bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dflash_serve.kernels.accept import commit
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.block import gather_step
from dflash_serve.kernels.context_kv import store_context
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.qkv import rope_and_store
from dflash_serve.kernels.rope import rope_table
from dflash_serve.model_config import RopeConfig

__all__ = ["Sizes", "main"]

READ_CEILING = 4.2e12
"""Bytes/s that an H200 reads at best."""

LAUNCHES = 200
REPLAYS = 20
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes timed; the defaults are those of Qwen3-8B.

    Attributes:
        tokens: tokens of a call.
        page_table: pages of a slot's row, 40,960 tokens by default.
        rows: rows of a request; calls of fewer tokens have one request.
    """

    tokens: tuple[int, ...] = (1, 16, 128, 512, 2048)
    layers: int = 36
    draft_layers: int = 5
    hidden: int = 4096
    wide: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    page_table: int = 2560
    rows: int = 16


TOY = Sizes((1, 6), 2, 2, 32, 48, 4, 2, 16, 4, 10, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size; `calls` differ in their buffers alone."""

    name: str
    tokens: int
    bytes: int
    calls: Sequence[Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a launch, and bytes it must move; `error` where it could not be timed."""

    kernel: str
    tokens: int
    us: float | None
    bytes: int
    terabytes_per_second: float | None
    share_of_ceiling: float | None
    error: str | None = None


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel at every number of tokens, one at a time so that its buffers can go."""
    rope = rope_table(
        RopeConfig(theta=1e6), sizes.head_dim, sizes.page_table * sizes.page_size, device
    )
    for tokens in sizes.tokens:
        yield _rope(sizes, tokens, rope, dtype)
        yield _norm(sizes, tokens, device, dtype)
        yield _gated(sizes, tokens, device, dtype)
        yield _context(sizes, tokens, rope, dtype)
        yield from _tables(sizes, tokens, device)


def _rope(sizes: Sizes, tokens: int, rope: Tensor, dtype: torch.dtype) -> Case:
    device, width = rope.device, sizes.head_dim
    columns = (sizes.heads + 2 * sizes.kv_heads) * width
    pages = 1 + -(-tokens // sizes.page_size)
    shape = (sizes.layers, pages, sizes.page_size, sizes.kv_heads, width)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    qkv = torch.randn((sizes.layers, tokens, columns), dtype=dtype, device=device)
    norms = torch.ones((2, sizes.layers, width), dtype=dtype, device=device)
    positions, slots = _places(tokens, rope.shape[0], sizes.page_size, device)

    def call(layer: int) -> object:
        return rope_and_store(
            qkv[layer],
            norms[0, layer],
            norms[1, layer],
            EPS,
            rope,
            positions,
            slots,
            (keys[layer], values[layer]),
            sizes.heads,
        )

    moved = 2 * qkv[0].nbytes + tokens * width * 4
    return Case("rope_and_store", tokens, moved, _each(call, sizes.layers))


def _norm(sizes: Sizes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    x = torch.randn((sizes.layers, tokens, sizes.hidden), dtype=dtype, device=device)
    weight = torch.ones((sizes.layers, sizes.hidden), dtype=dtype, device=device)
    moved = 2 * x[0].nbytes + weight[0].nbytes
    return Case(
        "rms_norm", tokens, moved, _each(lambda i: rms_norm(x[i], weight[i], EPS), sizes.layers)
    )


def _gated(sizes: Sizes, tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    x = torch.randn((sizes.layers, tokens, 2 * sizes.wide), dtype=dtype, device=device)
    calls = _each(lambda i: silu_mul(x[i]), sizes.layers)
    return Case("silu_mul", tokens, x[0].nbytes * 3 // 2, calls)


def _context(sizes: Sizes, tokens: int, rope: Tensor, dtype: torch.dtype) -> Case:
    device, copies = rope.device, 8
    layers, heads, width = sizes.draft_layers, sizes.kv_heads, sizes.head_dim
    kv = torch.randn((copies, tokens, layers * 2 * heads * width), dtype=dtype, device=device)
    pages = 1 + -(-tokens // sizes.page_size)
    shape = (copies, layers, 2, pages, sizes.page_size, heads, width)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    norms = torch.ones((layers, width), dtype=dtype, device=device)
    positions, slots = _places(tokens, rope.shape[0], sizes.page_size, device)

    def call(copy: int) -> None:
        store_context(kv[copy], norms, EPS, rope, positions, slots, pool[copy])

    moved = 2 * kv[0].nbytes + tokens * width * 4
    return Case("store_context", tokens, moved, _each(call, copies))


def _tables(sizes: Sizes, tokens: int, device: torch.device) -> Iterator[Case]:
    """Kernels that know requests rather than tokens."""
    rows = min(sizes.rows, tokens)
    batch, pages, page = tokens // rows, sizes.page_table, sizes.page_size
    state = torch.ones((batch + 1, 8), dtype=torch.int64, device=device)
    table = torch.ones((batch + 1, pages), dtype=torch.int64, device=device)
    slots = torch.arange(batch, device=device)
    moved = 8 * (2 * batch * pages + 2 * batch * rows)
    step = _each(lambda _: gather_step(state, table, slots, rows, page, 7), 1)
    yield Case("gather_step", tokens, moved + 8 * batch * (rows + 16), step)

    picked = torch.ones((batch, rows), dtype=torch.int64, device=device)
    drafted = torch.zeros((batch, rows - 1), dtype=torch.int64, device=device)
    faults = torch.zeros((batch, rows), dtype=torch.bool, device=device)
    places = torch.ones(batch * rows, dtype=torch.int64, device=device)
    moved = 8 * batch * (4 * rows + 6)
    for name, synthetic in (("commit", None), ("commit synthetic", 0.7)):
        call = _commit(drafted, picked, faults, slots, places, state, synthetic)
        yield Case(name, tokens, moved, [call])


def _commit(
    drafted: Tensor,
    picked: Tensor,
    faults: Tensor,
    slots: Tensor,
    places: Tensor,
    state: Tensor,
    synthetic: float | None,
) -> Callable[[], object]:
    return lambda: commit(
        drafted, picked, faults, slots, places, state[:, 0], state[:, 1], synthetic=synthetic
    )


def _places(tokens: int, length: int, page: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions 0… and slots in order behind the dummy page."""
    index = torch.arange(tokens, device=device)
    return index % length, index + page


def _each(call: Callable[[int], object], count: int) -> list[Callable[[], object]]:
    def bound(index: int) -> Callable[[], object]:
        return lambda: call(index)

    return [bound(index) for index in range(count)]


def time_case(case: Case) -> Timing:
    """Median over replays of one graph, divided by its launches."""
    rounds = -(-LAUNCHES // len(case.calls))
    for call in case.calls:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in case.calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    milliseconds = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        milliseconds.append(began.elapsed_time(ended))
    seconds = statistics.median(milliseconds) / 1e3 / (rounds * len(case.calls))
    rate = case.bytes / seconds
    return Timing(
        case.name, case.tokens, seconds * 1e6, case.bytes, rate / 1e12, rate / READ_CEILING
    )


def _timed(case: Case) -> Timing:
    """The timing, or the error of a kernel that failed: the others still run."""
    try:
        return time_case(case)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return Timing(case.name, case.tokens, None, case.bytes, None, None, line)


def _check() -> None:
    """Run every case once in Triton's interpreter, at toy size."""
    os.environ["TRITON_INTERPRET"] = "1"
    with interpreted():
        for case in cases(TOY, torch.device("cpu"), torch.float32):
            for call in case.calls:
                call()


def _report(timings: Sequence[Timing], console: Console) -> None:
    table = Table(title="small kernels, in a CUDA graph", title_justify="left")
    table.add_column("kernel")
    for name in ("tokens", "µs", "MB", "TB/s", "of 4.2"):
        table.add_column(name, justify="right")
    for timing in timings:
        if timing.us is None:
            table.add_row(timing.kernel, str(timing.tokens), timing.error)
            continue
        table.add_row(
            timing.kernel,
            str(timing.tokens),
            f"{timing.us:.2f}",
            f"{timing.bytes / 1e6:.2f}",
            f"{timing.terabytes_per_second:.2f}",
            f"{timing.share_of_ceiling:.0%}",
        )
    console.print(table)


def main() -> None:
    """Parse arguments, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--cpu-check", action="store_true", help="run once at toy size, untimed")
    options = parser.parse_args()
    console = Console()
    if options.cpu_check:
        _check()
        console.print("every kernel ran")
        return
    timings = [_timed(case) for case in cases(Sizes(), torch.device("cuda"), torch.bfloat16)]
    _report(timings, console)
    if options.output is not None:
        options.output.write_text(json.dumps([dataclasses.asdict(t) for t in timings], indent=1))


if __name__ == "__main__":
    main()
