"""A scheduler with a runner that needs no model: tokens are a function of request and position."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.limits import Limits
from dflash_serve.scheduler.plan import DecodeResult, StepPlan, StepResult
from dflash_serve.scheduler.scheduler import Scheduler

__all__ = ["Bench", "submit", "token_at"]

VOCAB = 1000


def token_at(seed: int, position: int) -> int:
    """The target's token of a request (told by its seed) at a position."""
    return 2 + (seed * 7919 + position * 104729) % (VOCAB - 2)


def submit(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    emitted: list[int] | None = None,
    salt: str = "",
    **params: object,
) -> Submit:
    """A request."""
    fields = {"temperature": 0.0} | params
    return Submit(
        request_id=name,
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=seed, **fields),  # type: ignore[arg-type]
        emitted_ids=emitted or [],
        cache_salt=salt,
    )


@dataclasses.dataclass
class Slot:
    """What the fake device knows of a slot."""

    seed: int
    start: int
    anchor: int
    pages: list[int]


class Bench:
    """Scheduler and fake runner, one step at a time; checks every plan as it goes.

    Args:
        accept: drafts accepted in a block, from (seed, committed length).
        lag: plans made before the oldest is committed; None takes `default_lag`.
    """

    default_lag = 0

    def __init__(
        self,
        accept: Callable[[int, int], int] | None = None,
        *,
        lag: int | None = None,
        **limits: object,
    ) -> None:
        sizes: dict[str, object] = {
            "max_running": 4,
            "max_model_len": 64,
            "page_size": 4,
            "num_pages": 80,
            "prefill_chunk": 16,
            "verify_rows": 4,
            "vocab_size": VOCAB,
            "eos": frozenset({1}),
        }
        self.limits = Limits(**(sizes | limits))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.limits)
        self.accept = accept if accept is not None else lambda seed, start: self.rows - 1
        self.rows = self.limits.verify_rows
        self.slots: dict[int, Slot] = {}
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self.override: dict[tuple[int, int], int] = {}
        self.lag = self.default_lag if lag is None else lag
        self.pending: deque[tuple[StepPlan, StepResult]] = deque()

    def step(self) -> StepPlan:
        """Plan, check, execute; commit what is old enough."""
        plan = self.scheduler.plan()
        self.plans.append(plan)
        if not plan.empty:
            self._apply(plan)
            self.pending.append((plan, self._execute(plan)))
        while len(self.pending) > (0 if plan.empty else self.lag):
            self.scheduler.commit(*self.pending.popleft())
        self.scheduler.pool.check()
        self.events += self.scheduler.take_events()
        return plan

    def run(self, limit: int = 500) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if self.scheduler.idle and not self.pending:
                break
            self.step()
        self.events += self.scheduler.take_events()
        assert self.scheduler.idle, f"still busy after {limit} steps"

    def ids(self, name: str) -> list[int]:
        """Output so far of a request."""
        return [t for e in self.events if e.request_id == name for t in e.token_ids]

    def ends(self, name: str) -> list[str]:
        """Finish reasons a request got; exactly one when all is well."""
        events = [e for e in self.events if e.request_id == name]
        return [e.finish_reason for e in events if e.finish_reason is not None]

    def token(self, seed: int, position: int) -> int:
        return self.override.get((seed, position), token_at(seed, position))

    def _apply(self, plan: StepPlan) -> None:
        for setup in plan.setups:
            assert 0 <= setup.slot < self.limits.max_running
            self.slots[setup.slot] = Slot(setup.seed, setup.start, setup.anchor, [])
        for slot, first, pages in plan.pages:
            assert len(self.slots[slot].pages) == first
            self.slots[slot].pages += pages
        for slot in [c.slot for c in plan.prefill] + plan.decode:
            assert 0 not in self.slots[slot].pages
        assert len(set(plan.decode)) == len(plan.decode)
        assert sum(len(c.token_ids) for c in plan.prefill) <= self.limits.prefill_chunk

    def _execute(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        for chunk in plan.prefill:
            slot = self.slots[chunk.slot]
            assert chunk.start == slot.start, "a chunk does not begin where the last one ended"
            slot.start += len(chunk.token_ids)
            assert slot.start <= len(slot.pages) * self.limits.page_size
            sampled = self.token(slot.seed, slot.start) if chunk.sample else None
            slot.anchor = slot.anchor if sampled is None else sampled
            result.sampled.append(sampled)
        for index in plan.decode:
            result.decoded.append(self._decode(self.slots[index], plan))
        return result

    def _decode(self, slot: Slot, plan: StepPlan) -> DecodeResult:
        # A request that ended unknown to the host runs one step more, maybe past its pages.
        reserved = min(slot.start + plan.rows, self.limits.max_model_len + self.rows)
        assert reserved <= len(slot.pages) * self.limits.page_size
        assert slot.start + plan.rows <= plan.longest
        assert slot.anchor == self.token(slot.seed, slot.start), "the anchor is not the last token"
        accepted = min(self.accept(slot.seed, slot.start), plan.rows - 1)
        picked = [self.token(slot.seed, slot.start + 1 + i) for i in range(plan.rows)]
        slot.start += accepted + 1
        slot.anchor = picked[accepted]
        return DecodeResult(picked=picked, accepted=accepted, fault=False)
