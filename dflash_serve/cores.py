"""How many CPU cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
