"""The whole path with the real engine: a tiny random pair, deployed from a config file."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from ray import serve

from dflash_serve.config import EngineConfig
from dflash_serve.serve.app import build_app
from dflash_serve.serve.processes import is_running
from dflash_serve.serve.settings import ServeSettings
from dflash_serve.serve.validate import BUILDER, validate_config
from tests.engines import requests, run
from tests.tiny import VOCAB, make_pair

from .conftest import free_port, placement_groups, write_tokenizer
from .streams import StreamReader
from .waiting import until

pytestmark = pytest.mark.ray

PROMPTS = [[5, 17, 200, 9], [250, 3, 3, 3, 41, 77]]
MAX_TOKENS = 24
LONG = 120


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """With a tokenizer of words, so that there is text to lose."""
    pair = make_pair(tmp_path_factory.mktemp("pair"))
    write_tokenizer(Path(pair.target), VOCAB)
    return pair


@pytest.fixture(scope="module")
def url(ray_cluster, pair, tmp_path_factory):
    """The pair at tp 2, deployed by Serve's own command line from a config file."""
    port = free_port()
    engine = {"target": pair.target, "draft": pair.draft, "tensor_parallel_size": 2}
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "ERROR"},
        "applications": [
            {
                "name": "tiny",
                "route_prefix": "/",
                "import_path": BUILDER,
                "args": {
                    "model": "tiny",
                    "engine": engine | {"device": "cpu", "threads": 1},
                    "rank_cpus": 0.5,
                    "health_check_period_s": 0.5,
                    "health_check_timeout_s": 4,
                    "graceful_shutdown_timeout_s": 2,
                    "admin": True,
                },
            }
        ],
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    validate_config(path).require_valid()
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(path)]
    address = ray_cluster.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, timeout=120)
    until(lambda: serve.status().applications["tiny"].status == "RUNNING", "the pair runs", 120)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def complete(url, prompt, **changes):
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return httpx.post(f"{url}/v1/completions", json=body | changes, timeout=120)


def replica(url):
    found = httpx.get(f"{url}/server_info", timeout=30).json().get("replicas") or [None]
    return found[0]


def test_served_ids_are_those_of_the_engine_alone(url, pair):
    config = EngineConfig(target=pair.target, draft=pair.draft, device="cpu")
    expected = run(config, requests(PROMPTS, max_tokens=MAX_TOKENS)).ids
    served = [complete(url, prompt).json()["choices"][0]["token_ids"] for prompt in PROMPTS]
    assert served == expected


def test_server_info_shows_the_pair(url):
    info = httpx.get(f"{url}/server_info", timeout=30).json()
    assert info["speculative_algorithm"] == "DFLASH"
    assert info["replicas"][0]["engine"]["tensor_parallel_size"] == 2
    assert info["replicas"][0]["engine"]["executor"] == "ray"


def test_metrics_and_health_answer(url):
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert "vllm:" in httpx.get(f"{url}/metrics", timeout=30).text


# -- what a client sees while processes die --------------------------------------------------


def body(prompt, **changes):
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": LONG, "temperature": 0}
    return fields | {"ignore_eos": True, "return_token_ids": True} | changes


def clients(url):
    """Bodies of requests of every kind, long enough to be killed in the middle."""
    sampled = body(PROMPTS[1], temperature=1.0, seed=11)
    words = ask(url, sampled)["choices"][0]["text"].split()
    # Ends shortly before its length; the other stop begins in the middle, is held back, and fails.
    stops = [" ".join(words[-10:-7]), f"{words[LONG // 2]} t0 t0"]
    return [
        body(PROMPTS[0]),
        sampled,
        sampled | {"stop": stops},
        body(PROMPTS[1], temperature=0.7, seed=12, top_p=0.9, top_k=40),
    ]


def ask(url, body_):
    response = httpx.post(f"{url}/v1/completions", json=body_, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def outcome(answer):
    choice, usage = answer["choices"][0], answer["usage"]
    return (
        choice["text"],
        choice["token_ids"],
        choice["finish_reason"],
        # What the prefix cache had is not the same twice.
        {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    )


def streamed(stream):
    answer = stream.answer(120)
    usage = {n: answer.usage[n] for n in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return answer.text, answer.token_ids, answer.finish_reason, usage


def run_and_kill(url, bodies, find_victim):
    """Every body streamed and one not; a process dies in the middle. Returns the outcomes."""
    options = {"stream_options": {"include_usage": True}}
    with ThreadPoolExecutor() as pool:
        streams = [StreamReader(url, body_ | options) for body_ in bodies]
        plain = pool.submit(ask, url, bodies[1])
        for stream in streams:
            until(lambda s=stream: s.lines_read > 10, "the stream is under way", 60)
        os.kill(find_victim(), signal.SIGKILL)
        assert all(stream.is_alive() for stream in streams), "over before the kill"
        return [streamed(stream) for stream in streams], outcome(plain.result())


@pytest.fixture(scope="module")
def undisturbed(url):
    """Requests, and what they bring when nothing happens."""
    bodies = clients(url)
    with ThreadPoolExecutor() as pool:
        expected = [outcome(answer) for answer in pool.map(lambda b: ask(url, b), bodies)]
    assert expected[2][2] == "stop"
    return bodies, expected


@pytest.mark.slow
def test_a_trace_of_running_steps_has_a_file_for_every_rank_and_changes_no_answer(url, undisturbed):
    bodies, expected = undisturbed
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, url, body_) for body_ in bodies]
        order = {"steps": 3, "timeout_s": 60}
        traced = httpx.post(f"{url}/admin/trace", json=order, timeout=90)
        assert [outcome(answer.result()) for answer in answers] == expected
    assert traced.status_code == 200, traced.text
    paths = [Path(path) for path in traced.json()["paths"]]
    assert [path.name for path in paths] == ["trace-rank0.json", "trace-rank1.json"]
    for path in paths:
        assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_killed_rank_costs_the_clients_nothing(url, ray_cluster, undisturbed, victim):
    groups = placement_groups(ray_cluster)
    bodies, expected = undisturbed
    before = replica(url)["config"]
    ranks = [rank["pid"] for rank in before["ranks"]]
    found, plain = run_and_kill(url, bodies, lambda: ranks[victim])
    assert found == expected
    assert plain == expected[1]
    assert not any(is_running(pid) for pid in ranks)
    assert replica(url)["config"]["pid"] == before["pid"], "another replica"
    assert placement_groups(ray_cluster) == groups


def busy_replica(url):
    """The process of the replica that works on most requests."""
    replicas = httpx.get(f"{url}/server_info", timeout=30).json()["replicas"]
    assert len(replicas) == 2
    return max(replicas, key=lambda r: r["outstanding"])["config"]["pid"]


@pytest.mark.slow
def test_killed_replica_costs_the_clients_nothing(url, pair, undisturbed):
    bodies, expected = undisturbed
    settings = ServeSettings(
        model="tiny",
        engine={"target": pair.target, "draft": pair.draft, "device": "cpu", "threads": 1},
        replicas=2,
        rank_cpus=0.5,
        graceful_shutdown_timeout_s=2,
    )
    serve.run(build_app(settings), name="two", route_prefix="/two")
    two = f"{url}/two"
    found, plain = run_and_kill(two, bodies, lambda: busy_replica(two))
    assert found == expected
    assert plain == expected[1]
    serve.delete("two")
