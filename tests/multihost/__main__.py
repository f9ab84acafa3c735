"""A host is cut off in the middle of requests: with another to go to, and without.

    python -m tests.multihost [--clients 8] [--output multihost.json]

Sets up a head and up to three hosts as network namespaces, which takes root, and a Ray over them:
first with a replica at tp 2 on one of two hosts, then with one at tp 4 over two of three. Ends with
1 when a request was lost that had a host to go to, ended without a word where there was none, or
got other ids on two hosts than on one. How soon a silent host counts as dead is for Ray to say; it
is told what k8s/ tells it, unless RAY_health_check_period_ms, RAY_health_check_timeout_ms and
RAY_health_check_failure_threshold are set otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.clients import Answer, Load, Record
from tests.chaos.cluster import until
from tests.chaos.folder import ROOT, own_folder

from .cluster import HostCluster
from .hosts import Hosts, make_hosts

__all__ = ["main"]

_HOSTS = {1: 2, 2: 3}
"""Hosts there are, by how many of them a replica takes: there is a spare one."""
_HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
_BEGUN_TIMEOUT_S = 60.0
_BACK_TIMEOUT_S = 240.0
_FREED_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.multihost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--keep", action="store_true", help="keep Ray's logs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is not None:
        return _inside(options)
    given = sys.argv[1:] if arguments is None else arguments
    words = [sys.executable, "-m", "tests.multihost", *given]
    try:
        with make_hosts(max(_HOSTS.values())) as hosts:
            command = [*words, "--inside", hosts.prefix]
            return subprocess.run(hosts.inside(0, command), cwd=ROOT).returncode
    except PermissionError as error:
        parser.error(str(error))


def _inside(options: argparse.Namespace) -> int:
    """All that runs on the head, in its namespace."""
    for name, value in _HEALTH_CHECKS.items():
        os.environ.setdefault(name, value)
    # What the head would make up, and the other hosts could not know.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with own_folder("dfm-", options.keep) as folder:
        found = _run(options.inside, folder, options.clients)
    Console(width=None if sys.stdout.isatty() else 200).print(_table(found))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(entry["broken"] for entry in found) else 0


def _run(prefix: str, folder: Path, clients: int) -> list[dict[str, Any]]:
    from tests.chaos.bodies import make_bodies, undisturbed
    from tests.serve.conftest import write_tokenizer
    from tests.tiny import VOCAB, make_pair

    pair = make_pair(folder / "pair")
    write_tokenizer(Path(pair.target), VOCAB)
    found: list[dict[str, Any]] = []
    expected: list[Answer] = []
    for width, count in _HOSTS.items():
        hosts = Hosts(prefix, count)
        (folder / str(width)).mkdir()
        with HostCluster(hosts, pair, folder / str(width), width=width) as cluster:
            cluster.deploy()
            bodies = make_bodies(cluster.url)
            answers = undisturbed(cluster.url, bodies)
            expected = expected or answers
            differ = sum(a != e for a, e in zip(answers, expected, strict=True))
            trial = _Trial(hosts, cluster, bodies, clients, expected)
            for what, victims in _CUTS[width].items():
                entry = trial.cut(what, victims)
                entry["tp"] = 2 * width
                if differ:
                    entry["broken"].append(f"{differ} undisturbed answers differ from one host's")
                found.append(entry)
    return found


_Victims = Callable[[list[int], Sequence[int]], Sequence[int]]
_CUTS: dict[int, dict[str, _Victims]] = {
    1: {
        "another host is free": lambda homes, every: homes,
        "no host is left": lambda homes, every: every,
    },
    2: {
        "the second host of a replica": lambda homes, every: homes[1:],
        "the first, with the replica's process": lambda homes, every: homes[:1],
    },
}
"""Which hosts are cut off, given the serving replica's and all there are."""


@dataclasses.dataclass
class _Trial:
    """Cuts hosts off while clients stream."""

    hosts: Hosts
    cluster: HostCluster
    bodies: list[dict[str, Any]]
    clients: int
    expected: Sequence[Answer]

    def cut(self, what: str, victims: _Victims) -> dict[str, Any]:
        """Cut hosts off under load, wait for another place to serve, and mend them."""
        entry: dict[str, Any] = {"what": what}
        load = Load(self.cluster.url, self.bodies, self.clients)
        spare = True
        try:
            until(lambda: len(load.running()) == self.clients, "all streams run", _BEGUN_TIMEOUT_S)
            time.sleep(1.0)
            homes = self.cluster.homes()
            if not homes:
                raise RuntimeError("streams run, and no replica says that it serves")
            cut = victims(homes, self.hosts.numbers)
            spare = len(cut) < len(self.hosts.numbers)
            at = time.monotonic()
            for number in cut:
                self.hosts.cut(number)
            if spare:
                back = _seconds(lambda: self._served_without(cut), at, _BACK_TIMEOUT_S)
                entry["served_elsewhere_s"] = back
        finally:
            if not spare:
                load.hold()
            records = load.finish()
        entry |= _judge(records, self.expected, at, spare=spare)
        for number in cut:
            self.hosts.mend(number)
        if spare:
            self._rejoin(cut, entry)
        return entry

    def _served_without(self, cut: Sequence[int]) -> bool:
        homes = self.cluster.homes()
        return bool(homes) and not set(homes) & set(cut)

    def _rejoin(self, cut: Sequence[int], entry: dict[str, Any]) -> None:
        """Wait until what ran on mended hosts is gone, and have them join again."""
        mended = time.monotonic()
        gone = _seconds(
            lambda: not any(map(self.cluster.engine_processes, cut)), mended, _FREED_TIMEOUT_S
        )
        entry["freed_after_mending_s"] = gone
        if gone is None:
            entry["broken"].append("processes of the old replica live on")
        for number in cut:
            self.cluster.join(number)


def _seconds(condition: Callable[[], bool], since: float, timeout_s: float) -> float | None:
    try:
        until(condition, "", timeout_s, poll_s=0.2)
    except TimeoutError:
        return None
    return time.monotonic() - since


def _judge(
    records: Sequence[Record], expected: Sequence[Answer], at: float, *, spare: bool
) -> dict[str, Any]:
    ends = Counter(str(record.end) for record in records)
    hit = [record for record in records if record.running_at(at)]
    finished = [record for record in records if record.end == "finished"]
    differ = sum(record.answer != expected[record.body] for record in finished)
    broken = [f"{differ} answers differ"] if differ else []
    lost = len(records) - ends["finished"]
    if spare and lost:
        broken.append(f"{lost} requests lost")
    if not spare and ends["failed"] != len(hit):
        broken.append(f"{ends['failed']} of {len(hit)} streams ended with an error event")
    waits = sorted(r.pause_after(at) if spare else r.ended - at for r in hit)
    details = Counter(r.detail for r in records if r.end != "finished")
    return {
        "hit": len(hit),
        "ends": dict(ends),
        "differ": differ,
        "waits_s": waits,
        "details": dict(details),
        "broken": broken,
    }


def _table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="a host is cut off", caption="seconds")
    table.add_column("while")
    table.add_column("tp", justify="right")
    names = ("hit", "finished", "failed", "cut", "refused", "differ")
    for name in (*names, "wait p50", "wait max", "served elsewhere", "freed after mending"):
        table.add_column(name, justify="right")
    table.add_column("kept")
    for entry in found:
        ends, waits = entry["ends"], entry["waits_s"]
        counts = [entry["hit"], *(ends.get(n, 0) for n in names[1:-1]), entry["differ"]]
        times = [statistics.median(waits) if waits else None, max(waits, default=None)]
        times += [entry.get("served_elsewhere_s"), entry.get("freed_after_mending_s")]
        shown = ["-" if t is None else f"{t:.1f}" for t in times]
        kept = "; ".join(entry["broken"]) or "yes"
        table.add_row(entry["what"], str(entry["tp"]), *map(str, counts), *shown, kept)
    return table


if __name__ == "__main__":
    sys.exit(main())
