"""`bench step`: decode speed by batch and verify length, beside plain decoding and transformers.

Plain decoding is the same engine started with no draft. Every line carries its share of the
roofline floor of this machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_serve.bench.machine import local_machine
from dflash_serve.bench.measure import (
    Measurement,
    StepTimer,
    greedy_requests,
    measure,
    start_timed,
)
from dflash_serve.bench.roofline import Machine, Workload, step_floor
from dflash_serve.config import EngineConfig
from dflash_serve.engine.checks import resolve_device
from dflash_serve.model_config import DraftConfig, TargetConfig

__all__ = ["StepRow", "bench_step", "step_table"]


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One line of the report; `rows` is None for plain decoding."""

    batch: int
    rows: int | None
    result: Measurement
    floor_ms: float

    @property
    def share(self) -> float:
        """Share of the physical limit reached by the median step."""
        return self.floor_ms / self.result.percentile(0.5)

    def as_json(self) -> dict[str, Any]:
        """Raw figures."""
        return {
            "batch": self.batch,
            "verify_length": self.rows,
            "step_ms_p50": self.result.percentile(0.5),
            "step_ms_p99": self.result.percentile(0.99),
            "floor_ms": self.floor_ms,
            "tokens_per_step": self.result.tokens_per_step,
            "tokens_per_second": self.result.tokens_per_second,
            "tokens": self.result.tokens,
        }


def bench_step(
    config: EngineConfig,
    prompts: Sequence[list[int]],
    batches: Sequence[int],
    lengths: Sequence[int],
    max_tokens: int,
    progress: Progress,
) -> list[StepRow]:
    """Measure plain decoding and every verify length at every batch size.

    Args:
        config: of the pair; its verify length is replaced by each of `lengths`.
    """
    device, dtype = resolve_device(config)
    # In a thread that ends: a pool of workers left behind would slow the engine's own.
    with ThreadPoolExecutor(max_workers=1) as pool:
        machine = pool.submit(local_machine, device, dtype).result()
    task = progress.add_task("bench step", total=(1 + len(lengths)) * len(batches))
    rows = []
    for length in (None, *lengths):
        variant = _variant(config, length)
        timer = StepTimer()
        engine = start_timed(variant, timer)
        try:
            measure(engine, timer, greedy_requests(prompts[:1], 8), 1)  # warm up
            for batch in batches:
                some = prompts if batch > 1 else prompts[: max(4, len(prompts) // 2)]
                result = measure(engine, timer, greedy_requests(some, max_tokens), batch)
                context = _mean_context(some, max_tokens)
                floor = _floor_ms(config, length, batch, context, machine)
                rows.append(StepRow(batch, length, result, floor))
                progress.advance(task)
        finally:
            engine.shutdown()
    return rows


def _variant(config: EngineConfig, length: int | None) -> EngineConfig:
    largest = max(config.max_running, 1)
    if length is None:
        return dataclasses.replace(
            config, draft=None, verify_length=None, block_size=None, max_running=largest
        )
    return dataclasses.replace(config, verify_length=length, max_running=largest)


def _mean_context(prompts: Sequence[list[int]], max_tokens: int) -> int:
    return sum(len(p) for p in prompts) // len(prompts) + max_tokens // 2


def _floor_ms(
    config: EngineConfig, length: int | None, batch: int, context: int, machine: Machine
) -> float:
    target = TargetConfig.load(config.target)
    draft = DraftConfig.load(config.draft) if config.draft and length is not None else None
    load = Workload(batch, context, length or 1, config.tensor_parallel_size)
    return step_floor(target, draft, load, machine).seconds * 1e3


def step_table(
    rows: Sequence[StepRow], console: Console, draft_quantization: str | None = None
) -> None:
    """Print the rows, plain decoding first in each batch, with ratios to it."""
    title = "decode, prefill left out"
    if draft_quantization is not None:
        title += f"; draft in {draft_quantization}"
    table = Table(title=title, title_justify="left")
    for name in ("batch", "g", "step ms p50", "p99", "floor ms", "share", "tokens/step", "tok/s"):
        table.add_column(name, justify="right")
    table.add_column("vs plain", justify="right")
    plain = {row.batch: row.result.tokens_per_second for row in rows if row.rows is None}
    for row in sorted(rows, key=lambda r: (r.batch, r.rows or 0)):
        table.add_row(
            str(row.batch),
            "plain" if row.rows is None else str(row.rows),
            f"{row.result.percentile(0.5):.1f}",
            f"{row.result.percentile(0.99):.1f}",
            f"{row.floor_ms:.1f}",
            f"{row.share:.0%}",
            f"{row.result.tokens_per_step:.2f}",
            f"{row.result.tokens_per_second:.1f}",
            f"{row.result.tokens_per_second / plain[row.batch]:.2f}",
        )
    console.print(table)


def transformers_rate(target: str, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Tokens/s of transformers' own greedy generate at batch 1, prefill left out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, local_files_only=True
    ).eval()
    tokens, seconds = 0, 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        spans = []
        for count in (1, max_tokens):
            began = time.perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
            )
            spans.append(time.perf_counter() - began)
        tokens += out.shape[1] - len(prompt) - 1
        seconds += spans[1] - spans[0]
    return tokens / seconds
