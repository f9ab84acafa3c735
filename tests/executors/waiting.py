"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["until"]

_pause = threading.Event()


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: it did not within the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        _pause.wait(0.01)
