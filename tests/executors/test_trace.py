"""Traces of a live engine: one file a rank, of as many steps as were asked for."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.errors import EngineDeadError, RequestError
from tests.engines import ids_of, requests, run, start

PROMPTS = [[5, 6, 7, 8], [20] * 11]


def traced_beside_requests(engine: EngineClient, steps: int, folder: Path) -> list[str]:
    """Ask for a trace at the first token of a batch of requests; returns the paths."""
    found: list[list[str]] = []

    def trace() -> None:
        found.append(engine.trace(steps, str(folder)))

    thread = threading.Thread(target=trace)
    engine.collect(
        requests(PROMPTS, max_tokens=60), lambda _: None if thread.ident else thread.start()
    )
    thread.join()
    return found[0]


def events_of(path: str) -> list[dict[str, object]]:
    events: list[dict[str, object]] = json.loads(Path(path).read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_holds_the_operators_and_changes_no_token(
    overlap: bool, config: EngineConfig, tmp_path: Path
) -> None:
    expected = run(config, requests(PROMPTS, max_tokens=60)).ids
    engine = start(dataclasses.replace(config, overlap=overlap))
    try:
        sizes = []
        for steps in (2, 8):
            (path,) = traced_beside_requests(engine, steps, tmp_path / str(steps))
            assert path == str(tmp_path / str(steps) / "trace-rank0.json")
            products = [event for event in events_of(path) if event.get("name") == "aten::mm"]
            sizes.append(len(products))
        assert 2 * sizes[0] < sizes[1]
        outcome = engine.collect(requests(PROMPTS, max_tokens=60))
        assert [ids_of(outcome[name]) for name in ("r0", "r1")] == expected
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_every_rank_writes_its_own(two_ranks: EngineConfig, tmp_path: Path) -> None:
    engine = start(two_ranks)
    try:
        paths = traced_beside_requests(engine, 3, tmp_path)
        assert paths == [str(tmp_path / f"trace-rank{rank}.json") for rank in (0, 1)]
        assert all(events_of(path) for path in paths)
        assert len(ids_of(engine.collect(requests(PROMPTS[:1]))["r0"])) == 48
    finally:
        engine.shutdown()


def test_what_cannot_be_traced_is_refused_and_the_engine_lives(
    config: EngineConfig, tmp_path: Path
) -> None:
    engine = start(config)
    try:
        for steps in (0, 100_000):
            with pytest.raises(RequestError, match=f"steps is {steps}"):
                engine.trace(steps)
        with pytest.raises(RequestError, match="3 steps did not come in time"):
            engine.trace(3, str(tmp_path), timeout_s=0.1)
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(RequestError, match=r"rank 0: .*file"):
            raise_what_the_trace_raises(engine, file)
        assert len(ids_of(engine.collect(requests(PROMPTS[:1]))["r0"])) == 48
    finally:
        engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.trace(3)


def raise_what_the_trace_raises(engine: EngineClient, folder: Path) -> None:
    errors: list[RequestError] = []

    def trace() -> None:
        try:
            engine.trace(3, str(folder / "below"))
        except RequestError as error:
            errors.append(error)

    thread = threading.Thread(target=trace)
    engine.collect(
        requests(PROMPTS, max_tokens=60), lambda _: None if thread.ident else thread.start()
    )
    thread.join()
    raise errors[0]
