"""The engine's parts driven step by step in this thread, with the pool checked at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dflash_serve.config import EngineConfig
from dflash_serve.engine.loop import limits_of
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.engine.pair import load_pair
from dflash_serve.engine.rank import set_threads
from dflash_serve.engine.runner import Runner
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.scheduler import Scheduler

__all__ = ["Direct"]


class Direct:
    """Scheduler and runner of one rank without the loop around them."""

    def __init__(self, config: EngineConfig) -> None:
        set_threads(config)
        self.pair = load_pair(config, Single())
        self.runner = Runner(self.pair, config)
        self.scheduler = Scheduler(limits_of(config, self.runner))

    def step(self) -> list[TokenEvent]:
        """One plan from start to end."""
        plan = self.scheduler.plan()
        self.scheduler.commit(plan, self.runner.execute(plan))
        self.scheduler.pool.check()
        return self.scheduler.take_events()

    def run(self, submits: Sequence[Submit]) -> dict[str, list[TokenEvent]]:
        """All requests to their end; every page and slot must have come back."""
        events: dict[str, list[TokenEvent]] = {s.request_id: [] for s in submits}
        for submit in submits:
            self.scheduler.submit(submit)
        while not self.scheduler.idle:
            for event in self.step():
                events[event.request_id].append(event)
        assert self.scheduler.pool.used == 0
        return events

    def page_digests(self, pages: Sequence[int]) -> list[str]:
        """One digest per page over all layers of target and draft."""
        assert self.pair.draft_kv is not None
        parts = [
            part
            for kv in (self.pair.target_kv, self.pair.draft_kv)
            for layer in kv.layers
            for part in layer
        ]
        return [
            hashlib.sha256(b"".join(p[page].numpy().tobytes() for p in parts)).hexdigest()
            for page in pages
        ]
