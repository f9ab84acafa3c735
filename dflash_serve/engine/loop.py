"""Rank 0's loop: commands in, plan, execute, commit, report out. And a follower's."""

from __future__ import annotations

import hashlib
import time

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Abort, Command, Report, Shutdown, Submit
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.transport import Mailbox, PlanReceiver, Plans
from dflash_serve.model_config import read_config
from dflash_serve.scheduler.limits import Limits
from dflash_serve.scheduler.plan import StepPlan
from dflash_serve.scheduler.scheduler import Scheduler

__all__ = ["EngineLoop", "follow", "limits_of"]

_IDLE_WAIT_S = 0.5


class EngineLoop:
    """Drives one engine from rank 0.

    Args:
        scheduler: takes every decision.
        runner: rank 0's own part of the work.
        mailbox: the front end.
        plans: the followers.
        overlap: launch a step before reading the results of the one ahead of it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        mailbox: Mailbox,
        plans: Plans,
        *,
        overlap: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._plans = plans
        self._overlap = overlap
        self._pending: Pending | None = None
        self._stopping = False
        self._read = time.perf_counter()

    def run(self) -> None:
        """Serve until a Shutdown command; then stop the followers."""
        while not self._stopping:
            self.step()
        self._plans.send(StepPlan(step=-1, stop=True))

    def step(self) -> None:
        """One turn: everything that arrived, at most one plan, at most one report."""
        resting = self._scheduler.idle and self._pending is None
        commands = self._mailbox.receive(_IDLE_WAIT_S if resting else 0.0)
        for command in commands:
            self._obey(command)
        busy = self._overlapped_turn() if self._overlap else self._plain_turn()
        if commands or busy:
            self._mailbox.send(
                Report(events=self._scheduler.take_events(), stats=self._scheduler.snapshot())
            )

    def _plain_turn(self) -> bool:
        """Launch a step and wait for it; returns whether there was one."""
        pending = self._launch()
        if pending is not None:
            self._commit(pending)
        return pending is not None

    def _overlapped_turn(self) -> bool:
        """Launch the next step, then wait for the one before; returns whether there was one."""
        ahead, self._pending = self._pending, self._launch()
        if ahead is not None:
            self._commit(ahead)
        return ahead is not None

    def _launch(self) -> Pending | None:
        """Plan a step and start it everywhere."""
        plan = self._scheduler.plan()
        if plan.empty:
            return None
        if self._pending is None:
            self._read = time.perf_counter()
        self._plans.send(plan)
        return self._runner.launch(plan)

    def _commit(self, pending: Pending) -> None:
        """Wait for a step; it counts from the end of the step before, if there was one."""
        self._scheduler.commit(pending.plan, pending.result())
        now = time.perf_counter()
        stats, graphs = self._scheduler.stats, self._runner.graphs
        stats.step_seconds += now - self._read
        stats.eager_steps = self._runner.eager_steps
        if graphs is not None:
            stats.replayed_steps, stats.late_graphs = graphs.replays, graphs.late
        self._read = now

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._scheduler.submit(command)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case Shutdown():
                self._stopping = True


def follow(runner: Runner, plans: PlanReceiver) -> None:
    """Execute rank 0's plans until one says stop; results are rank 0's business."""
    ahead: Pending | None = None
    while not (plan := plans.receive()).stop:
        # Never more than a step ahead of the device: its buffers are used in turn.
        ahead, before = runner.launch(plan), ahead
        if before is not None:
            before.result()


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
