"""What is on the host and in Ray's tables, to compare before and after a round."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cluster import Cluster

__all__ = ["Snapshot", "differences", "take", "vitals"]

Snapshot = Mapping[str, int]
"""Counts by name, of a deployment at rest."""

_KINDS = ("rank", "replica", "ingress", "controller", "proxy")


def take(cluster: Cluster) -> Snapshot:
    """Count everything that must be the same after every round."""
    import ray

    statuses = cluster.statuses()
    groups = ray.util.placement_group_table().values()
    parent = Path(tempfile.gettempdir()) / f"dflash-serve-{os.getuid()}"
    run_dirs = [path for path in parent.iterdir() if (path / "owner.lock").exists()]
    return {
        **{f"{kind} processes": len(cluster.processes(kind)) for kind in _KINDS},
        "placement groups": sum(group["state"] != "REMOVED" for group in groups),
        "pages used": sum(s.stats.pages_used for s in statuses),
        "pages": sum(s.stats.pages_total for s in statuses),
        "requests in engines": sum(s.stats.running + s.stats.waiting for s in statuses),
        "requests in replicas": sum(s.outstanding for s in statuses),
        "run folders": len(run_dirs),
        "sockets": Path("/proc/net/unix").read_text().count(f" {parent}/"),
        "/dev/shm": len(os.listdir("/dev/shm")),
    }


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What is not as it was."""
    return [
        f"{name}: {before[name]} before, {after[name]} now"
        for name in before
        if before[name] != after[name]
    ]


def vitals(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Open files, threads and memory (MiB) of the long-lived processes, by kind and pid."""
    found = {}
    for process in cluster.processes("replica", "ingress", "controller", "proxy"):
        base = Path(f"/proc/{process.pid}")
        try:
            status = dict(line.split(":", 1) for line in (base / "status").read_text().splitlines())
            found[f"{process.kind} {process.pid}"] = {
                "files": len(list((base / "fd").iterdir())),
                "threads": int(status["Threads"]),
                "mib": int(status["VmRSS"].split()[0]) >> 10,
            }
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
