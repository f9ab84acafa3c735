"""What each layer around the engine costs, from the bare engine to HTTP through Serve.

    python -m dflash_serve.bench.overhead --output overhead.json

The same requests run on the engine in this process (`inproc`), on a child process (`mp`), on rank
actors driven directly (`ray`), and over HTTP through Serve's Python proxy (`serve`) and through
HAProxy (`haproxy`). `python -m tests.bench.bench_overhead` does it with a tiny random pair.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.table import Table

from dflash_serve.bench.demo import DEMO_DRAFT, DEMO_TARGET
from dflash_serve.bench.engines import random_prompts, requests
from dflash_serve.bench.event_client import Stream, stream_all
from dflash_serve.bench.machine import describe_machine
from dflash_serve.bench.server import counter, local_server
from dflash_serve.config import EngineConfig
from dflash_serve.cores import usable_cores
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.engine.messages import TokenEvent

__all__ = ["LAYERS", "Counters", "Load", "Row", "main", "measure", "summarise", "table"]

LAYERS = ("inproc", "mp", "ray", "serve", "haproxy")
_PROMPT_TOKENS = (16, 16)
_EXPORTED = (
    "steps",
    "step_seconds",
    "step_gap_seconds",
    "engine_first_token_seconds",
    "engine_first_tokens",
)
"""`Counters` as /metrics names them."""
_MOST_IDS = 256
"""Prompts hold ids below this, which every vocabulary has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests with a fixed number of them running at a time.

    Attributes:
        concurrency: streams at a time.
        rounds: requests of each stream, one after another.
        max_tokens: output of a request; it ends there and nowhere else.
    """

    concurrency: int
    rounds: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One layer under one load.

    Attributes:
        tokens_per_second: of all streams together, from the first request to the last event.
        event_ms_p50, event_ms_p99: between two events of a stream, as the client gets them.
        first_ms_p50, first_ms: from a request to its first event, median and mean.
        engine_first_ms: mean of the part of it that is spent in the engine.
        step_ms: mean time of an engine step.
        gap_ms: mean time from the end of a step to the launch of the next.
    """

    layer: str
    concurrency: int
    tokens: int
    seconds: float
    tokens_per_second: float
    event_ms_p50: float
    event_ms_p99: float
    first_ms_p50: float
    first_ms: float
    engine_first_ms: float
    step_ms: float
    gap_ms: float


class Counters(NamedTuple):
    """What an engine counts; see `EngineStats`."""

    steps: float
    step_seconds: float
    gap_seconds: float
    first_token_seconds: float
    first_tokens: float


class _Target(Protocol):
    """What requests can be run on."""

    def run(self, load: Load, seed: int) -> list[Stream]:
        """Run a load; returns when its events came."""

    def counters(self) -> Counters:
        """The engine's counters so far."""


class _Engine:
    """An engine without Serve; its client is a thread of this process."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def run(self, load: Load, seed: int) -> list[Stream]:
        streams: list[Stream] = []
        for number in range(load.rounds):
            name = f"{seed}-{number}"
            prompts = random_prompts(load.concurrency, _PROMPT_TOKENS, _MOST_IDS, seed + number)
            submits = requests(name, prompts, load.max_tokens, 0.0)
            sent = time.perf_counter()
            found = {submit.request_id: Stream(sent) for submit in submits}

            def note(event: TokenEvent, found: dict[str, Stream] = found) -> None:
                if event.token_ids:
                    moment = (time.perf_counter(), len(event.token_ids))
                    found[event.request_id].events.append(moment)

            self._engine.collect(submits, note)
            streams += found.values()
        return streams

    def counters(self) -> Counters:
        return Counters(*(getattr(self._engine.stats, name) for name in Counters._fields))


class _Server:
    """A server that runs, over HTTP."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model

    def run(self, load: Load, seed: int) -> list[Stream]:
        streams: list[Stream] = []
        for number in range(load.rounds):
            prompts = random_prompts(load.concurrency, _PROMPT_TOKENS, _MOST_IDS, seed + number)
            bodies = [self._body(prompt, load.max_tokens) for prompt in prompts]
            streams += stream_all(self._url, bodies, load.concurrency)
        return streams

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def counters(self) -> Counters:
        return Counters(*(counter(self._url, f"dflash_{name}_total") for name in _EXPORTED))


def measure(layer: str, target: _Target, load: Load) -> Row:
    """Run a load twice, the first time to warm up."""
    target.run(dataclasses.replace(load, rounds=1), seed=1_000_000)
    before = target.counters()
    streams = target.run(load, seed=load.concurrency)
    counted = Counters(*(b - a for a, b in zip(before, target.counters(), strict=True)))
    return summarise(layer, load, streams, counted)


def summarise(layer: str, load: Load, streams: Sequence[Stream], counted: Counters) -> Row:
    """The figures of a run.

    Args:
        streams: each with at least one event.
        counted: by the engine during the run.
    """
    firsts = [1000 * (s.events[0][0] - s.sent) for s in streams]
    steps = max(counted.steps, 1)
    tokens = sum(count for stream in streams for _, count in stream.events)
    seconds = max(s.events[-1][0] for s in streams) - min(s.sent for s in streams)
    gaps = sorted(
        1000 * (b[0] - a[0])
        for stream in streams
        for a, b in zip(stream.events, stream.events[1:], strict=False)
    ) or [0.0]
    return Row(
        layer=layer,
        concurrency=load.concurrency,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        event_ms_p50=statistics.median(gaps),
        event_ms_p99=gaps[int(0.99 * (len(gaps) - 1))],
        first_ms_p50=statistics.median(firsts),
        first_ms=statistics.mean(firsts),
        engine_first_ms=1000 * counted.first_token_seconds / max(counted.first_tokens, 1),
        step_ms=1000 * counted.step_seconds / steps,
        gap_ms=1000 * counted.gap_seconds / steps,
    )


def table(rows: Sequence[Row]) -> Table:
    """The rows for a terminal."""
    made = Table(title="what each layer costs; times in ms")
    for head in (
        "layer",
        "streams",
        "tok/s",
        "event p50",
        "p99",
        "first",
        "of it engine",
        "step",
        "gap",
    ):
        made.add_column(head, justify="left" if head == "layer" else "right")
    for row in rows:
        times = (
            *(row.event_ms_p50, row.event_ms_p99, row.first_ms, row.engine_first_ms),
            *(row.step_ms, row.gap_ms),
        )
        made.add_row(
            row.layer,
            str(row.concurrency),
            f"{row.tokens_per_second:.1f}",
            *(f"{value:.2f}" for value in times),
        )
    return made


@contextlib.contextmanager
def _target(layer: str, config: EngineConfig, folder: Path) -> Iterator[_Target]:
    if layer in ("serve", "haproxy"):
        with local_server(config, folder, haproxy=layer == "haproxy") as (url, model):
            yield _Server(url, model)
        return
    config = dataclasses.replace(config, executor=layer)  # type: ignore[arg-type]
    if layer == "ray":
        from dflash_serve.serve.alone import gang_alone

        with gang_alone(config) as engine:
            yield _Engine(engine)
        return
    engine = start_engine(config)
    try:
        yield _Engine(engine)
    finally:
        engine.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default=str(DEMO_TARGET))
    parser.add_argument("--draft", default=str(DEMO_DRAFT))
    parser.add_argument("--layers", default=",".join(LAYERS), help="by commas")
    parser.add_argument("--concurrency", default="1,8,32", help="by commas")
    parser.add_argument("--ray-also", type=int, default=64, help="one more concurrency for `ray`")
    parser.add_argument("--tp", type=int, default=1, help="above 1 leaves `inproc` out")
    parser.add_argument("--verify-length", type=int)
    parser.add_argument("--rounds", type=int, default=4, help="requests of a stream")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends too
    counts = [int(n) for n in options.concurrency.split(",")]
    layers = [name for name in options.layers.split(",") if options.tp == 1 or name != "inproc"]
    if unknown := sorted(set(layers) - set(LAYERS)):
        parser.error(f"unknown layers {', '.join(unknown)}; there are {', '.join(LAYERS)}")
    config = EngineConfig(
        target=options.target,
        draft=options.draft,
        tensor_parallel_size=options.tp,
        executor="mp",
        device="cpu",
        dtype="float32",
        verify_length=options.verify_length,
        max_running=max(*counts, options.ray_also),
        max_model_len=max(128, options.max_tokens + 64),
        kv_cache_gib=1.0,
        prefix_cache=False,
    )
    console, rows = Console(width=None if sys.stdout.isatty() else 120), []
    with tempfile.TemporaryDirectory(prefix="dfo-") as folder:
        for layer in layers:
            with _target(layer, config, Path(folder)) as target:
                for count in [*counts, *([options.ray_also] if layer == "ray" else [])]:
                    load = Load(count, options.rounds, options.max_tokens)
                    rows.append(measure(layer, target, load))
                    console.print(dataclasses.asdict(rows[-1]))
    console.print(table(rows))
    if options.output is not None:
        report = {
            "machine": describe_machine(torch.device("cpu")) | {"cores": str(usable_cores())},
            "options": {k: str(v) for k, v in vars(options).items()},
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
