"""A long run under load with clients that leave: nothing may grow, and every request is counted.

    python -m tests.soak --minutes 30 [--haproxy] [--output soak.json]

Serves a tiny random float32 pair at tp 2 on a Ray of its own. After a warm-up, memory, open files,
threads, shared memory and pages are sampled; every scrape of /metrics must say accepted = ended +
running + waiting. Ends with 1 when that fails, a request fails, or something grows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_serve.bench.server import local_server
from dflash_serve.config import EngineConfig
from tests.serve.conftest import write_tokenizer
from tests.tiny import VOCAB, make_pair

from .load import Load
from .vitals import by_kind, shared_memory

__all__ = ["grown", "main", "unbalanced"]

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_MOST_RUNNING = 16
_WARM_UP_SHARE = 0.2
"""Of the time, before what counts as the start: pools fill, and caches of interpreters."""
_SLACK = {"rss_mib": 24.0, "pss_mib": 24.0, "files": 16.0, "threads": 8.0, "processes": 0.0}
"""How much more than at the start a kind of process may hold at the end."""
_SETTLE_S = 20.0

Page = dict[str, float]
Sample = dict[str, Any]


def scrape(url: str) -> Page:
    """The server's /metrics page: sums of the series of each name."""
    with _OPENER.open(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    page: Page = {"series": float(sum(not line.startswith("#") for line in lines))}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            page[name] = page.get(name, 0.0) + float(line.rpartition(" ")[2])
    return page


def unbalanced(page: Page) -> str | None:
    """What is wrong with a page's counts of requests, or None."""
    accepted = page["dflash_engine_requests_accepted_total"]
    ended = page["dflash_engine_requests_ended_total"]
    running, waiting = page["vllm:num_requests_running"], page["vllm:num_requests_waiting"]
    if accepted == ended + running + waiting:
        return None
    return f"accepted {accepted:g}, ended {ended:g}, running {running:g}, waiting {waiting:g}"


def take(url: str, began: float) -> Sample:
    """One sample of everything."""
    page = scrape(url)
    return {
        "seconds": time.monotonic() - began,
        "processes": by_kind(os.getpid()),
        "shm": shared_memory(),
        "pages": page["dflash_pages"],
        "pages_in_use": page["vllm:kv_cache_usage_perc"] * page["dflash_pages"],
        "series": page["series"],
        "accepted": page["dflash_engine_requests_accepted_total"],
        "unbalanced": unbalanced(page),
    }


def grown(start: Sample, end: Sample) -> list[str]:
    """What holds more at the end than at the start, by more than `_SLACK`."""
    found = []
    for kind, vitals in end["processes"].items():
        before = start["processes"].get(kind, {})
        for name, value in vitals.items():
            if value > before.get(name, 0.0) + _SLACK[name]:
                found.append(f"{kind} {name}: {before.get(name, 0.0):.0f} then {value:.0f}")
    if end["shm"]["files"] > start["shm"]["files"]:
        found.append(f"/dev/shm: {start['shm']['files']:g} files, then {end['shm']['files']:g}")
    if end["series"] > start["series"]:
        found.append(f"/metrics: {start['series']:g} series, then {end['series']:g}")
    return found


def table(points: dict[str, Sample]) -> Table:
    """Samples side by side."""
    made = Table(title="held at the start (after the warm-up), in the middle and at the end")
    for head in ("", *points):
        made.add_column(head, justify="right" if head else "left")
    kinds = sorted(next(iter(points.values()))["processes"])
    for kind in kinds:
        for name in ("rss_mib", "pss_mib", "files", "threads"):
            values = (p["processes"].get(kind, {}).get(name, 0.0) for p in points.values())
            made.add_row(f"{kind} {name}", *(f"{value:.0f}" for value in values))
    sums = (sum(k["pss_mib"] for k in p["processes"].values()) for p in points.values())
    made.add_row("all pss_mib", *(f"{value:.0f}" for value in sums))
    for name in ("files", "mib"):
        made.add_row(f"/dev/shm {name}", *(f"{p['shm'][name]:.1f}" for p in points.values()))
    for name in ("pages_in_use", "series", "accepted"):
        made.add_row(name, *(f"{p[name]:.0f}" for p in points.values()))
    return made


def soak(url: str, model: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Load a server for the time asked for; returns samples and what was wrong."""
    began = time.monotonic()
    length = 60.0 * options.minutes
    load = Load(url, model, clients=options.clients, leaving=options.leaving, seed=options.seed)
    samples: list[Sample] = []
    try:
        while time.monotonic() - began < length:
            samples.append(take(url, began))
            if len(samples) % 10 == 1:
                held = sum(k["pss_mib"] for k in samples[-1]["processes"].values())
                console.print(f"{samples[-1]['seconds']:.0f} s: {dict(load.ends)}, {held:.0f} MiB")
            time.sleep(options.every)
    finally:
        load.stop()
    rest = _await_rest(url, began)
    warm = [s for s in samples if s["seconds"] >= _WARM_UP_SHARE * length] or samples
    broken = grown(warm[0], samples[-1])
    broken += [f"{s['seconds']:.0f} s: {s['unbalanced']}" for s in samples if s["unbalanced"]]
    if rest["pages_in_use"]:
        broken.append(f"{rest['pages_in_use']:g} pages in use with no request running")
    if load.ends["failed"] or load.ends["refused"]:
        broken.append(f"requests {dict(load.ends)}: {load.examples}")
    points = {"start": warm[0], "middle": warm[len(warm) // 2], "end": samples[-1], "rest": rest}
    console.print(table(points))
    return {"ends": load.ends, "broken": broken, "points": points, "samples": samples}


def _await_rest(url: str, began: float) -> Sample:
    """A sample once nothing runs any more, or when that takes too long."""
    deadline = time.monotonic() + _SETTLE_S
    while (sample := take(url, began))["pages_in_use"] and time.monotonic() < deadline:
        time.sleep(0.5)
    return sample


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24, help="streams at a time")
    parser.add_argument("--leaving", type=float, default=0.25, help="share that leaves early")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--haproxy", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends too
    console = Console(width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="dfs-") as name:
        folder = Path(name)
        pair = make_pair(folder / "pair")
        write_tokenizer(Path(pair.target), VOCAB)
        config = EngineConfig(
            target=pair.target,
            draft=pair.draft,
            tensor_parallel_size=2,
            executor="mp",
            device="cpu",
            dtype="float32",
            threads=1,
            max_model_len=512,
            max_running=_MOST_RUNNING,
        )
        with local_server(config, folder, haproxy=options.haproxy) as (url, model):
            report = soak(url, model, options, console)
    console.print(dict(report["ends"]))
    for text in report["broken"]:
        console.print(f"broken: {text}", markup=False)
    if options.output is not None:
        report["options"] = {k: str(v) for k, v in vars(options).items()}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
