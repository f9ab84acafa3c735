"""Rank 0's loop: commands in, plan, execute, commit, report out. And a follower's."""

from __future__ import annotations

import hashlib
import time

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Abort, Command, Report, Shutdown, Submit
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.transport import Mailbox, PlanReceiver, Plans
from dflash_serve.model_config import read_config
from dflash_serve.scheduler.plan import StepPlan
from dflash_serve.scheduler.scheduler import Limits, Scheduler

__all__ = ["EngineLoop", "follow", "limits_of"]

_IDLE_WAIT_S = 0.5


class EngineLoop:
    """Drives one engine from rank 0.

    Args:
        scheduler: takes every decision.
        runner: rank 0's own part of the work.
        mailbox: the front end.
        plans: the followers.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, mailbox: Mailbox, plans: Plans
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._plans = plans
        self._stopping = False

    def run(self) -> None:
        """Serve until a Shutdown command; then stop the followers."""
        while not self._stopping:
            self.step()
        self._plans.send(StepPlan(step=-1, stop=True))

    def step(self) -> None:
        """One turn: everything that arrived, at most one plan, at most one report."""
        commands = self._mailbox.receive(_IDLE_WAIT_S if self._scheduler.idle else 0.0)
        for command in commands:
            self._obey(command)
        plan = self._scheduler.plan()
        if not plan.empty:
            began = time.perf_counter()
            self._plans.send(plan)
            self._scheduler.commit(plan, self._runner.execute(plan))
            self._scheduler.stats.step_seconds += time.perf_counter() - began
        if commands or not plan.empty:
            self._mailbox.send(
                Report(events=self._scheduler.take_events(), stats=self._scheduler.snapshot())
            )

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._scheduler.submit(command)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case Shutdown():
                self._stopping = True


def follow(runner: Runner, plans: PlanReceiver) -> None:
    """Execute rank 0's plans until one says stop."""
    while not (plan := plans.receive()).stop:
        runner.execute(plan)


def limits_of(config: EngineConfig, runner: Runner) -> Limits:
    """The scheduler's sizes for a loaded pair."""
    settings = runner.pair.settings
    return Limits(
        max_running=config.max_running,
        max_model_len=settings.max_model_len,
        page_size=config.page_size,
        num_pages=runner.pair.num_pages,
        prefill_chunk=config.prefill_chunk,
        verify_rows=settings.geometry.verify_rows,
        vocab_size=settings.target.vocab_size,
        eos=frozenset(settings.target.eos_token_ids),
        prefix_cache=config.prefix_cache,
        root=_pair_digest(config),
    )


def _pair_digest(config: EngineConfig) -> bytes:
    """The pair, as far as its configs tell; the index never outlives the engine's weights."""
    parts = [repr(read_config(config.target)), config.dtype]
    if config.draft is not None:
        parts.append(repr(read_config(config.draft)))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
