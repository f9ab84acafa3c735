"""Nodes that come late, drain or are told to end while requests run; stand-in ranks.

The replica fits on no node but those that a test adds, and the ingress stands on the head.
"""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from ray import serve

from dflash_serve.serve.app import assemble, assemble_model
from dflash_serve.serve.settings import ModelSettings, ServeSettings

from .conftest import alive, free_port, node
from .fake_rank import VOCABULARY
from .fake_replica import FakeReplica
from .streams import StreamReader
from .waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CPUS = 16
TOKENS = 3000
BODY = {"model": "fake", "max_tokens": TOKENS, "return_token_ids": True}


@pytest.fixture(scope="module")
def url(ray_cluster, fake_target):
    """An ingress for a model whose replicas are an application of their own."""
    port = free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    settings = ServeSettings(models=[{"model": "fake", "application": "engines"}], ingress_cpus=0.1)
    serve.run(assemble(settings), name="front", route_prefix="/front")
    yield f"http://127.0.0.1:{port}/front"
    serve.shutdown()


@pytest.fixture
def engines(url, fake_target):
    """One replica, asked for and not waited for."""
    settings = ModelSettings(
        model="fake",
        engine={"target": fake_target, "device": "cpu"},
        rank_cpus=CPUS - 1,
        replica_cpus=0.1,
        graceful_shutdown_timeout_s=2,
    )
    application = assemble_model(settings, FakeReplica)
    target = serve.RunTarget(application, name="engines", route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    yield
    serve.delete("engines")


def replicas(url):
    return httpx.get(f"{url}/server_info", timeout=30).json()["replicas"]


def homes(url):
    """The nodes on which a replica serves."""
    return {
        rank["node"]
        for replica in replicas(url)
        if replica["state"] == "serving"
        for rank in replica["config"]["ranks"]
    }


@contextlib.contextmanager
def streams_under_way(url):
    streams = {
        first: StreamReader(url, BODY | {"prompt": [first]}) for first in range(0, 1200, 300)
    }
    for stream in streams.values():
        assert stream.begun.wait(60)
    yield
    for first, stream in streams.items():
        expected = [(first + 1 + n) % VOCABULARY for n in range(TOKENS)]
        assert stream.answer(120).token_ids == expected


def test_a_request_waits_for_a_node_that_joins_after_the_model_was_deployed(
    ray_cluster, url, engines
):
    answers = []

    def ask():
        body = BODY | {"prompt": [5], "max_tokens": 3}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=120))

    client = threading.Thread(target=ask)
    client.start()
    client.join(5)
    assert client.is_alive(), "answered without a replica"
    with node(ray_cluster, CPUS):
        client.join(100)
        assert answers[0].json()["choices"][0]["token_ids"] == [6, 7, 8]


def test_requests_move_from_a_node_that_drains_before_it_ends(ray_cluster, url, engines):
    with node(ray_cluster, CPUS):
        until(lambda: homes(url), "a replica serves", 60)
        (old,) = homes(url)
        with node(ray_cluster, CPUS):
            (new,) = {n["NodeID"] for n in alive(ray_cluster)} - {old, head(ray_cluster)}
            with streams_under_way(url):
                drain(ray_cluster, old)
                until(lambda: homes(url) == {new}, "a replica serves elsewhere", 90)


def test_requests_outlive_a_node_that_is_told_to_end(ray_cluster, url, engines):
    with node(ray_cluster, CPUS) as process:
        until(lambda: homes(url), "a replica serves", 60)
        (old,) = homes(url)
        with node(ray_cluster, CPUS), streams_under_way(url):
            process.terminate()
            until(lambda: homes(url) and old not in homes(url), "served elsewhere", 90)


def head(ray):
    return ray.get_runtime_context().get_node_id()


def drain(ray, node_id):
    address = ray.get_runtime_context().gcs_address
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={address}"]
    command += [f"--node-id={node_id}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message=test", "--deadline-remaining-seconds=60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
