"""Signs of life: how far each rank's steps have come, readable by its peers and its owner.

A rank's loop moves its `Pulse`; its watchdog thread copies that to the `Board`, a small file per
rank in the engine's run folder. A stopped process stops writing, and whoever reads the board
sees for how long. All ranks share a host, hence one monotonic clock (no torch).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Board", "Pulse", "Sign", "describe", "silence_limit"]

_SIGN = struct.Struct("=dqqd?")
_LAST_WORDS_S = 1.2
"""After an alarm: time for every rank to see it and to log its stacks."""
_LEAVING_S = 1.0
"""Time after that in which its process must have ended by itself."""
_POLL_S = 0.01


class Sign(NamedTuple):
    """One rank's last sign of life; times are of `time.monotonic`.

    Attributes:
        heard: when its watchdog thread wrote this.
        begun: number of the step begun last, −1 before the first.
        done: number of the step completed last.
        since: when it last completed a step, or got work after a rest.
        busy: whether work is pending.
    """

    heard: float
    begun: int
    done: int
    since: float
    busy: bool


class Pulse:
    """Progress of one rank's loop: written by the loop, read by its watchdog thread."""

    def __init__(self) -> None:
        self._begun = self._done = -1
        self._since = time.monotonic()
        self._busy = False

    def work(self) -> None:
        """There is work; its age counts from now unless there was some before."""
        if not self._busy:
            self._since = max(self._since, time.monotonic())
            self._busy = True

    def begin(self, step: int) -> None:
        """A step is about to be launched."""
        self._begun = step
        self.work()

    def complete(self, step: int) -> None:
        """A step's results have been read; the age counts anew."""
        self._done = step
        self._since = max(self._since, time.monotonic())

    def rest(self) -> None:
        """Nothing is pending, so nothing ages."""
        self._busy = False

    def excuse(self, seconds: float) -> None:
        """Something slow that was asked for begins: the age counts from `seconds` ahead."""
        self._since = time.monotonic() + seconds

    def sign(self, now: float) -> Sign:
        """The state as of `now`."""
        return Sign(now, self._begun, self._done, self._since, self._busy)


class Board:
    """The ranks' signs of life and the alarm, as files in the engine's run folder.

    Args:
        run_dir: the engine's private folder; it may vanish when the engine's owner cleans up.
    """

    def __init__(self, run_dir: str, world_size: int) -> None:
        self._folder = Path(run_dir)
        self._ranks = range(world_size)

    def write(self, rank: int, sign: Sign) -> None:
        """Replace a rank's sign; does nothing when the folder is gone."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._path(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, _SIGN.pack(*sign), 0)
            finally:
                os.close(descriptor)

    def read(self) -> dict[int, Sign | None]:
        """Every rank's last sign; None for one that has not begun to serve."""
        return {rank: self._read(rank) for rank in self._ranks}

    def describe(self, hang_timeout_s: float) -> str:
        """Where every rank is now; see `describe`."""
        return describe(self.read(), time.monotonic(), hang_timeout_s)

    def raise_alarm(self, text: str) -> str:
        """Tell every rank to leave, and why; returns the text of the first alarm raised."""
        draft = self._folder / f"alarm-{os.getpid()}-{time.monotonic_ns()}"
        with contextlib.suppress(FileNotFoundError):
            draft.write_text(text, encoding="utf-8")
            with contextlib.suppress(FileExistsError):
                os.link(draft, self._folder / "alarm")
            draft.unlink()
        return self.alarm() or text

    def alarm(self) -> str | None:
        """The alarm's text, or None while there is none."""
        try:
            return (self._folder / "alarm").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def mark_left(self, rank: int) -> None:
        """Say that a rank has logged its stacks and that its watchdog ends its process."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / f"left-{rank}").touch()

    def has_left(self, rank: int) -> bool:
        """Whether a rank is ended by its own watchdog, rather than by a signal or an error."""
        return (self._folder / f"left-{rank}").exists()

    def await_last_words(self, hang_timeout_s: float) -> None:
        """After an alarm, wait until every rank that can has logged its stacks."""
        self._await(self.has_left, _LAST_WORDS_S, hang_timeout_s)

    def await_leaving(self, gone: Callable[[int], bool], hang_timeout_s: float) -> None:
        """After an alarm, wait until every rank that can has left by itself.

        Args:
            gone: whether a rank's process has ended.
        """
        self._await(gone, _LAST_WORDS_S + _LEAVING_S, hang_timeout_s)

    def _await(self, done: Callable[[int], bool], timeout_s: float, hang_timeout_s: float) -> None:
        limit = silence_limit(hang_timeout_s)
        deadline = time.monotonic() + timeout_s
        while (now := time.monotonic()) < deadline:
            signs = self.read().items()
            if all(done(rank) or s is None or now - s.heard > limit for rank, s in signs):
                return
            time.sleep(_POLL_S)

    def _path(self, rank: int) -> Path:
        return self._folder / f"pulse-{rank}"

    def _read(self, rank: int) -> Sign | None:
        try:
            data = self._path(rank).read_bytes()
        except FileNotFoundError:
            return None
        return Sign(*_SIGN.unpack(data)) if len(data) == _SIGN.size else None


def silence_limit(hang_timeout_s: float) -> float:
    """Seconds without a sign of life after which a rank counts as stopped."""
    return hang_timeout_s / 2


def describe(signs: Mapping[int, Sign | None], now: float, hang_timeout_s: float) -> str:
    """Where every rank is, those without a sign of life first."""
    limit = silence_limit(hang_timeout_s)
    silent, others = [], []
    for rank, sign in signs.items():
        if sign is None:
            others.append(f"rank {rank} has not begun to serve")
        elif now - sign.heard > limit:
            silent.append(
                f"rank {rank} has given no sign of life for {now - sign.heard:.1f} s: its process "
                "is stopped, or stuck outside Python"
            )
        elif not sign.busy:
            others.append(f"rank {rank} rests after step {sign.done}")
        elif sign.begun > sign.done:
            others.append(f"rank {rank} has been in step {sign.begun} for {now - sign.since:.1f} s")
        else:
            others.append(
                f"rank {rank} has begun no step after step {sign.done} for {now - sign.since:.1f} s"
            )
    return "; ".join(silent + others)
