"""Time to the first token and cache hits of prompts that share long prefixes, over HTTP.

    python -m dflash_serve.bench.routing --url http://127.0.0.1:8000 --model qwen3-8b

Measures a server as it stands; deploy it with another `routing.policy` to compare. On a CPU,
`python -m tests.serve.bench_routing` deploys three replicas with each policy in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["Sample", "Workload", "measure", "prompts", "summary", "table"]

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local
_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests in groups that share a prefix, in random order, a fixed number at a time.

    Attributes:
        groups: different prefixes.
        requests: requests of each group.
        prefix_tokens, suffix_tokens: of one prompt; the suffix is the request's own.
        max_tokens: output of one request.
        concurrency: requests under way at any time.
        vocabulary: prompts hold ids from 2 up to this.
        seed: of the ids and the order.
    """

    groups: int = 24
    requests: int = 8
    prefix_tokens: int = 1024
    suffix_tokens: int = 32
    max_tokens: int = 4
    concurrency: int = 4
    vocabulary: int = 290
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        first_s: seconds from sending it to its first event with a token.
        total_s: seconds to its end.
        prompt_tokens, cached_tokens: as the server counted.
    """

    first_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int


def prompts(workload: Workload) -> list[list[int]]:
    """The prompts of a workload in the order they are sent."""
    rng = random.Random(workload.seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, workload.vocabulary) for _ in range(count)]

    prefixes = [ids(workload.prefix_tokens) for _ in range(workload.groups)]
    made = [
        [*prefix, *ids(workload.suffix_tokens)]
        for prefix in prefixes
        for _ in range(workload.requests)
    ]
    rng.shuffle(made)
    return made


def measure(url: str, model: str, workload: Workload) -> list[Sample]:
    """Send a workload to a server.

    Raises:
        OSError: the server is not there or refuses a request.
    """
    waiting = iter(prompts(workload))
    lock = threading.Lock()

    def one(_: int) -> list[Sample]:
        samples: list[Sample] = []
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return samples
            samples.append(_ask(url, model, prompt, workload.max_tokens))

    with ThreadPoolExecutor(workload.concurrency) as pool:
        return [s for samples in pool.map(one, range(workload.concurrency)) for s in samples]


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Hit rate (cached over prompt tokens), and percentiles of the times in milliseconds."""
    firsts = sorted(1000 * sample.first_s for sample in samples)
    return {
        "requests": len(samples),
        "hit_rate": sum(s.cached_tokens for s in samples) / sum(s.prompt_tokens for s in samples),
        "first_p50_ms": statistics.median(firsts),
        "first_p90_ms": firsts[int(0.9 * (len(firsts) - 1))],
        "total_p50_ms": 1000 * statistics.median(sample.total_s for sample in samples),
    }


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Summaries as text, a line each."""
    head = f"{'routing':<14}{'hit rate':>10}{'p50 TTFT':>12}{'p90 TTFT':>12}{'p50 total':>12}"
    lines = [
        f"{name:<14}{row['hit_rate']:>10.1%}{row['first_p50_ms']:>9.0f} ms"
        f"{row['first_p90_ms']:>9.0f} ms{row['total_p50_ms']:>9.0f} ms"
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])


def _ask(url: str, model: str, prompt: list[int], max_tokens: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] = {}
    with _OPENER.open(request, timeout=_TIMEOUT_S) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise OSError(f"the server broke off: {event['error']}")
            if first is None and any(c.get("token_ids") for c in event.get("choices", ())):
                first = time.perf_counter()
            usage = event.get("usage") or usage
    ended = time.perf_counter()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Sample((first or ended) - began, ended - began, usage["prompt_tokens"], cached)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path)
    add_workload(parser)
    options = parser.parse_args()
    workload = read_workload(options)
    row = summary(measure(options.url, options.model, workload))
    print(table({"as deployed": row}))
    if options.output is not None:
        report = {"workload": dataclasses.asdict(workload), "rows": {"as deployed": row}}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Give a parser an option for every field of a workload."""
    for field in dataclasses.fields(Workload):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default)


def read_workload(options: argparse.Namespace) -> Workload:
    """The workload that parsed options describe."""
    return Workload(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Workload)})


if __name__ == "__main__":
    main()
