"""Rank 0's loop: commands in, plan, execute, commit, report out. And a follower's."""

from __future__ import annotations

import hashlib
import time

from dflash_serve.config import EngineConfig
from dflash_serve.engine.consensus import Ledger
from dflash_serve.engine.guard import Guard
from dflash_serve.engine.latency import Latencies
from dflash_serve.engine.lines import EchoSender, PlanReceiver
from dflash_serve.engine.messages import (
    Abort,
    Command,
    Report,
    Shutdown,
    Submit,
    TokenEvent,
    Trace,
    Tune,
)
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.transport import Mailbox, Plans
from dflash_serve.errors import ConsensusError
from dflash_serve.model_config import read_config
from dflash_serve.scheduler.limits import Limits
from dflash_serve.scheduler.plan import StepPlan, TraceOrder
from dflash_serve.scheduler.scheduler import Scheduler

__all__ = ["EngineLoop", "follow", "limits_of"]

_IDLE_WAIT_S = 0.5
_ECHO_WAIT_S = 0.05


class EngineLoop:
    """Drives one engine from rank 0.

    Args:
        scheduler: takes every decision.
        guard: rank 0's own part of the work.
        mailbox: the front end.
        plans: the followers.
        ledger: holds what they must agree on first.
        overlap: launch a step before reading the results of the one ahead of it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guard: Guard,
        mailbox: Mailbox,
        plans: Plans,
        ledger: Ledger,
        *,
        overlap: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._guard = guard
        self._mailbox = mailbox
        self._plans = plans
        self._ledger = ledger
        self._overlap = overlap
        self._pending: Pending | None = None
        self._trace: TraceOrder | None = None
        self._stopping = False
        self._read = time.perf_counter()
        self._settled: float | None = None
        self._latencies = Latencies(scheduler.stats)

    def run(self) -> None:
        """Serve until a Shutdown command; then stop the followers.

        Raises:
            ConsensusError: a follower committed other tokens than this rank.
        """
        while not self._stopping:
            self.step()
        self._plans.send(StepPlan(step=-1, stop=True))

    def step(self) -> None:
        """One turn: everything that arrived, at most one plan, at most one report."""
        idle = self._scheduler.idle and self._pending is None
        resting = idle and self._ledger.settled
        if resting:
            self._guard.pulse.rest()
            self._settled = None
        else:
            self._guard.pulse.work()
        commands = self._mailbox.receive(_IDLE_WAIT_S if resting else 0.0)
        for command in commands:
            self._obey(command)
        busy = self._overlapped_turn() if self._overlap else self._plain_turn()
        self._ledger.hold(self._scheduler.take_events())
        # Only when nothing else is to be done is a follower's answer worth waiting for.
        events = self._release(_ECHO_WAIT_S if idle and not commands else 0.0)
        traces = self._ledger.take_traces()
        self._latencies.leaving(events)
        if commands or busy or events or traces:
            stats = self._scheduler.snapshot()
            self._mailbox.send(Report(events=events, stats=stats, traces=traces))

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
            if self._pending is not None:
                self._plans.send(plan)  # so that followers read the step before, too
            return None
        if self._pending is None:
            self._read = time.perf_counter()
        plan.trace, self._trace = self._trace, None
        self._plans.send(plan)
        if self._settled is not None and self._pending is None:
            self._scheduler.stats.gap_seconds += time.perf_counter() - self._settled
        return self._guard.launch(plan)

    def _commit(self, pending: Pending) -> None:
        """Wait for a step; it counts from the end of the step before, if there was one."""
        result, echo = self._guard.settle(pending)
        self._settled = time.perf_counter()
        self._scheduler.commit(pending.plan, result)
        self._ledger.note(echo)
        now = time.perf_counter()
        runner = self._guard.runner
        stats, graphs = self._scheduler.stats, runner.graphs
        stats.step_seconds += now - self._read
        stats.eager_steps = runner.eager_steps
        if graphs is not None:
            stats.replayed_steps, stats.late_graphs = graphs.replays, graphs.late
        self._read = now

    def _release(self, timeout_s: float) -> list[TokenEvent]:
        """Events that every rank stands behind."""
        stats = self._scheduler.stats
        try:
            return self._ledger.release(timeout_s)
        except ConsensusError:
            stats.consensus_mismatches += 1
            self._mailbox.send(Report(stats=self._scheduler.snapshot()))
            raise
        finally:
            stats.consensus_steps = self._ledger.agreed

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._latencies.arrived(command.request_id)
                self._scheduler.submit(command)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case Trace(steps, folder):
                self._trace = TraceOrder(steps=steps, folder=folder) if steps else None
            case Tune(tuning):
                self._scheduler.tuning = self._scheduler.stats.tuning = tuning
            case Shutdown():
                self._stopping = True


def follow(guard: Guard, plans: PlanReceiver, echoes: EchoSender, *, overlap: bool) -> None:
    """Execute rank 0's plans until one says stop, and tell it what each step committed.

    Args:
        overlap: read a step's results only once the next plan is there, and under way.
    """
    ahead: Pending | None = None
    while True:
        if ahead is None:
            guard.pulse.rest()
        plan = plans.receive()
        if plan.stop:
            return
        launched = None if plan.empty else guard.launch(plan)
        due, ahead = (ahead, launched) if overlap else (launched, None)
        if due is not None:
            echoes.send(guard.settle(due)[1])


def limits_of(config: EngineConfig, runner: Runner) -> Limits:
    """The scheduler's sizes for a loaded pair."""
    settings = runner.pair.settings
    return Limits(
        max_running=config.max_running,
        max_model_len=settings.max_model_len,
        page_size=runner.pair.page_size,
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
