"""The whole path with the real engine: a tiny random pair, deployed from a config file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from ray import serve

from dflash_serve.config import EngineConfig
from dflash_serve.serve.processes import is_running
from dflash_serve.serve.validate import BUILDER, validate_config
from tests.engines import requests, run
from tests.tiny import make_pair

from .conftest import free_port, placement_groups
from .streams import StreamReader
from .waiting import until

pytestmark = pytest.mark.ray

PROMPTS = [[5, 17, 200, 9], [250, 3, 3, 3, 41, 77]]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


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


def test_killed_rank_mid_stream_gives_an_error_and_a_new_gang(url, ray_cluster):
    groups = placement_groups(ray_cluster)
    before = replica(url)
    ranks = [rank["pid"] for rank in before["config"]["ranks"]]
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 480, "ignore_eos": True}
    stream = StreamReader(url, body | {"return_token_ids": True})
    assert stream.begun.wait(10)
    os.kill(ranks[1], signal.SIGKILL)
    assert "rank 1 died" in stream.events(20)[-1]["error"]["message"]
    until(lambda: not any(is_running(pid) for pid in ranks), "the old ranks are gone", 10)
    until(lambda: (replica(url) or before)["replica"] != before["replica"], "a new replica", 60)
    assert len(complete(url, PROMPTS[0]).json()["choices"][0]["token_ids"]) == MAX_TOKENS
    until(lambda: placement_groups(ray_cluster) == groups, "one placement group", 10)
