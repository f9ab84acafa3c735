"""What is added up of a request's time in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.engine.latency import Latencies
from dflash_serve.engine.messages import EngineStats, FinishReason, TokenEvent


def event(name: str, count: int, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=list(range(count)), finish_reason=reason)


def timed(*moments: float) -> tuple[Latencies, EngineStats]:
    times: Iterator[float] = iter(moments)
    stats = EngineStats()
    return Latencies(stats, lambda: next(times)), stats


def test_the_first_event_with_tokens_counts_once_and_the_end_once() -> None:
    latencies, stats = timed(1.0, 2.0, 3.0, 5.0)
    latencies.arrived("r")
    latencies.leaving([event("r", 0)])
    latencies.leaving([event("r", 2)])
    latencies.leaving([event("r", 1, "length")])
    assert (stats.first_token_seconds, stats.first_tokens) == (2.0, 1)
    assert (stats.request_seconds, stats.requests_timed) == (4.0, 1)


def test_an_aborted_request_leaves_nothing_behind_and_is_not_timed() -> None:
    latencies, stats = timed(1.0, 2.0, 3.0)
    latencies.arrived("r")
    latencies.leaving([event("r", 0, "abort")])
    latencies.leaving([event("r", 1, "stop"), event("never seen", 1)])
    assert stats == EngineStats()
    assert latencies._arrived == {}
    assert latencies._silent == set()


def test_a_repeated_id_does_not_move_the_arrival() -> None:
    latencies, stats = timed(1.0, 4.0)
    latencies.arrived("r")
    latencies.arrived("r")
    latencies.leaving([event("r", 1)])
    assert stats.first_token_seconds == 3.0
