"""What processes hold: memory, open files, threads; and what lies in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_serve.serve.processes import descendants

__all__ = ["TITLES", "by_kind", "shared_memory"]

TITLES = {
    "rank": "ray::RankActor",
    "replica": "ray::ServeReplica:dflash:Replica",
    "ingress": "ray::ServeReplica:dflash:Ingress",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "haproxy": "ray::HAProxyManager",
}
"""How Ray names the processes of each kind."""

Vitals = dict[str, float]


def by_kind(root: int) -> dict[str, Vitals]:
    """Processes, RSS and PSS (MiB), open files and threads, summed over those of a kind.

    Args:
        root: the process whose descendants are counted; what has no title of `TITLES` is "other".
    """
    found: dict[str, Vitals] = {}
    for pid in descendants(root):
        try:
            kind, vitals = _kind(pid), _vitals(Path(f"/proc/{pid}"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        total = found.setdefault(kind, dict.fromkeys(vitals, 0.0))
        for name, value in vitals.items():
            total[name] += value
    return found


def shared_memory() -> Vitals:
    """Files in /dev/shm and their size in MiB."""
    sizes = []
    for path in Path("/dev/shm").rglob("*"):
        try:
            sizes.append(path.lstat().st_size)
        except FileNotFoundError:
            continue
    return {"files": float(len(sizes)), "mib": sum(sizes) / 2**20}


def _kind(pid: int) -> str:
    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((kind for kind, start in TITLES.items() if title.startswith(start)), "other")


def _vitals(base: Path) -> Vitals:
    lines = (base / "smaps_rollup").read_text().splitlines()[1:]
    memory = {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (x.partition(":") for x in lines)
    }
    status = dict(x.split(":", 1) for x in (base / "status").read_text().splitlines())
    return {
        "processes": 1.0,
        "rss_mib": memory["Rss"],
        "pss_mib": memory["Pss"],
        "files": float(len(os.listdir(base / "fd"))),
        "threads": float(status["Threads"]),
    }
