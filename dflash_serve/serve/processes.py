"""Looking at processes of this host, and waiting for them to be gone (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["await_exit", "await_killed", "descendants", "is_running", "kill"]

_POLL_S = 0.02
_STOPPED_TIMEOUT_S = 1.0
"""How long a process told to end may take before it is killed: a stopped one hears of nothing."""
_EXIT_TIMEOUT_S = 10.0


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return _state(pid) not in (None, "Z")


def descendants(pid: int) -> set[int]:
    """Processes below `pid`."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting.extend(new)
    return found


def await_exit(pids: Iterable[int], timeout_s: float) -> set[int]:
    """Wait until the processes are gone; returns those that outlived the deadline."""
    deadline = time.monotonic() + timeout_s
    left = set(pids)
    while left := {pid for pid in left if is_running(pid)}:
        if time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)
    return left


def await_killed(pids: Iterable[int]) -> set[int]:
    """Wait for processes that Ray has told to end, and kill those that do not hear of it.

    Ray answers a kill before the process is gone, and its memory is free only after.

    Returns:
        Those that outlived it.
    """
    pids = list(pids)
    kill(await_exit(pids, _STOPPED_TIMEOUT_S))
    return await_exit(pids, _EXIT_TIMEOUT_S)


def kill(pids: Iterable[int]) -> None:
    """End processes at once; those already gone are fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str | None:
    fields = _fields(pid)
    return None if fields is None else fields[0]


def _fields(pid: int) -> list[str] | None:
    """State, parent, … of a process; None when it is gone."""
    try:
        # The name in front stands in parentheses and may hold anything, parentheses too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
