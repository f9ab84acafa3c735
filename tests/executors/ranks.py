"""Looking at the rank processes of an `mp` engine, and running calls beside them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dflash_serve.errors import EngineDeadError

__all__ = ["cpu_seconds", "gone", "outcome_of", "rank_pids"]


def rank_pids() -> dict[int, int]:
    """Process ids of this process's children, oldest first."""
    children = sorted(multiprocessing.active_children(), key=lambda p: p.name.zfill(40))
    return {rank: child.pid for rank, child in enumerate(children) if child.pid is not None}


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Run a call in a thread; the list receives the engine's error when it ends with one."""
    errors: list[BaseException] = []

    def target() -> None:
        try:
            call()
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, errors
