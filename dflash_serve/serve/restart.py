"""An engine that outlives its gang: when the ranks die, new ones are started in their place."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import EngineInfo, EngineStats, Submit, TokenEvent
from dflash_serve.errors import (
    ConfigError,
    EngineDeadError,
    EngineStalledError,
    UnavailableError,
)
from dflash_serve.log import get_logger
from dflash_serve.scheduler.tuning import Tuning

__all__ = ["RestartingEngine"]

logger = get_logger(__name__)

_POLL_S = 0.1
_PAUSE_S = 0.5
"""Between a start that failed and the next one."""


class RestartingEngine:
    """An `Engine` over one gang after another.

    While there is none it refuses requests, and its health passes for as long as a start may
    take. It gives up when that time is over, when too many gangs in a row came to nothing, or when
    the configuration cannot be served any more.

    Args:
        start: starts a gang and returns its engine, ready; raises when it cannot.
        deadline_s: seconds from the death of a gang until the next must be ready.
        failures_in_a_row: gangs that may die or fail to start one after another, none of them
            having finished a request; 0 starts none in place.
        on_loss: called with the reason, on a thread of this object, after it gave up.

    Raises:
        ConfigError, EngineDeadError: the first start failed.
    """

    def __init__(
        self,
        start: Callable[[], EngineClient],
        *,
        deadline_s: float,
        failures_in_a_row: int,
        on_loss: Callable[[str], None],
    ) -> None:
        self._start = start
        self._deadline_s = deadline_s
        self._allowed = failures_in_a_row
        self._on_loss = on_loss
        self._closing = threading.Event()
        self._since: float | None = None  # when the gang died whose successor is being started
        self._lost: str | None = None
        self._failures = 0
        self.restarts = 0
        self._tuning: Tuning | None = None
        self._tunes = threading.Lock()
        self._engine = start()
        self._keeper = threading.Thread(target=self._keep, name="gang-keeper", daemon=True)
        self._keeper.start()

    # -- the engine -------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the latest engine says about itself."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """The latest engine's counters; a new one counts from zero."""
        return self._engine.stats

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet finished."""
        return self._engine.outstanding

    @property
    def step_age_s(self) -> float:
        """Seconds since the last report while work is pending."""
        return self._engine.step_age_s

    def stream(self, submit: Submit) -> AsyncIterator[TokenEvent]:
        """Run one request on the gang there is; see `EngineClient.stream`.

        Raises:
            UnavailableError: there is none now.
            EngineDeadError: it died before the request finished.
        """
        self.require_running()
        return self._engine.stream(submit)

    def trace(self, steps: int, *, timeout_s: float) -> list[str]:
        """Profile the gang there is; see `EngineClient.trace`.

        Raises:
            UnavailableError: there is none now.
        """
        self.require_running()
        return self._engine.trace(steps, timeout_s=timeout_s)

    def tune(self, tuning: Tuning) -> None:
        """Change soft knobs of this gang and of those that follow it; see `EngineClient.tune`.

        Raises:
            RequestError: the engine was not started for that; everything stays as it was.
        """
        with self._tunes:
            self._engine.tune(tuning)
            self._tuning = tuning

    # -- state ------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a gang to work on requests, as far as is known."""
        return self._lost is None and self._since is None

    def require_running(self) -> None:
        """Refuse work that could not even begin.

        Raises:
            UnavailableError: no gang runs, or it stands still; the text says why.
        """
        if self._lost is not None:
            raise UnavailableError(self._lost)
        if self._since is not None:
            waited = time.monotonic() - self._since
            raise UnavailableError(f"the ranks died {waited:.1f} s ago and are being started again")
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            raise UnavailableError(f"{error}; the ranks are being started again") from error
        except EngineStalledError as error:
            raise UnavailableError(str(error)) from error

    def check_health(self) -> None:
        """Pass while the gang makes progress, or its successor may still come.

        Raises:
            EngineDeadError: this object has given up, or has taken too long.
            EngineStalledError: no step completes.
        """
        if self._lost is not None:
            raise EngineDeadError(self._lost)
        since = self._since
        if since is None:
            with contextlib.suppress(EngineDeadError):  # just now: the keeper is about to act
                self._engine.check_health()
        elif time.monotonic() - since > self._deadline_s:
            raise EngineDeadError(self._too_late())

    def shutdown(self) -> None:
        """End the gang and start none any more. Idempotent."""
        self._closing.set()
        self._engine.shutdown()

    # -- the keeper -------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closing.wait(_POLL_S):
            reason = self._death()
            if reason is None:
                continue
            try:
                self._lost = self._restart(reason)
            except Exception as error:  # nobody else watches: better replaced than dead for good
                logger.error("the gang could not be replaced", exc_info=error)
                self._lost = f"{reason}, and the ranks could not be started again: {error}"
            if self._lost is not None and not self._closing.is_set():
                self._on_loss(self._lost)
                return

    def _death(self) -> str | None:
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            return str(error)
        except EngineStalledError:
            return None  # its watchdogs end it, or a long step comes to its end
        return None

    def _restart(self, reason: str) -> str | None:
        """Start gangs until one is ready; returns why there will be none, or None."""
        self._since = time.monotonic()
        finished = self._engine.stats.finished
        worked = finished.get("stop", 0) + finished.get("length", 0) > 0
        self._failures = 1 if worked else self._failures + 1
        self._engine.shutdown()
        while not self._closing.is_set():
            if self._failures > self._allowed:
                return f"{self._failures} gangs failed in a row; the last: {reason}"
            if time.monotonic() - self._since > self._deadline_s:
                return f"{self._too_late()}; the last failure: {reason}"
            logger.warning("starting the ranks again: %s", reason)
            try:
                engine = self._start()
            except ConfigError as error:
                return f"the ranks cannot be started again: {error}"
            except EngineDeadError as error:
                reason = str(error)
                self._failures += 1
                self._closing.wait(_PAUSE_S)
                continue
            with self._tunes:
                self._engine = engine
                if self._tuning is not None:
                    engine.tune(self._tuning)
            if self._closing.is_set():
                engine.shutdown()  # the last shutdown was of the one before
            logger.warning("ready again after %.1f s", time.monotonic() - self._since)
            self.restarts += 1
            self._since = None
            return None
        return None

    def _too_late(self) -> str:
        return f"the ranks died and were not back within {self._deadline_s:.0f} s (start_timeout_s)"
