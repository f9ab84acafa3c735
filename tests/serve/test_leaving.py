"""Replicas that leave while they work, and requests nobody takes any more; stand-in ranks."""

import os
import signal

import httpx
import pytest
from ray import serve

from dflash_serve.serve.app import (
    _ingress_arguments,
    _ingress_options,
    assemble,
    assemble_model,
)
from dflash_serve.serve.ingress import Ingress
from dflash_serve.serve.settings import ServeSettings

from .conftest import free_port
from .fake_rank import VOCABULARY
from .fake_replica import FakeReplica
from .streams import StreamReader
from .waiting import until

pytestmark = pytest.mark.ray

TOKENS = 500
FEW = {"max_tokens": 2}


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
    return serve.run(replicas_of(settings), name="engines", route_prefix=None)


def replicas_of(settings):
    (model,) = settings.hosted
    return assemble_model(model, FakeReplica)


@pytest.fixture(scope="module")
def url(base, fake_target):
    """An ingress in front of two replicas."""
    settings = settings_of(fake_target, replicas=2)
    handle = deploy_replicas(settings)
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**_ingress_options(settings))
    application = ingress.bind(_ingress_arguments(settings), {"fake": handle})
    serve.run(application, name="front", route_prefix="/front")
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
def test_a_version_that_cannot_start_leaves_the_old_one_serving(url, fake_target):
    """A failed rolling update costs no request, under way or new, and can be rolled back."""
    streams = begin(url)
    broken = settings_of("/m/broken", replicas=2, start_attempts=1)
    target = serve.RunTarget(replicas_of(broken), name="engines", route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    answers = []

    def given_up():
        answers.append(httpx.post(f"{url}/v1/completions", json=body(3) | FEW, timeout=60))
        return serve.status().applications["engines"].status == "DEPLOY_FAILED"

    until(given_up, "the update is given up", 90)
    check(streams)
    answers += [httpx.post(f"{url}/v1/completions", json=body(3) | FEW, timeout=60)]
    assert {answer.status_code for answer in answers} == {200}, answers[-1].text
    deploy_replicas(settings_of(fake_target, replicas=2))
    until(lambda: len(replicas(url)) == 2, "two replicas again", 60)


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
