"""Replicas that leave while they work, and requests nobody takes any more; stand-in ranks."""

import os
import signal

import httpx
import pytest
from ray import serve

from dflash_serve.serve.app import _ingress_options, _replica_options, assemble
from dflash_serve.serve.ingress import Ingress
from dflash_serve.serve.settings import ServeSettings

from .conftest import free_port
from .fake_rank import VOCABULARY
from .fake_replica import FakeReplica
from .streams import StreamReader
from .waiting import until

pytestmark = pytest.mark.ray

TOKENS = 500


@pytest.fixture(scope="module")
def base(ray_cluster):
    port = free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def settings_of(fake_target, **changes):
    return ServeSettings(
        model="fake",
        engine={"target": fake_target, "device": "cpu"},
        rank_cpus=0.1,
        replica_cpus=0.1,
        ingress_cpus=0.1,
        graceful_shutdown_timeout_s=1,
        **changes,
    )


def deploy_replicas(settings):
    """The replicas as an application of their own: `serve.run` replaces all of an application."""
    engine = serve.deployment(FakeReplica).options(**_replica_options(settings)).bind(settings)
    return serve.run(engine, name="engines", route_prefix=None)


@pytest.fixture(scope="module")
def url(base, fake_target):
    """An ingress in front of two replicas."""
    settings = settings_of(fake_target, replicas=2)
    handle = deploy_replicas(settings)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**_ingress_options(settings))
    serve.run(ingress.bind(settings, handle), name="front", route_prefix="/front")
    yield f"{base}/front"
    serve.delete("front")
    serve.delete("engines")


def body(first):
    return {"model": "fake", "prompt": [first], "max_tokens": TOKENS, "return_token_ids": True}


def begin(url):
    """Streams on every replica, under way."""
    streams = {first: StreamReader(url, body(first)) for first in range(0, 1200, 200)}
    for stream in streams.values():
        assert stream.begun.wait(20)
    return streams


def check(streams):
    for first, stream in streams.items():
        assert stream.answer(60).token_ids == [(first + 1 + n) % VOCABULARY for n in range(TOKENS)]


def replicas(url):
    return httpx.get(f"{url}/server_info", timeout=30).json()["replicas"]


def test_requests_of_dead_ranks_go_on_while_their_replica_starts_new_ones(url):
    streams = begin(url)
    before = {r["replica"]: r["config"]["pid"] for r in replicas(url)}
    busy = max(replicas(url), key=lambda r: r["outstanding"])
    assert busy["outstanding"]
    os.kill(busy["config"]["ranks"][0]["pid"], signal.SIGKILL)
    check(streams)
    assert {r["replica"]: r["config"]["pid"] for r in replicas(url)} == before
    until(lambda: {r["state"] for r in replicas(url)} == {"serving"}, "both serve", 30)


@pytest.mark.slow
def test_terminated_replica_hands_its_requests_over(url):
    streams = begin(url)
    busy = max(replicas(url), key=lambda r: r["outstanding"])
    assert busy["outstanding"]
    os.kill(busy["config"]["pid"], signal.SIGTERM)
    check(streams)
    until(lambda: len(replicas(url)) == 2, "two replicas again", 60)


@pytest.mark.slow
def test_replacing_all_replicas_under_load_loses_nothing(url, fake_target):
    """A new version comes, and the old replicas get less time than their requests take."""
    streams = begin(url)
    before = {r["replica"] for r in replicas(url) if r["outstanding"]}
    assert len(before) == 2, "one replica has all the work"
    deploy_replicas(settings_of(fake_target, replicas=2))
    check(streams)
    until(lambda: not before & {r["replica"] for r in replicas(url)}, "the old ones are gone", 30)


@pytest.mark.slow
def test_bound_on_attempts_ends_in_an_openai_error(base, fake_target):
    application = assemble(settings_of(fake_target, resume_attempts=0), FakeReplica)
    serve.run(application, name="bounded", route_prefix="/bounded")
    url = f"{base}/bounded"
    stream = StreamReader(url, body(1))
    assert stream.begun.wait(20)
    os.kill(replicas(url)[0]["config"]["ranks"][0]["pid"], signal.SIGKILL)
    error = stream.events(20)[-1]["error"]
    assert "resume_attempts" in error["message"]
    assert "rank 0 died" in error["message"]
    assert error["code"] == "engine_unavailable"
    assert error["type"] == "server_error"
    # A new request has not failed yet: it waits for the ranks.
    response = httpx.post(f"{url}/v1/completions", json=body(1) | {"max_tokens": 2}, timeout=60)
    assert response.status_code == 200
    page = httpx.get(f"{url}/metrics", timeout=30).text
    assert 'dflash_requests_failed_after_resume_total{engine="all",model_name="fake"} 1.0' in page
    serve.delete("bounded")
