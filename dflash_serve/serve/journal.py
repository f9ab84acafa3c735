"""What a request needs to go on elsewhere, and whether it may (no Ray).

A request outlives the engine that works on it: the front end keeps what was sent and what came
back, and submits prompt and output again. The noise of a position depends on the seed and the
position only, so the ids that follow are those that would have come.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec

from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    OverloadedError,
    UnavailableError,
)

__all__ = ["Journal", "ResumeLimits", "final_error", "too_late"]


@dataclasses.dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How long a front end holds on to a request.

    Attributes:
        attempts: engines that may fail under a request after the first one did.
        wait_s: seconds a request may wait for its first token, and after a failure for the next.
        total_s: seconds a whole request may take.
    """

    attempts: int
    wait_s: float
    total_s: float


class Journal:
    """One choice: what was asked, what the client has, what went wrong so far.

    Only ids whose text is settled come here; those a replica holds back (a stop string that may
    have begun) are not the client's yet and are computed again. The detokeniser and the search for
    stop strings start from the ids the client has, which gives them the state they had.

    Args:
        request: as the client sent it, seed included.
        limits: how long to hold on to it.
    """

    def __init__(self, request: GenerationRequest, limits: ResumeLimits) -> None:
        self.request = request
        self.limits = limits
        self.started = time.monotonic()
        self.failures = 0
        self.cause: DFlashError | None = None
        self._failed_at: float | None = None
        self._submissions = 0
        self._prompt_ids: list[int] | None = None
        self._emitted = list(request.emitted_ids)

    @property
    def begun(self) -> bool:
        """Whether the client has anything."""
        return self._prompt_ids is not None

    @property
    def emitted(self) -> int:
        """How many ids the client has."""
        return len(self._emitted)

    @property
    def pause_s(self) -> float | None:
        """Seconds since the failure that no token has followed yet; None while all is well."""
        return None if self._failed_at is None else time.monotonic() - self._failed_at

    def submission(self) -> GenerationRequest:
        """What to send now. Each has an id of its own: an engine may still know the last one."""
        self._submissions += 1
        if self._submissions == 1:
            return self.request
        request_id = f"{self.request.request_id}.{self._submissions}"
        if self._prompt_ids is None:
            return msgspec.structs.replace(self.request, request_id=request_id)
        return msgspec.structs.replace(
            self.request,
            request_id=request_id,
            messages=None,
            prompt=self._prompt_ids,
            emitted_ids=list(self._emitted),
        )

    def record(self, delta: Delta) -> Delta:
        """Note what goes to the client; what there is to say of the prompt is said once."""
        self._failed_at = None
        self._emitted += delta.token_ids
        if self._prompt_ids is None:
            self._prompt_ids = delta.prompt_ids or []
        else:
            delta.prompt_ids = delta.cached_tokens = None
        return delta

    def fail(self, error: DFlashError) -> None:
        """Note a failure; one that found no engine at all does not count as an attempt."""
        self.cause = error
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        if not isinstance(error, UnavailableError | OverloadedError):
            self.failures += 1

    def patience_s(self) -> float:
        """Seconds until the next delta must have come."""
        left = self.started + self.limits.total_s
        if self._failed_at is not None:
            left = min(left, self._failed_at + self.limits.wait_s)
        elif not self.begun:
            left = min(left, self.started + self.limits.wait_s)
        return max(0.0, left - time.monotonic())


def final_error(error: DFlashError, journal: Journal) -> DFlashError | None:
    """What ends a request for good after `error`, or None where it may be submitted again.

    A client that has gone never gets here: its leaving ends the iteration itself.
    """
    if isinstance(error, OverloadedError):
        # A new request is the client's to send again; one that was taken before waits.
        return None if journal.failures else error
    if not isinstance(error, EngineDeadError | EngineStalledError):
        return error  # the request's own fault, or the model's: it would come again
    if journal.failures > journal.limits.attempts:
        return EngineDeadError(
            f"{journal.failures} engines failed under this request, and resume_attempts allows "
            f"{journal.limits.attempts} more after the first; the last: {error}"
        )
    return too_late(journal) if journal.patience_s() <= 0.0 else None


def too_late(journal: Journal) -> DFlashError:
    """The error of a request whose time is over."""
    model, limits = journal.request.model, journal.limits
    if time.monotonic() - journal.started >= limits.total_s:
        return EngineStalledError(
            f"the request to {model} took longer than {limits.total_s:.0f} s "
            "(request_timeout_s); ask for fewer tokens"
        )
    if journal.pause_s is None:
        return OverloadedError(
            f"no replica of {model} began this request within {limits.wait_s:.0f} s "
            "(queue_timeout_s); try again later"
        )
    return UnavailableError(
        f"no replica of {model} could take this request within {limits.wait_s:.0f} s "
        f"(queue_timeout_s); the last said: {journal.cause}"
    )
