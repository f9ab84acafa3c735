"""`bench step` on random weights: step times over a grid of batches and contexts.

Requests are put into the device tables at the context asked for, without a prefill, and the steps
are driven as the engine's loop drives them: each launched before the one ahead of it is read.
Step time does not depend on what the weights say; tokens per second need an assumed number of
tokens per step and are marked as modelled.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dflash_serve.bench.dummy import resolve_dummy
from dflash_serve.bench.machine import describe_machine, local_machine
from dflash_serve.bench.roofline import Machine, Workload, geometric_rate, step_floor
from dflash_serve.config import EngineConfig
from dflash_serve.engine.checks import resolve_device, resolve_pair
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.rank import load_sized_pair
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import SlotSetup, StepPlan

__all__ = ["Cell", "GridBench", "bench_grid", "bench_presets", "fill_pages", "grid_table"]

_SECONDS = 1.0
_STEPS = (20, 200)


@dataclasses.dataclass(frozen=True)
class Cell:
    """Steps at one batch, context and verify length.

    Attributes:
        rows: g, or None for plain decoding.
        step_ms: times from one step's end to the next one's, ascending; empty where the pages do
            not fit.
        device_ms: median time of the step on the device alone, back to back.
        floor_ms: the machine's limit.
        needs_gib: memory the pages would need where they do not fit.
    """

    batch: int
    context: int
    rows: int | None
    step_ms: tuple[float, ...]
    device_ms: float
    floor_ms: float
    needs_gib: float | None = None

    def percentile(self, share: float) -> float:
        """Step time in milliseconds below which `share` of the steps lie."""
        return self.step_ms[min(len(self.step_ms) - 1, int(share * len(self.step_ms)))]

    def as_json(self) -> dict[str, Any]:
        """Raw figures."""
        figures = dataclasses.asdict(self)
        if self.step_ms:
            figures |= {"p50_ms": self.percentile(0.5), "p99_ms": self.percentile(0.99)}
        return figures


def bench_grid(
    config: EngineConfig,
    batches: Sequence[int],
    contexts: Sequence[int],
    lengths: Sequence[int],
    machine: Machine,
    progress: Callable[[str], None],
) -> list[Cell]:
    """Measure plain decoding and every verify length at every batch and context.

    Args:
        config: of the pair; `max_running` and `max_model_len` must hold the largest cell.
        progress: called with a line about what is measured.
    """
    cells = []
    plain = dataclasses.replace(config, draft=None, verify_length=None, block_size=None)
    for variant, widths in ((plain, (None,)), (config, tuple(lengths))):
        if variant.draft is None and variant is config:
            continue
        progress("loading " + ("plain decoding" if variant.draft is None else "the pair"))
        pair = load_sized_pair(variant, Single())
        bench = GridBench(pair, Runner(pair, variant), machine)
        for batch in batches:
            for context in contexts:
                for rows in widths:
                    cells.append(bench.cell(batch, context, rows))
                    progress(_line(cells[-1]))
        del pair, bench
        gc.collect()  # a runner and its graphs hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return cells


@torch.inference_mode()
def fill_pages(pair: Pair) -> None:
    """Keys and values of ordinary size, so that no kernel meets only zeros."""
    for kv in (pair.target_kv, pair.draft_kv):
        if kv is not None:
            for layer in kv.pool:
                layer.uniform_(-1.0, 1.0)


class GridBench:
    """One engine's runner, driven without a scheduler."""

    def __init__(self, pair: Pair, runner: Runner, machine: Machine) -> None:
        self._pair = pair
        self._runner = runner
        self._machine = machine
        fill_pages(pair)

    def cell(self, batch: int, context: int, rows: int | None) -> Cell:
        """Measure one cell, or say what it would need."""
        settings = self._pair.settings
        load = Workload(batch, context, rows or 1)
        draft = settings.draft if rows is not None else None
        floor = step_floor(settings.target, draft, load, self._machine).seconds * 1e3
        per_request = -(-(context + (_STEPS[1] + 8) * (rows or 1)) // self._pair.page_size)
        need = batch * per_request + 1
        if need > self._pair.num_pages:
            page = self._pair.kv_bytes / self._pair.num_pages
            return Cell(batch, context, rows, (), 0.0, floor, need * page / 2**30)
        self._set_up(batch, context, per_request)
        plan = StepPlan(
            step=0,
            decode=list(range(batch)),
            rows=rows or 1,
            longest=context + (_STEPS[1] + 8) * (rows or 1),
        )
        self._run(plan, 3)
        once = min(self._run(plan, 3))
        steps = min(max(int(_SECONDS * 1e3 / once), _STEPS[0]), _STEPS[1])
        times = tuple(sorted(self._run(plan, steps)))
        return Cell(batch, context, rows, times, self._device_ms(plan), floor)

    def _set_up(self, batch: int, context: int, per_request: int) -> None:
        pages = list(range(1, self._pair.num_pages))
        random.Random(0).shuffle(pages)
        setups = [
            SlotSetup(slot=i, start=context, anchor=1 + i, seed=i, temperature=0.0)
            for i in range(batch)
        ]
        tables = [(i, 0, pages[i * per_request : (i + 1) * per_request]) for i in range(batch)]
        with torch.inference_mode():
            self._runner.state.apply(StepPlan(step=0, setups=setups, pages=tables))

    def _run(self, plan: StepPlan, steps: int) -> list[float]:
        """Milliseconds from the end of each step to the end of the next."""
        ends = [time.perf_counter()]
        ahead: Pending | None = None
        for _ in range(steps + 1):
            ahead, before = self._runner.launch(plan), ahead
            if before is not None:
                before.result()
                ends.append(time.perf_counter())
        if ahead is not None:
            ahead.result()
        return [(b - a) * 1e3 for a, b in itertools.pairwise(ends)]

    def _device_ms(self, plan: StepPlan) -> float:
        """Median time of the captured step alone, back to back; 0 where nothing is captured."""
        graphs = self._runner.graphs
        if graphs is None:
            return 0.0
        key = graphs.key(len(plan.decode), plan.rows, truncates=False)
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(12)
        ]
        for mark in marks:
            graphs.replay(key)
            mark.record()
        torch.cuda.synchronize()
        spans = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        return float(spans[len(spans) // 2])


def bench_presets(
    target: str,
    draft: str | None,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    lengths: Sequence[int],
    accept: Sequence[float],
    options: dict[str, Any],
    console: Console,
    output: Path | None = None,
) -> None:
    """Measure presets of `bench.dummy`, print the table and write the raw figures.

    Args:
        options: further fields of EngineConfig.

    Raises:
        ConfigError: an unknown preset, or settings the engine refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        longest = max(contexts) + (_STEPS[1] + 8) * max(lengths)
        config = EngineConfig(
            target=str(resolve_dummy(target, folder)),
            draft=None if draft is None else str(resolve_dummy(draft, folder)),
            load_format="dummy",
            max_running=max(batches),
            max_model_len=longest,
            **options,
        )
        block = resolve_pair(config).geometry.block
        device, dtype = resolve_device(config)
        machine = local_machine(device, dtype)
        cells = bench_grid(config, batches, contexts, lengths, machine, console.print)
    grid_table(cells, accept, block, console, config.draft_quantization)
    if output is not None:
        figures: dict[str, Any] = {"target": target, "draft": draft, **describe_machine(device)}
        figures["draft_quantization"] = config.draft_quantization
        figures["cells"] = [cell.as_json() for cell in cells]
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _line(cell: Cell) -> str:
    g = "plain" if cell.rows is None else f"g {cell.rows}"
    where = f"batch {cell.batch}, context {cell.context}, {g}"
    if not cell.step_ms:
        return f"{where}: needs {cell.needs_gib:.0f} GB"
    return f"{where}: {cell.percentile(0.5):.3f} ms ({cell.floor_ms / cell.percentile(0.5):.0%})"


def modelled_tokens(tau: float, rows: int | None, block: int) -> float:
    """Tokens per step of g rows where a whole block brings `tau`, acceptance being geometric."""
    if rows is None:
        return 1.0
    rate = geometric_rate(tau, block)
    return sum(rate**i for i in range(rows))


def best_lengths(cells: Sequence[Cell], accept: Sequence[float], block: int) -> list[str]:
    """A line per batch, context and tokens per block: the best g, tokens/s, ratio to plain."""
    lines = []
    for where in sorted({(c.batch, c.context) for c in cells if c.step_ms}):
        here = [c for c in cells if (c.batch, c.context) == where and c.step_ms]
        plain = [c.batch / c.percentile(0.5) * 1e3 for c in here if c.rows is None]
        for tau in accept:
            rates = {
                c.rows: c.batch * modelled_tokens(tau, c.rows, block) / c.percentile(0.5) * 1e3
                for c in here
                if c.rows is not None
            }
            if plain and rates:
                best = max(rates, key=lambda rows: rates[rows])
                lines.append(
                    f"batch {where[0]}, context {where[1]}, {tau:g} tokens per block: g {best}, "
                    f"{rates[best]:,.0f} tok/s, {rates[best] / plain[0]:.2f} x plain "
                    f"({plain[0]:,.0f} tok/s)"
                )
    return lines


def grid_table(
    cells: Sequence[Cell],
    accept: Sequence[float],
    block: int,
    console: Console,
    draft_quantization: str | None = None,
) -> None:
    """Print the cells; tokens/s are modelled from `accept` tokens per whole block."""
    title = "decode steps on random weights"
    if draft_quantization is not None:
        title += f"; draft in {draft_quantization}"
    table = Table(title=title, title_justify="left")
    names = ("batch", "context", "g", "step ms p50", "p99", "device ms", "floor ms", "share")
    for name in (*names, *(f"tok/s at {a:g}*" for a in accept)):
        table.add_column(name, justify="right")
    for cell in sorted(cells, key=lambda c: (c.batch, c.context, c.rows or 0)):
        where = (str(cell.batch), str(cell.context), str(cell.rows or "plain"))
        if not cell.step_ms:
            table.add_row(*where, f"needs {cell.needs_gib:.0f} GB")
            continue
        p50 = cell.percentile(0.5)
        rates = [cell.batch * modelled_tokens(a, cell.rows, block) / p50 * 1e3 for a in accept]
        table.add_row(
            *where,
            f"{p50:.3f}",
            f"{cell.percentile(0.99):.3f}",
            f"{cell.device_ms:.3f}",
            f"{cell.floor_ms:.3f}",
            f"{cell.floor_ms / p50:.0%}",
            *(f"{rate:,.0f}" for rate in rates),
        )
    console.print(table)
    console.print(
        "* modelled: measured step time, geometric acceptance that brings the tokens stated per "
        "whole block (plain decoding: 1); the weights are random",
        style="dim",
    )
    for line in best_lengths(cells, accept, block):
        console.print(line, highlight=False)
