"""Requests that outlive their engine: submitted again, from where they stopped (no Ray)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn, Protocol

from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.errors import DFlashError, EngineDeadError, UnavailableError
from dflash_serve.log import get_logger
from dflash_serve.serve.journal import Journal, ResumeLimits, final_error, too_late

__all__ = ["ResumeObserver", "Resumer"]

logger = get_logger(__name__)

_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.5
_DRAIN_POLL_S = 0.05
_RETRY_AFTER_STOP_S = 10.0
"""What a client is told to wait before it asks a stopping server again."""


class ResumeObserver(Protocol):
    """Told what happens to requests whose engine failed."""

    def submitted_again(self, model: str) -> None:
        """A request whose engine failed is submitted another time."""

    def resumed(self, model: str, pause_s: float) -> None:
        """A token came, `pause_s` seconds after an engine had failed."""

    def gave_up(self, model: str) -> None:
        """A request ended with an error after an engine had failed under it."""


class Resumer:
    """Runs requests to their end over engines that may fail.

    Args:
        attempt: submits a request once; leaving the iteration aborts it, and when it has been
            left nothing runs there any more.
        limits: how long to hold on to a request.
        observer: told what happens.
    """

    def __init__(
        self,
        attempt: Callable[[GenerationRequest], AsyncGenerator[Delta, None]],
        limits: ResumeLimits,
        observer: ResumeObserver,
    ) -> None:
        self._attempt = attempt
        self._limits = limits
        self._observer = observer
        self._running = 0
        self._waits: set[asyncio.Timeout] = set()
        self._over = False
        self.closed = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Stream one choice; a failure of its engine shows as a pause.

        Raises:
            UnavailableError: the server stops; see `drain`.
            DFlashError: what `final_error` and `too_late` say.
        """
        if self.closed:
            raise _stopping()
        self._running += 1
        try:
            async with contextlib.aclosing(self._run(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._running -= 1

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, let those under way finish, and end those that need longer.

        Returns:
            How many were ended.
        """
        self.closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while self._running and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._over = True
        for wait in self._waits:
            wait.reschedule(loop.time())
        return self._running

    async def _run(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        journal = Journal(request, self._limits)
        fruitless = 0
        while True:
            if self._over:
                self._end(journal, _stopping())
            try:
                async with contextlib.aclosing(self._attempt(journal.submission())) as deltas:
                    while (delta := await self._next(deltas, journal)) is not None:
                        fruitless = 0
                        self._note_progress(journal)
                        yield journal.record(delta)
                        if delta.finish_reason is not None:
                            return
                raise EngineDeadError("the answer broke off without a finish reason")
            except DFlashError as error:
                self._note_failure(journal, error)
            except TimeoutError:
                self._end(journal, _stopping() if self._over else too_late(journal))
            await _pause(journal, fruitless)
            fruitless += 1
            if journal.failures:
                self._observer.submitted_again(request.model)

    async def _next(self, deltas: AsyncGenerator[Delta, None], journal: Journal) -> Delta | None:
        """The next delta, or None at the end.

        Raises:
            TimeoutError: it did not come in the time the journal allows, or the server stops.
        """
        async with asyncio.timeout(0 if self._over else journal.patience_s()) as wait:
            self._waits.add(wait)
            try:
                return await anext(deltas, None)
            finally:
                self._waits.discard(wait)

    def _note_progress(self, journal: Journal) -> None:
        if journal.pause_s is not None and journal.failures:
            self._observer.resumed(journal.request.model, journal.pause_s)

    def _note_failure(self, journal: Journal, error: DFlashError) -> None:
        """Go on after an error, or raise what ends the request."""
        if journal.pause_s is None:
            logger.warning(
                "%s stopped after %d ids: %s", journal.request.request_id, journal.emitted, error
            )
        journal.fail(error)
        final = final_error(error, journal)
        if final is not None:
            self._end(journal, final)

    def _end(self, journal: Journal, error: DFlashError) -> NoReturn:
        if journal.failures:
            self._observer.gave_up(journal.request.model)
        raise error from (None if error is journal.cause else journal.cause)


async def _pause(journal: Journal, fruitless: int) -> None:
    """A moment for an engine to come back: longer each time in a row that nothing came of it."""
    delay = min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** min(fruitless, 8)) * random.uniform(0.5, 1.0)
    await asyncio.sleep(min(delay, journal.patience_s()))


def _stopping() -> UnavailableError:
    return UnavailableError(
        "this server is being stopped; send the request to another, or here once it is back",
        _RETRY_AFTER_STOP_S,
    )
