"""How long requests spend in the engine, apart from what is around it (no torch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dflash_serve.engine.messages import EngineStats, TokenEvent

__all__ = ["Latencies"]


class Latencies:
    """Adds up, in rank 0, the time from a request's arrival to its first token and to its end.

    Args:
        stats: where the sums go.
        clock: seconds, monotonic.
    """

    def __init__(self, stats: EngineStats, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stats = stats
        self._clock = clock
        self._arrived: dict[str, float] = {}
        self._silent: set[str] = set()

    def arrived(self, request_id: str) -> None:
        """A request came in, now."""
        if request_id not in self._arrived:  # otherwise it is refused, and the first one goes on
            self._arrived[request_id] = self._clock()
            self._silent.add(request_id)

    def leaving(self, events: Iterable[TokenEvent]) -> None:
        """Events are on their way to the front end, now."""
        now = self._clock()
        for event in events:
            arrived = self._arrived.get(event.request_id)
            if arrived is None:
                continue
            if event.token_ids and event.request_id in self._silent:
                self._silent.discard(event.request_id)
                self._stats.first_token_seconds += now - arrived
                self._stats.first_tokens += 1
            if event.finish_reason is not None:
                del self._arrived[event.request_id]
                self._silent.discard(event.request_id)
                if event.finish_reason in ("stop", "length"):
                    self._stats.request_seconds += now - arrived
                    self._stats.requests_timed += 1
