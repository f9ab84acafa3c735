"""Tokens per second with a fixed number of requests always running, DFlash against plain."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dflash_serve.bench.engines import random_prompts, requests, running, variant
from dflash_serve.bench.grid import fill_pages
from dflash_serve.bench.measure import StepTimer
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import EngineStats, Submit, TokenEvent
from dflash_serve.engine.rank import OnReady
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import ConfigError
from dflash_serve.scheduler.plan import PrefillChunk

__all__ = ["Window", "closed_loop", "fill_contexts", "speed"]


def speed(
    config: EngineConfig,
    modes: Sequence[str],
    *,
    batches: Sequence[int],
    context: int,
    max_tokens: int,
    rounds: int,
    repeats: int,
    temperature: float,
    progress: Callable[[str], None],
    filled: bool = False,
) -> dict[str, Any]:
    """Run the modes in turn, `repeats` times at every batch, and report medians.

    All engines stay loaded, so `kv_cache_gib` must leave room for them beside each other.

    Args:
        modes: verify lengths, see `engines.variant`.
        context: tokens of a prompt.
        rounds: requests after each other in one place of the batch.
        filled: prompts are not computed, see `fill_contexts`.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        timers = {mode: StepTimer() for mode in modes}
        engines = {
            mode: stack.enter_context(
                running(variant(config, mode), _prepared(timers[mode], filled=filled))
            )
            for mode in modes
        }
        for batch in batches:
            for mode in modes:  # warm up, and let a chosen verify length settle
                _run(engines[mode], timers[mode], batch, 1, context, max_tokens, temperature)
            runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
            for _ in range(repeats):
                for mode in modes:
                    runs[mode].append(
                        _run(
                            *(engines[mode], timers[mode], batch, rounds),
                            *(context, max_tokens, temperature),
                        )
                    )
            rows.extend(_rows(batch, runs))
            for row in rows[-len(modes) :]:
                progress(
                    "batch {batch}, {mode}: {tokens_per_second:.1f} tok/s, {tokens_per_step:.2f} "
                    "per step, step {step_ms_p50:.3f} ms, {vs_plain:.2f} x plain".format(**row)
                )
    return {"context": context, "max_tokens": max_tokens, "filled": filled, "rows": rows}


def _prepared(timer: StepTimer, *, filled: bool) -> OnReady:
    def prepare(runner: Runner) -> None:
        timer.install(runner)
        if filled:
            fill_contexts(runner)

    return prepare


def fill_contexts(runner: Runner) -> None:
    """Let prompts take no time: their pages hold random keys and values from the start.

    What the model says then means nothing, as with random weights, but a decode step does the work
    it always does. An `OnReady`.
    """
    fill_pages(runner.pair)

    @torch.inference_mode()
    def prefill(chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        state = runner.state
        slots = torch.tensor([chunk.slot for chunk in chunks], device=state.start.device)
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        state.start[slots] = torch.tensor(ends, device=slots.device, dtype=state.start.dtype)
        state.anchor[slots] = 0
        return torch.tensor(
            [[0 if chunk.sample else -1, 0] for chunk in chunks], device=slots.device
        )

    runner._prefill = prefill  # type: ignore[method-assign]


def _rows(batch: int, runs: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    medians = {
        mode: {
            name: statistics.median(run[name] for run in some)
            for name in ("tokens_per_second", "tokens_per_step", "step_ms_p50", "step_ms_p99")
        }
        for mode, some in runs.items()
    }
    plain = medians["plain"]["tokens_per_second"] if "plain" in medians else float("nan")
    for mode, figures in medians.items():
        ratio = figures["tokens_per_second"] / plain
        yield {"batch": batch, "mode": mode, **figures, "vs_plain": ratio, "runs": runs[mode]}


def _run(
    engine: EngineClient,
    timer: StepTimer,
    batch: int,
    rounds: int,
    context: int,
    max_tokens: int,
    temperature: float,
) -> dict[str, Any]:
    texts = random_prompts(rounds * batch, (context, context), engine.info.vocab_size)
    submits = requests("speed", texts, max_tokens, temperature)
    timer.milliseconds.clear()
    before = _lengths(engine.stats)
    window = asyncio.run(closed_loop(engine, submits, batch))
    if not window.tokens:
        raise ConfigError(
            f"{batch} requests of {max_tokens} tokens never ran at once: the first had ended when "
            "the last began; ask for more --max-tokens or --rounds"
        )
    steps = sorted(timer.milliseconds)
    after = _lengths(engine.stats)
    return {
        "tokens_per_second": window.tokens / window.seconds,
        "tokens_per_step": window.decoded / window.blocks,
        "step_ms_p50": steps[len(steps) // 2],
        "step_ms_p99": steps[int(0.99 * len(steps))],
        "seconds": window.seconds,
        "tokens": window.tokens,
        "blocks_by_length": {g: n - before.get(g, 0) for g, n in after.items()},
    }


def _lengths(stats: EngineStats) -> dict[int, int]:
    return {rows: length.drafts for rows, length in stats.by_length.items()}


async def closed_loop(engine: EngineClient, submits: Sequence[Submit], batch: int) -> Window:
    """Keep `batch` requests in flight until none is left."""
    window, todo = Window(batch, len(submits)), iter(submits)

    async def place() -> None:
        for submit in todo:
            async for event in engine.stream(submit):
                window.note(event)

    await asyncio.gather(*(place() for _ in range(batch)))
    return window


class Window:
    """Counts tokens while every place of the batch is taken.

    It opens when the first `batch` requests all have a token and closes when a request ends that
    none replaces. What prefills the replacements cost is inside.

    Attributes:
        tokens: ids emitted in the window.
        seconds: how long it was open.
        decoded, blocks: ids after each request's first, and the events that brought them, over
            the whole run.
    """

    def __init__(self, batch: int, total: int) -> None:
        self._batch = batch
        self._spare = total - batch
        self._seen: set[str] = set()
        self._began: float | None = None
        self._closed = False
        self.tokens = self.decoded = self.blocks = 0
        self.seconds = 0.0

    def note(self, event: TokenEvent) -> None:
        """Take one event into account."""
        now, count = time.perf_counter(), len(event.token_ids)
        if event.request_id in self._seen:
            self.decoded += count
            self.blocks += 1
        self._seen.add(event.request_id)
        if self._began is not None and not self._closed:
            self.tokens += count
            self.seconds = now - self._began
        if self._began is None and len(self._seen) >= self._batch:
            self._began = now
        if event.finish_reason is not None:
            self._closed |= self._spare <= 0
            self._spare -= 1
