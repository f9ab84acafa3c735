"""The ways to choose a replica, one after another, over a tiny random pair on CPU.

    python -m tests.serve.bench_routing --output routing.json

Three replicas, one thread each. The caches of all three together hold every prefix of the
workload with little to spare, so that a replica cannot keep them all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from dflash_serve.bench.routing import (
    Workload,
    add_workload,
    measure,
    read_workload,
    summary,
    table,
)

POLICIES = ("round_robin", "two_choices", "prefix")
MODEL = "tiny"
POSITIONS = 4096


def long_pair(folder: Path, positions: int) -> tuple[str, str]:
    """A tiny random pair with room for long prompts, and a tokenizer of words."""
    from tests.serve.conftest import write_tokenizer
    from tests.tiny import VALID_VOCAB, make_pair

    pair = make_pair(folder)
    for path in (pair.target, pair.draft):
        file = Path(path) / "config.json"
        fields = json.loads(file.read_text()) | {"max_position_embeddings": positions}
        file.write_text(json.dumps(fields))
    write_tokenizer(Path(pair.target), VALID_VOCAB)
    return pair.target, pair.draft


def deploy(pair: tuple[str, str], policy: str, options: argparse.Namespace) -> None:
    """Put the replicas up."""
    from ray import serve

    from dflash_serve.serve.app import assemble
    from dflash_serve.serve.settings import ServeSettings

    engine = {
        "target": pair[0],
        "draft": pair[1],
        "device": "cpu",
        "threads": 1,
        "max_model_len": POSITIONS,  # no engine takes a larger pool than its requests could fill
        "kv_cache_gib": options.kv_cache_gib,
        "max_running": 8,
    }
    settings = ServeSettings(
        model=MODEL,
        engine=engine,
        replicas=options.replicas,
        routing={"policy": policy},
        rank_cpus=0.5,
        graceful_shutdown_timeout_s=2,
        # What is measured is not whether a busy machine passes for a dead one.
        health_check_timeout_s=30,
    )
    serve.run(assemble(settings), name="routing", route_prefix="/")


def pool_tokens(url: str) -> int:
    """Tokens the cache of one replica holds."""
    import httpx

    engine = httpx.get(f"{url}/server_info", timeout=30).json()["replicas"][0]["engine"]
    return engine["num_pages"] * engine["page_size"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--kv-cache-gib", type=float, default=0.035, help="of one replica")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    add_workload(parser)
    options = parser.parse_args()
    workload = read_workload(options)
    with tempfile.TemporaryDirectory(prefix="dfs-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        rows, tokens = compare(Path(folder), workload, options)
    print(f"{options.replicas} replicas, each with a cache of {tokens} tokens")
    print(table(rows))
    if options.output is not None:
        settings = {"replicas": options.replicas, "cache_tokens": tokens}
        report = settings | {"workload": dataclasses.asdict(workload), "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def compare(
    folder: Path, workload: Workload, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], int]:
    """A summary per policy, and the tokens one replica's cache holds."""
    import ray
    from ray import serve

    from dflash_serve.serve.stopping import stop
    from tests.serve.conftest import free_port

    pair = long_pair(folder / "pair", POSITIONS)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    port = free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    url, rows, tokens = f"http://127.0.0.1:{port}", {}, 0
    try:
        for policy in options.policies:
            deploy(pair, policy, options)
            tokens = pool_tokens(url)
            warm = dataclasses.replace(workload, groups=6, requests=1, seed=workload.seed + 1)
            measure(url, MODEL, warm)
            rows[policy] = summary(measure(url, MODEL, workload))
            print(table({policy: rows[policy]}).splitlines()[1], flush=True)
            serve.delete("routing")
    finally:
        stop()
    return rows, tokens


if __name__ == "__main__":
    main()
