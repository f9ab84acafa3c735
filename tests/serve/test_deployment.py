"""The application on a real Ray: stand-in ranks where only the serving layer is under test."""

import asyncio
import contextlib
import os
import random
import signal
import threading

import httpx
import pytest
import yaml
from ray import serve

from dflash_serve.serve.app import assemble, build_app
from dflash_serve.serve.processes import is_running
from dflash_serve.serve.settings import ServeSettings

from .conftest import ROOT, free_port, placement_groups, run_dirs
from .fake_rank import VOCABULARY
from .fake_replica import FakeReplica
from .streams import StreamReader
from .waiting import until

pytestmark = pytest.mark.ray

LONG = 50_000  # output tokens of a request that outlives its test


@pytest.fixture(scope="module")
def url(ray_cluster):
    port = free_port()
    demo = yaml.safe_load((ROOT / "deployments" / "demo.yaml").read_text())
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        controller_options=demo["controller_options"],
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def fake(url, fake_target):
    """Two stand-in ranks behind one replica; at most three requests at once."""
    settings = ServeSettings(
        model="fake",
        engine={
            "target": fake_target,
            "tensor_parallel_size": 2,
            "device": "cpu",
            "hang_timeout_s": 2,
        },
        rank_cpus=0.5,
        max_ongoing_requests=3,
        health_check_period_s=0.5,
        health_check_timeout_s=2,
        graceful_shutdown_timeout_s=2,
    )
    serve.run(assemble(settings, FakeReplica), name="fake", route_prefix="/")
    yield url
    serve.delete("fake")


def body(**changes):
    return {"model": "fake", "prompt": [5], "max_tokens": 3} | changes


def complete(url, **changes):
    return httpx.post(f"{url}/v1/completions", json=body(**changes), timeout=60)


def replica(url):
    """The one replica's entry of /server_info, or None while there is none."""
    found = httpx.get(f"{url}/server_info", timeout=30).json().get("replicas") or [None]
    return found[0]


def state(url):
    return (replica(url) or {}).get("state")


def rank_pids(url):
    return [rank["pid"] for rank in replica(url)["config"]["ranks"]]


def error_of(response):
    assert response.headers["content-type"].startswith("application/json"), response.text
    return response.json()["error"]


def read_some(url, events=3):
    """Begin a long stream, read a few events, and hang up."""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body(max_tokens=LONG, stream=True), timeout=60
    ) as stream:
        lines = stream.iter_lines()
        for _ in range(events):
            next(lines)


def test_completion_passes_through_ingress_replica_and_ranks(fake):
    answer = complete(fake).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["text"].split() == ["t6", "t7", "t8"]
    assert answer["choices"][0]["finish_reason"] == "length"


def test_server_info_names_every_rank_and_setting(fake):
    info = replica(fake)
    assert len({rank["pid"] for rank in info["config"]["ranks"]}) == 2
    assert info["config"]["tensor_parallel_size"] == 2
    assert info["config"]["max_ongoing_requests"] == 3
    assert set(info["start_seconds"]) == {"create", "report", "rank_map", "initialise"}


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"prompt": [999_999]}, 400, "prompt"),
        ({"prompt": [1] * 100_001}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
    ],
)
def test_refusals_keep_their_field_across_the_handle(fake, changes, status, param):
    response = complete(fake, **changes)
    assert response.status_code == status
    assert error_of(response)["param"] == param
    assert complete(fake).status_code == 200


def test_unknown_path_is_an_openai_error(fake):
    response = httpx.get(f"{fake}/v1/nothing")
    assert response.status_code == 404
    assert "message" in error_of(response)


def test_time_limit_of_serves_proxy_is_an_openai_error(fake):
    headers = {"x-request-timeout-seconds": "0.3"}
    response = httpx.post(
        f"{fake}/v1/completions", json=body(max_tokens=LONG), headers=headers, timeout=30
    )
    assert response.status_code == 408
    assert "message" in error_of(response)
    until(lambda: replica(fake)["outstanding"] == 0, "the request is aborted", 5)


def test_client_that_hangs_up_frees_its_request(fake):
    read_some(fake)
    until(lambda: replica(fake)["outstanding"] == 0, "the request is aborted", 5)
    assert replica(fake)["stats"]["finished"]["abort"] >= 1


def test_clients_that_leave_as_their_request_starts_take_no_place(fake):
    rng = random.Random(7)

    async def leave(client):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 0.02)):
                await client.post(f"{fake}/v1/completions", json=body(max_tokens=LONG))

    async def storm():
        for _ in range(10):
            async with httpx.AsyncClient(timeout=60) as client:
                await asyncio.gather(*(leave(client) for _ in range(10)))

    asyncio.run(storm())
    until(lambda: replica(fake)["outstanding"] == 0, "every request is aborted", 10)
    # All three places are free, for Serve as well as for the replica.
    streams = [StreamReader(fake, body(prompt=[n], max_tokens=400)) for n in range(3)]
    assert all(stream.begun.wait(10) for stream in streams)
    for stream in streams:
        stream.answer(30)


def test_more_requests_than_the_limit_are_refused_as_overload(fake):
    streams = [threading.Thread(target=read_some, args=(fake, 400), daemon=True) for _ in range(3)]
    for stream in streams:
        stream.start()
    until(lambda: replica(fake)["outstanding"] == 3, "three requests run", 10)
    response = complete(fake)
    for stream in streams:
        stream.join(timeout=30)
    assert response.status_code == 429
    assert "retry-after" in response.headers
    error_of(response)
    until(lambda: replica(fake)["outstanding"] == 0, "the streams are over", 10)


def counting(first, tokens):
    """A stream over the stand-in ranks, and what it must say."""
    body_ = body(prompt=[first], max_tokens=tokens, return_token_ids=True)
    return body_, [(first + 1 + n) % VOCABULARY for n in range(tokens)]


def test_killed_rank_shows_as_a_pause_only(fake, ray_cluster):
    groups = placement_groups(ray_cluster)
    before = replica(fake)
    ranks = rank_pids(fake)
    bodies = [counting(first, 400) for first in (5, 900)]
    streams = [StreamReader(fake, body_) for body_, _ in bodies]
    for stream in streams:
        assert stream.begun.wait(10)
    os.kill(ranks[1], signal.SIGKILL)
    for stream, (_, ids) in zip(streams, bodies, strict=True):
        answer = stream.answer(60)
        assert answer.token_ids == ids
        assert answer.text.split() == [f"t{i}" for i in ids]
    # Nothing of the old gang is left, and the same replica has another in the same bundles.
    after = replica(fake)
    assert after["replica"] == before["replica"]
    assert after["config"]["pid"] == before["config"]["pid"]
    assert after["restarts"] == before["restarts"] + 1
    assert not set(ranks) & set(rank_pids(fake))
    assert not any(is_running(pid) for pid in ranks)
    assert placement_groups(ray_cluster) == groups
    assert len(run_dirs()) == 1
    page = httpx.get(f"{fake}/metrics", timeout=30).text
    assert 'dflash_requests_resumed_total{engine="all",model_name="fake"} 2.0' in page
    assert 'state="serving"} 1.0' in page


def test_health_passes_and_readiness_does_not_while_the_ranks_start_again(fake):
    before = replica(fake)
    os.kill(rank_pids(fake)[0], signal.SIGKILL)
    until(lambda: httpx.get(f"{fake}/ready", timeout=30).status_code == 503, "not ready", 10)
    assert replica(fake)["state"] == "restarting"
    assert httpx.get(f"{fake}/health", timeout=30).status_code == 200
    assert complete(fake).status_code == 200  # waits until there is a gang again
    assert httpx.get(f"{fake}/ready", timeout=30).status_code == 200
    assert replica(fake)["replica"] == before["replica"]


@pytest.mark.slow
def test_too_many_deaths_in_a_row_replace_the_replica(fake):
    before = replica(fake)
    for _ in range(4):
        ranks = until(lambda: state(fake) == "serving" and rank_pids(fake), "a gang runs", 30)
        os.kill(ranks[0], signal.SIGKILL)
        until(lambda p=ranks: not is_running(p[0]), "the rank is gone", 10)
        until(lambda: state(fake) != "serving", "its death is noticed", 10)
    until(lambda: (replica(fake) or before)["replica"] != before["replica"], "a new replica", 60)
    assert complete(fake).status_code == 200


def test_hung_rank_is_noticed_and_its_request_goes_on(fake):
    ranks = rank_pids(fake)
    body_, ids = counting(7, 400)
    stream = StreamReader(fake, body_)
    assert stream.begun.wait(10)
    os.kill(ranks[0], signal.SIGSTOP)
    assert stream.answer(60).token_ids == ids
    until(lambda: not any(is_running(pid) for pid in ranks), "the old ranks are gone", 30)


def test_deleting_the_application_leaves_nothing(url, ray_cluster):
    groups, folders = placement_groups(ray_cluster), run_dirs()
    settings = ServeSettings(engine={"target": "/m/fake", "device": "cpu"}, rank_cpus=0.5)
    serve.run(assemble(settings, FakeReplica), name="gone", route_prefix="/gone")
    pids = rank_pids(f"{url}/gone")
    serve.delete("gone")
    until(lambda: not any(is_running(pid) for pid in pids), "its rank is gone", 10)
    until(lambda: placement_groups(ray_cluster) == groups, "its placement group is gone", 10)
    assert run_dirs() == folders


@pytest.mark.parametrize(
    ("target", "replica_class", "text"),
    [
        ("/m/broken", FakeReplica, "tensor model.norm.weight is missing"),
        ("/m/nowhere", None, "/m/nowhere"),
    ],
)
def test_start_that_cannot_work_fails_with_its_reason(url, target, replica_class, text):
    settings = ServeSettings(
        engine={"target": target, "device": "cpu"}, rank_cpus=0.5, start_attempts=1
    )
    application = assemble(settings, replica_class) if replica_class else build_app(settings)
    target_ = serve.RunTarget(application, name="broken", route_prefix="/broken")
    serve.run_many([target_], wait_for_applications_running=False)
    status = until(
        lambda: (s := serve.status().applications["broken"]).status == "DEPLOY_FAILED" and s,
        "the deployment is given up",
        60,
    )
    assert text in status.deployments["Replica"].message
    serve.delete("broken")
