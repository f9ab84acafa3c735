"""The front end's view of a running engine: submit, stream, abort, health (no torch).

`EngineClient` owns one background thread that reads reports and hands every event to its
request's listener. `stream` is the asyncio face of it, `collect` the blocking one.
"""

from __future__ import annotations

import asyncio
import queue
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from dflash_serve import errors
from dflash_serve.engine.fatal import startup_error
from dflash_serve.engine.messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    Report,
    Shutdown,
    Submit,
    TokenEvent,
    Trace,
    Traced,
    Tune,
)
from dflash_serve.errors import ConflictError, EngineDeadError, RequestError
from dflash_serve.log import get_logger
from dflash_serve.scheduler.tuning import Tuning

__all__ = ["EngineClient", "Executor", "Port"]

logger = get_logger(__name__)
_POLL_S = 0.2
_CAUSE_GRACE_S = 0.5
_TRACE_EXCUSE_S = 60.0
"""A step may take so much longer while a trace is begun or written."""
_MOST_TRACED = 1000
_WATCHDOG_GRACE_S = 1.0
"""How much longer than the ranks' watchdogs, which know more, the front end waits."""


class Port(Protocol):
    """Front-end end of the channel to rank 0."""

    def send(self, commands: list[Command]) -> None:
        """Queue commands for rank 0's next step; never blocks."""

    def receive(self, timeout_s: float) -> Report | None:
        """Next report, or None when none came in time."""

    def close(self) -> None:
        """Release the channel."""


class Executor(Protocol):
    """Starts the ranks of one engine and watches over them."""

    def start(self) -> Port:
        """Start every rank; rank 0 will send a first report with `info` once all are ready."""

    def failure(self) -> str | None:
        """Why the gang is dead, or None while every rank lives."""

    def end_stalled(self, symptom: str) -> str:
        """End every rank, since no step completes; returns why, with the rank at fault."""

    def shutdown(self) -> None:
        """End every rank; idempotent."""


class EngineClient:
    """A started engine.

    Args:
        executor: not yet started; this object starts it and shuts it down.
        start_timeout_s: seconds until rank 0 must have reported ready.
        hang_timeout_s: seconds without a report, while requests are in flight, after which
            `check_health` fails; the ranks' own watchdogs end the engine then, and a moment later
            this object does.

    Raises:
        ConfigError: what rank 0 refused to load.
        EngineDeadError: a rank died while loading, or the deadline passed.
    """

    def __init__(
        self, executor: Executor, *, start_timeout_s: float = 600.0, hang_timeout_s: float = 30.0
    ) -> None:
        self._executor = executor
        self._hang_timeout_s = hang_timeout_s
        self._listeners: dict[str, Callable[[TokenEvent], None]] = {}
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._stats = EngineStats()
        self._tracing = threading.Lock()
        self._traces: queue.SimpleQueue[list[Traced]] = queue.SimpleQueue()
        self._last_progress = time.monotonic()
        self._closing = threading.Event()
        self._port = executor.start()
        try:
            self.info: EngineInfo = self._await_ready(start_timeout_s)
        except BaseException:
            executor.shutdown()
            self._port.close()
            raise
        self._thread = threading.Thread(target=self._read_reports, name="engine-reports")
        self._thread.daemon = True
        self._thread.start()

    # -- requests ---------------------------------------------------------------------------

    async def stream(self, submit: Submit) -> AsyncIterator[TokenEvent]:
        """Run one request; yields one event per step, the last with a finish reason.

        Leaving the iteration early, cancellation included, aborts the request.

        Raises:
            EngineDeadError: the engine died before the request finished.
            RequestError: the request id is in flight already.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._submit(submit, lambda e: _post(loop, events, e))
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.finish_reason is not None
                self._raise_if_died(event)
                yield event
        finally:
            if not finished:
                self.abort(submit.request_id)

    def collect(
        self, submits: Sequence[Submit], on_event: Callable[[TokenEvent], None] | None = None
    ) -> dict[str, list[TokenEvent]]:
        """Run requests to their end, blocking; returns each request's events in order.

        Raises:
            EngineDeadError: the engine died before all finished.
        """
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        result: dict[str, list[TokenEvent]] = {s.request_id: [] for s in submits}
        open_requests: set[str] = set()
        try:
            for submit in submits:
                self._submit(submit, events.put)
                open_requests.add(submit.request_id)
            while open_requests:
                event = events.get()
                self._raise_if_died(event)
                result[event.request_id].append(event)
                if event.finish_reason is not None:
                    open_requests.discard(event.request_id)
                if on_event is not None:
                    on_event(event)
            return result
        finally:
            for request_id in open_requests:  # an error or an interrupt ends the others too
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". Idempotent."""
        if self._dead is None:
            self._port.send([Abort(request_id)])

    def trace(
        self, steps: int, folder: str | None = None, *, timeout_s: float = 120.0
    ) -> list[str]:
        """Profile the next steps on every rank, blocking; an idle engine makes none.

        Args:
            steps: how many; each adds some thousand events to a file.
            folder: where the files go, on the ranks' host; None makes one in the system's
                temporary folder.
            timeout_s: how long to wait for so many steps and for the files.

        Returns:
            a Chrome trace's path for every rank, in their order.

        Raises:
            EngineDeadError: the engine is dead, or died meanwhile.
            ConflictError: another trace is being taken.
            RequestError: `steps` is out of range, not enough came, or a file cannot be written.
        """
        if not 1 <= steps <= _MOST_TRACED:
            raise RequestError(f"steps is {steps}; allowed: 1 to {_MOST_TRACED}", "steps")
        if not self._tracing.acquire(blocking=False):
            raise ConflictError("a trace is being taken already; wait for its end", "steps")
        try:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            folder = folder or tempfile.mkdtemp(prefix="dflash-trace-")
            return self._await_traces(steps, folder, time.monotonic() + timeout_s)
        finally:
            self._tracing.release()

    def tune(self, tuning: Tuning) -> None:
        """Change soft knobs from the next step on; raises RequestError as `Tuning.check` does."""
        tuning.check(self.info.verify_lengths, self.info.max_running)
        if self._dead is None:
            self._port.send([Tune(tuning)])

    # -- state ------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counters as of the last report."""
        return self._stats

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet finished, by this side's count."""
        return len(self._listeners)

    @property
    def step_age_s(self) -> float:
        """Seconds since the last report while work is pending; 0 when idle."""
        if not self._listeners:
            return 0.0
        excuse = _TRACE_EXCUSE_S if self._tracing.locked() else 0.0
        return max(0.0, time.monotonic() - self._last_progress - excuse)

    def check_health(self) -> None:
        """Pass while the engine lives and, with work pending, completes steps.

        Raises:
            EngineDeadError: a rank died or the engine was shut down.
            EngineStalledError: no step completed within the hang timeout.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self.step_age_s > self._hang_timeout_s:
            raise errors.EngineStalledError(
                f"{self.outstanding} requests are pending and no step has completed for "
                f"{self.step_age_s:.1f} s (limit {self._hang_timeout_s} s)"
            )

    def shutdown(self) -> None:
        """Stop the ranks and fail whatever is still in flight. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._dead is None:
            self._port.send([Shutdown()])
        self._thread.join(timeout=5.0)
        self._executor.shutdown()
        self._die("the engine was shut down")
        self._port.close()

    # -- internals --------------------------------------------------------------------------

    def _submit(self, submit: Submit, listener: Callable[[TokenEvent], None]) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            if submit.request_id in self._listeners:
                raise RequestError(
                    f"request id {submit.request_id!r} is in flight already; use another",
                    "request_id",
                )
            if not self._listeners:
                self._last_progress = time.monotonic()
            self._listeners[submit.request_id] = listener
        try:
            self._port.send([submit])
        except BaseException:
            with self._lock:
                self._listeners.pop(submit.request_id, None)
            raise

    def _await_traces(self, steps: int, folder: str, deadline: float) -> list[str]:
        self._port.send([Trace(steps, folder)])
        while self._dead is None:
            try:
                traces = self._traces.get(timeout=_POLL_S)
            except queue.Empty:
                if time.monotonic() > deadline:
                    self._port.send([Trace(0, folder)])
                    raise RequestError(
                        f"{steps} steps did not come in time; have requests running, or ask for "
                        "fewer",
                        "steps",
                    ) from None
                continue
            if traces[0].folder != folder:
                continue  # of a call that gave up before
            paths = [trace.path for trace in traces if trace.path is not None]
            failed = [f"rank {t.rank}: {t.error}" for t in traces if t.error is not None]
            if failed:
                raise RequestError(f"no trace in {folder}: {'; '.join(failed)}", "folder")
            return paths
        raise EngineDeadError(self._dead)

    def _await_ready(self, timeout_s: float) -> EngineInfo:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            report = self._port.receive(_POLL_S)
            if report is not None and report.fatal is not None:
                error = startup_error(report.fatal)
                if isinstance(error, errors.ConfigError):
                    raise error
                raise EngineDeadError(self._cause(report.fatal))
            if report is not None and report.info is not None:
                self._stats = report.stats or self._stats
                return report.info
            failure = self._executor.failure()
            if report is None and failure is not None:
                raise EngineDeadError(failure)
        raise EngineDeadError(f"the engine was not ready within {timeout_s:.0f} s")

    def _read_reports(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            report = self._port.receive(_POLL_S)
            if report is not None:
                self._apply(report)
            now = time.monotonic()
            if now - looked > self._hang_timeout_s / 2:
                self._last_progress = now  # this process was held up, and saw nothing meanwhile
            looked = now
            failure = self._executor.failure() or self._end_if_stalled()
            if failure is not None and not self._closing.is_set():
                while (report := self._port.receive(0)) is not None:
                    self._apply(report)
                self._die(failure)
                return

    def _end_if_stalled(self) -> str | None:
        """End an engine that does not report, rank 0 stopped included; returns why."""
        limit, age = self._hang_timeout_s, self.step_age_s
        if age <= limit + min(limit, _WATCHDOG_GRACE_S):
            return None
        return self._executor.end_stalled(
            f"rank 0 has reported nothing for {age:.1f} s while {self.outstanding} requests are "
            f"pending (limit {limit:g} s)"
        )

    def _apply(self, report: Report) -> None:
        self._last_progress = time.monotonic()
        if report.stats is not None:
            self._stats = report.stats
        if report.traces:
            self._traces.put(report.traces)
        for event in report.events:
            if event.finish_reason is not None:
                with self._lock:
                    listener = self._listeners.pop(event.request_id, None)
            else:
                listener = self._listeners.get(event.request_id)
            if listener is not None:
                listener(event)
        if report.fatal is not None:
            self._die(self._cause(report.fatal))

    def _cause(self, fatal: str) -> str:
        """Why the engine died, given rank 0's last words: they may only echo another's death."""
        if fatal.partition(":")[0] in errors.__all__:
            return fatal
        deadline = time.monotonic() + _CAUSE_GRACE_S
        while (failure := self._executor.failure()) is None and time.monotonic() < deadline:
            self._closing.wait(0.01)
        return fatal if failure in (None, fatal) else f"{failure}; rank 0 said: {fatal}"

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._dead is None:
                self._dead = reason
                if not self._closing.is_set():
                    logger.error("the engine is dead: %s", reason)
            listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            listener(TokenEvent(request_id=request_id, finish_reason="error", error=_DEAD + reason))

    def _raise_if_died(self, event: TokenEvent) -> None:
        if event.error is not None and event.error.startswith(_DEAD):
            raise EngineDeadError(event.error.removeprefix(_DEAD))


_DEAD = "\0engine dead: "
"""Marks events made here for requests that an engine took down with it."""


def _post(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[TokenEvent], event: TokenEvent
) -> None:
    """Hand an event to an event loop that may have closed since the request was made."""
    try:
        loop.call_soon_threadsafe(events.put_nowait, event)
    except RuntimeError:
        logger.debug("the listener's loop is closed; event of %s dropped", event.request_id)
