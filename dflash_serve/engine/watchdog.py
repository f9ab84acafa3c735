"""A side thread in every rank that ends the process when its steps stand still.

Health is the age of the last completed step while work is pending. A rank whose step is too old
raises the alarm on the board; every rank that sees an alarm logs the stacks of all its threads,
writes its flight record and leaves with `os._exit`: a thread stuck in a collective can neither be
woken nor waited for. What cannot leave by itself (a stopped process) its owner kills.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from dflash_serve.engine.pulse import Board, Pulse, Sign, describe
from dflash_serve.log import get_logger

__all__ = ["STALLED_EXIT", "Watchdog", "leave", "stacks"]

logger = get_logger(__name__)

STALLED_EXIT = 75
"""Exit code of a rank that its watchdog ended."""

_LONGEST_TICK_S = 0.5
_LAST_WORDS_S = 5.0
"""How long logging and the flight record may take before the process ends without them."""


class Watchdog:
    """Watches one rank's pulse, and its peers' through the board; a context manager.

    Leaving the block with an exception raises the alarm for the other ranks, and records.

    Args:
        pulse: of this rank's loop.
        hang_timeout_s: age of the last completed step, while work is pending, that is too much.
        board: where the engine's ranks show signs of life; None for a rank alone in a process
            that must live on.
        record: writes the flight record for a reason, and logs where; may raise what
            `Recorder.dump` does.
        on_trip: what ends the rank, given the reason; does not return where it ends the process.
    """

    def __init__(
        self,
        pulse: Pulse,
        hang_timeout_s: float,
        *,
        rank: int,
        board: Board | None,
        record: Callable[[str], object],
        on_trip: Callable[[str], None],
    ) -> None:
        self._pulse = pulse
        self._limit = hang_timeout_s
        self._rank = rank
        self._board = board
        self._record = record
        self._on_trip = on_trip
        self._tick = min(hang_timeout_s / 10, _LONGEST_TICK_S)
        self._stopped = threading.Event()
        self._looked = self._fresh = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._publish(time.monotonic())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if isinstance(error, Exception):
            reason = f"rank {self._rank} failed: {type(error).__name__}: {error}"
            if self._board is not None:
                self._board.raise_alarm(reason)
            self._try_to_record(reason)

    def _run(self) -> None:
        while not self._stopped.wait(self._tick):
            reason = self._look(time.monotonic())
            if reason is not None:
                self._trip(reason)
                return
        if self._board is not None:
            faulthandler.cancel_dump_traceback_later()

    def _look(self, now: float) -> str | None:
        """Publish this rank's sign; returns why the engine must end, if it must."""
        # A process that was itself held up (stopped, a frozen container) judges nobody by the
        # time it has missed.
        if now - self._looked > 5 * self._tick + 0.5:
            self._fresh = now
        self._looked = now
        sign = self._publish(now)
        if self._board is not None and (alarm := self._board.alarm()) is not None:
            return alarm
        signs = self._board.read() if self._board is not None else {self._rank: sign}
        age = max(self._age(rank, other, now) for rank, other in signs.items())
        if age <= self._limit:
            return None
        where = describe(signs, now, self._limit)
        return f"no step has completed for {age:.1f} s (limit {self._limit:g} s): {where}"

    def _age(self, rank: int, sign: Sign | None, now: float) -> float:
        """Age of a rank's last completed step; a peer that is alive judges its own."""
        if sign is None or not sign.busy:
            return 0.0
        if rank != self._rank and now - max(sign.heard, self._fresh) <= self._limit:
            return 0.0
        return now - max(sign.since, self._fresh)

    def _publish(self, now: float) -> Sign:
        sign = self._pulse.sign(now)
        if self._board is not None:
            self._board.write(self._rank, sign)
            self._arm(sign)
        return sign

    def _arm(self, sign: Sign) -> None:
        """Have the stacks printed even if this thread cannot run: a call may hold the GIL."""
        if sign.busy:
            faulthandler.dump_traceback_later(self._limit + self._tick, exit=False)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _trip(self, reason: str) -> None:
        if self._board is not None:
            # The alarm first: from here on neither a log nor a disk that blocks can hide it.
            reason = self._board.raise_alarm(reason)
            faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True)
        try:
            logger.error("the watchdog ends rank %d: %s\n%s", self._rank, reason, stacks())
            self._try_to_record(reason)
            if self._board is not None:
                self._board.mark_left(self._rank)
                # Whoever leaves first breaks the others' collectives, and they would die wordless.
                self._board.await_last_words(self._limit)
        finally:
            # Whatever the last words meet: a rank that stays would be waited for by all others.
            self._on_trip(reason)

    def _try_to_record(self, reason: str) -> None:
        """Write the flight record; one that cannot be written must not hide the reason."""
        try:
            self._record(reason)
        except (OSError, RuntimeError, ValueError):
            logger.exception("no flight record could be written")


def leave(_reason: str) -> None:
    """End this process at once, whatever its other threads wait for."""
    sys.stderr.flush()
    os._exit(STALLED_EXIT)


def stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
