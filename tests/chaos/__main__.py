"""Faults put into a running deployment under load, in rounds.

    python -m tests.chaos [--faults rank0,replica] [--rounds 3] [--output chaos.json]

Starts a Ray of its own, deploys a tiny random float32 pair at tp 2, keeps eight clients streaming,
and kills, stops and breaks parts of it. Ends with 1 when a promise was broken. The faults of the
GCS need a redis-server on PATH (Debian, Ubuntu: apt-get install redis-server).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .faults import FAULTS, Fault
from .folder import own_folder
from .redis import find_redis, redis_server
from .report import make_table, write_json
from .rounds import Plan, Round, run_round

__all__ = ["main", "run"]

_WIDTH = 200
"""Of the table where there is no terminal to ask."""


def run(
    faults: Sequence[Fault],
    *,
    rounds: int,
    rounds_other: int,
    clients: int,
    seed: int,
    console: Console,
    done: list[Round],
    keep: bool = False,
) -> None:
    """Run rounds of each fault on one deployment per number of replicas.

    Args:
        rounds: of the faults that are repeated most (`Fault.often`).
        rounds_other: of the others.
        done: receives every round when it is over.
        keep: leave the temporary folder, Ray's logs and the flight records in it, and say where.

    Raises:
        RuntimeError: the undisturbed run differs from itself.
        TimeoutError: the deployment did not come up, or did not take the load.
    """
    from tests.serve.conftest import write_tokenizer
    from tests.tiny import VOCAB, make_pair

    from .bodies import make_bodies, undisturbed
    from .cluster import Cluster

    counts = {f.name: rounds if f.often else rounds_other for f in faults}
    with (
        own_folder("dfc-", keep) as folder,
        _state(folder, faults),
        _progress(console, sum(counts.values())) as show,
    ):
        show("starting")
        pair = make_pair(folder / "pair")
        write_tokenizer(Path(pair.target), VOCAB)
        with Cluster(pair, folder) as cluster:
            bodies = expected = None
            for fault in sorted(faults, key=lambda f: f.replicas):
                if cluster.replicas != fault.replicas:
                    show(f"deploying {fault.replicas} replicas")
                    cluster.deploy(fault.replicas)
                if bodies is None or expected is None:
                    show("undisturbed run")
                    bodies = make_bodies(cluster.url)
                    expected = undisturbed(cluster.url, bodies)
                    if expected != undisturbed(cluster.url, bodies):
                        raise RuntimeError("the undisturbed run differs from itself")
                for number in range(1, counts[fault.name] + 1):
                    title = f"{fault.name} {number}/{counts[fault.name]}"
                    plan = Plan(bodies, expected, clients, lambda s, t=title: show(f"{t}: {s}"))
                    began = time.monotonic()
                    result = run_round(cluster, fault, plan, random.Random(f"{seed} {title}"))
                    done.append(result)
                    show(None)
                    verdict = "; ".join(result.broken) or "kept"
                    console.print(f"{title}: {verdict} ({time.monotonic() - began:.0f} s)")


def _state(folder: Path, faults: Sequence[Fault]) -> contextlib.AbstractContextManager[object]:
    """Where the head's state is kept: in a Redis where a fault asks for one."""
    wanted = any(fault.redis for fault in faults)
    return redis_server(folder / "redis") if wanted else contextlib.nullcontext()


@contextmanager
def _progress(console: Console, rounds: int) -> Iterator:
    """A function that shows what is going on; None counts a round."""
    columns = (
        *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=rounds)

        def show(state: str | None) -> None:
            if state is None:
                progress.advance(task)
            else:
                progress.update(task, description=state)

        yield show


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=(__doc__ or "").partition("\n")[0],
        epilog="faults: " + "; ".join(f"{f.name} ({f.what})" for f in FAULTS),
    )
    parser.add_argument("--faults", help=f"comma-separated, of {','.join(names)}; all if left out")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of deaths and hangs of ranks and replicas"
    )
    parser.add_argument("--rounds-other", type=int, help="of the other faults; half if left out")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--seed", type=int, default=0, help="of what is left to chance")
    parser.add_argument(
        "--haproxy", action="store_true", help="HAProxy in place of Serve's Python proxy"
    )
    parser.add_argument("--keep", action="store_true", help="keep logs and flight records")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    chosen = options.faults.split(",") if options.faults else names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"unknown faults {', '.join(unknown)}; there are {', '.join(names)}")
    faults = [fault for fault in FAULTS if fault.name in chosen]
    if any(fault.redis for fault in faults):
        try:
            find_redis()
        except FileNotFoundError as error:
            parser.error(str(error))
    if options.haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"  # read when Serve is imported
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    rounds: list[Round] = []
    with contextlib.suppress(KeyboardInterrupt):  # the rounds before it count
        run(
            faults,
            rounds=options.rounds,
            rounds_other=options.rounds_other or (options.rounds + 1) // 2,
            clients=options.clients,
            seed=options.seed,
            console=console,
            done=rounds,
            keep=options.keep,
        )
    if not rounds:
        return 1
    console.print(make_table(rounds))
    if options.output is not None:
        write_json(options.output, rounds, vars(options) | {"output": str(options.output)})
    return 1 if any(r.broken for r in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
