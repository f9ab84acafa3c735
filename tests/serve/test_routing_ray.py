"""Routing and autoscaling on a real Ray, over stand-in ranks."""

import os
import signal
import threading

import httpx
import pytest
from ray import serve

from dflash_serve.serve.app import assemble
from dflash_serve.serve.settings import ServeSettings

from .conftest import free_port
from .fake_rank import VOCABULARY
from .fake_replica import FakeReplica
from .streams import StreamReader
from .waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PREFIX = [7] * 400
LONG = 1_500  # output tokens: seven seconds or more


@pytest.fixture(scope="module")
def url(ray_cluster):
    port = free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def deploy(target, **changes):
    settings = ServeSettings(
        model="fake",
        engine={"target": target, "device": "cpu", "max_running": 8},
        rank_cpus=0.5,
        health_check_period_s=0.5,
        health_check_timeout_s=2,
        graceful_shutdown_timeout_s=1,
        **changes,
    )
    serve.run(assemble(settings, FakeReplica), name="routed", route_prefix="/")


@pytest.fixture
def two(url, fake_target):
    routing = {"overload_requests": 2, "report_period_s": 0.2}
    deploy(fake_target, replicas=2, routing=routing)
    until(lambda: len(replicas(url)) == 2, "two replicas")
    yield url
    serve.delete("routed")


def replicas(url):
    """Entries of /server_info by the replica's name."""
    found = httpx.get(f"{url}/server_info", timeout=30).json().get("replicas") or []
    return {entry["replica"]: entry for entry in found}


def body(prompt, **changes):
    return {"model": "fake", "prompt": prompt, "max_tokens": 2} | changes


def complete(url, prompt, **changes):
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, **changes), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def worked(url, before):
    """Replicas that generated tokens since `before`."""
    now = replicas(url)
    return {
        name
        for name, entry in now.items()
        if name not in before
        or entry["stats"]["generated_tokens"] > before[name]["stats"]["generated_tokens"]
    }


def test_requests_that_begin_alike_meet_at_one_replica_until_it_dies(two):
    complete(two, [*PREFIX, 1])
    before = replicas(two)
    for last in range(2, 12):
        complete(two, [*PREFIX, last])
    until(lambda: worked(two, before), "the engines' counts have come")
    (favourite,) = worked(two, before)
    os.kill(before[favourite]["config"]["pid"], signal.SIGKILL)
    for last in range(12, 20):
        answer = complete(two, [*PREFIX, last], return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == [last + 1, last + 2]
    until(lambda: len(replicas(two).keys() - {favourite}) == 2, "another replica", 60)
    before = replicas(two)
    for last in range(20, 26):
        complete(two, [*PREFIX, last])
    until(lambda: worked(two, before), "the engines' counts have come")
    assert len(worked(two, before)) == 1


def test_a_session_stays_until_its_replica_is_overloaded(two):
    streams = []
    for number in range(5):
        prompt = [(number * 100) % VOCABULARY] * 3  # nothing in common
        streams.append(StreamReader(two, body(prompt, max_tokens=LONG, user="alice")))
        assert streams[-1].begun.wait(20)
    # Three find it at 0, 1 and 2 above the other, the fourth is sent away, and the session with it.
    held = sorted(entry["outstanding"] for entry in replicas(two).values())
    assert held == [2, 3]
    for stream in streams:
        assert stream.answer(60).finish_reason == "length"


def read_until(url, enough, first):
    """Stream a completion that takes minutes, and hang up when there is enough."""
    asked = body([first], max_tokens=50_000, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as stream:
        for _ in stream.iter_lines():
            if enough.is_set():
                return


@pytest.mark.slow
def test_a_sleeping_model_wakes_grows_and_sleeps_again(url, fake_target):
    scaling = {
        "min_replicas": 0,
        "max_replicas": 2,
        "initial_replicas": 0,
        "target_requests": 1,
        "look_back_s": 11,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "sleep_delay_s": 1,
    }
    deploy(fake_target, autoscaling=scaling)
    assert replicas(url) == {}
    for path in ("/health", "/ready"):
        assert httpx.get(f"{url}{path}", timeout=30).status_code == 200, path
    complete(url, [5])
    enough = threading.Event()
    clients = [threading.Thread(target=read_until, args=(url, enough, n)) for n in (1, 2, 3)]
    for client in clients:
        client.start()
    try:
        until(lambda: len(replicas(url)) == 2, "a second replica", 120)
    finally:
        enough.set()
        for client in clients:
            client.join(60)
    until(lambda: replicas(url) == {}, "the model sleeps", 120)
    serve.delete("routed")
