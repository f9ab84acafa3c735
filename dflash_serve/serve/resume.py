"""Requests that outlive their engine: submitted again, from where they stopped (no Ray)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from typing import NoReturn, Protocol

from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.errors import DFlashError, EngineDeadError
from dflash_serve.log import get_logger
from dflash_serve.serve.journal import Journal, ResumeLimits, final_error, too_late

__all__ = ["ResumeObserver", "Resumer"]

logger = get_logger(__name__)

_FIRST_DELAY_S = 0.05
_LAST_DELAY_S = 0.5


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

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Stream one choice; a failure of its engine shows as a pause.

        Raises:
            DFlashError: what `final_error` and `too_late` say.
        """
        journal = Journal(request, self._limits)
        fruitless = 0
        while True:
            try:
                async with contextlib.aclosing(self._attempt(journal.submission())) as deltas:
                    while (delta := await _next(deltas, journal)) is not None:
                        fruitless = 0
                        self._note_progress(journal)
                        yield journal.record(delta)
                        if delta.finish_reason is not None:
                            return
                raise EngineDeadError("the answer broke off without a finish reason")
            except DFlashError as error:
                self._note_failure(journal, error)
            except TimeoutError:
                self._end(journal, too_late(journal))
            await _pause(journal, fruitless)
            fruitless += 1
            if journal.failures:
                self._observer.submitted_again(request.model)

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


async def _next(deltas: AsyncGenerator[Delta, None], journal: Journal) -> Delta | None:
    """The next delta, or None at the end.

    Raises:
        TimeoutError: it did not come in the time the journal allows.
    """
    async with asyncio.timeout(journal.patience_s()):
        return await anext(deltas, None)


async def _pause(journal: Journal, fruitless: int) -> None:
    """A moment for an engine to come back: longer each time in a row that nothing came of it."""
    delay = min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** min(fruitless, 8)) * random.uniform(0.5, 1.0)
    await asyncio.sleep(min(delay, journal.patience_s()))
