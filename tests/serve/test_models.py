"""Several models behind one ingress, and one of them changed without it, on a real Ray."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve

from dflash_serve.config import EngineConfig
from dflash_serve.serve.validate import BUILDER, MODEL_BUILDER, validate_config
from tests.engines import requests, run
from tests.tiny import VOCAB, make_pair

from .conftest import free_port, write_tokenizer
from .streams import StreamReader
from .waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [5, 17, 200, 9]
MAX_TOKENS = 120
SIZES = {"small": 1, "wide": 2}
"""Tensor-parallel sizes by model; the second model is an application of its own."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    made = {name: make_pair(folder / name, seed=10 * n) for n, name in enumerate(SIZES)}
    for pair in made.values():
        write_tokenizer(Path(pair.target), VOCAB)
    return made


def model(pairs, name, **changes):
    engine = {"target": pairs[name].target, "draft": pairs[name].draft, "device": "cpu"}
    return {
        "model": name,
        "engine": engine | {"threads": 1, "tensor_parallel_size": SIZES[name]},
        "rank_cpus": 0.5,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 2,
    } | changes


def config(pairs, port, front=None, knobs=None, **changes):
    """A file with both models; `changes` and `knobs` are those of the one that stands alone."""
    models = [model(pairs, "small"), {"model": "wide", "application": "wide"}]
    front = {"models": models} | (front or {})
    own = model(pairs, "wide", **changes)
    deployments = [{"name": "Replica", "user_config": knobs}] if knobs else []
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "ERROR"},
        "applications": [
            {"name": "front", "route_prefix": "/", "import_path": BUILDER, "args": front},
            {
                "name": "wide",
                "route_prefix": None,
                "import_path": MODEL_BUILDER,
                "args": own,
                "deployments": deployments,
            },
        ],
    }


def deploy(file, content):
    """Through Serve's own command line, as an operator does."""
    file.write_text(yaml.safe_dump(content))
    validate_config(file).require_valid()
    command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(file)]
    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    subprocess.run(command, env=environment, check=True, timeout=180)


@pytest.fixture(scope="module")
def deployed(ray_cluster, pairs, tmp_path_factory):
    """URL of the deployment, and a function that deploys a changed file."""
    file, port = tmp_path_factory.mktemp("config") / "config.yaml", free_port()
    deploy(file, config(pairs, port))
    url = f"http://127.0.0.1:{port}"
    until(lambda: ready(url), "both models run", 180)
    yield url, lambda **changes: deploy(file, config(pairs, port, **changes))
    serve.shutdown()


def ready(url):
    try:
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def expected(pairs):
    """Ids each model emits, from its target alone and without Ray."""

    def alone(name):
        config = EngineConfig(target=pairs[name].target, device="cpu")
        return run(config, requests([PROMPT], max_tokens=MAX_TOKENS)).ids[0]

    return {name: alone(name) for name in SIZES}


def body(name, **changes):
    wanted = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    return wanted | {"model": name, "ignore_eos": True, "return_token_ids": True} | changes


def complete(url, name):
    return httpx.post(f"{url}/v1/completions", json=body(name), timeout=120)


def ids_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def replicas(url):
    found = httpx.get(f"{url}/server_info", timeout=30).json()["replicas"]
    return {replica["model"]: replica for replica in found}


def ingress_actors():
    """Ids of the ingress' actors."""
    found = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    names = [name for name in found if "front#Ingress#" in name]
    return [ray.get_actor(name, namespace="serve")._actor_id.hex() for name in names]


def ingress_actor():
    """Id of the one ingress' actor."""
    (actor,) = ingress_actors()
    return actor


def test_each_model_answers_with_its_own_ids(deployed, expected):
    url, _ = deployed
    assert expected["small"] != expected["wide"]
    for name in SIZES:
        assert ids_of(complete(url, name)) == expected[name]
        assert StreamReader(url, body(name)).answer(60).token_ids == expected[name]


def test_every_page_shows_all_models(deployed):
    url, _ = deployed
    listed = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    assert [card["id"] for card in listed] == list(SIZES)
    sizes = {n: r["engine"]["tensor_parallel_size"] for n, r in replicas(url).items()}
    assert sizes == SIZES
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    for name in SIZES:
        assert f'model_name="{name}",state="serving"}} 1.0' in metrics
    assert ready(url)


def test_a_model_that_is_not_served_is_refused_with_those_that_are(deployed):
    url, _ = deployed
    response = complete(url, "other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'other', which is not served here; allowed: small, wide" in error["message"]


class Load(threading.Thread):
    """Requests to one model, one after another, until told to stop."""

    def __init__(self, url, name):
        super().__init__(daemon=True)
        self._url, self._name = url, name
        self._over = threading.Event()
        self.answers = []
        self.start()

    def run(self):
        while not self._over.is_set():
            self.answers.append(complete(self._url, self._name))

    def stop(self):
        self._over.set()
        self.join(timeout=120)
        return self.answers


def test_soft_knobs_change_no_process_and_no_output(deployed, expected):
    url, redeploy = deployed
    before = replicas(url)["wide"]["config"]
    assert before["knobs"]["speculation"] is True
    load = Load(url, "wide")

    def change(knobs, seen, what):
        redeploy(knobs=knobs)
        until(lambda: replicas(url)["wide"]["config"][seen] != before[seen], what, 60)
        return replicas(url)["wide"]["config"]

    after = change({"speculation": False, "max_running": 2}, "knobs", "the knobs")
    assert (after["knobs"]["speculation"], after["knobs"]["max_running"]) == (False, 2)
    assert ids_of(complete(url, "wide")) == expected["wide"]
    refused = change({"max_running": 10_000}, "refused_knobs", "the refusal")
    assert "max_running is 10000; allowed without a new start: 1 to" in refused["refused_knobs"]
    assert refused["knobs"] == after["knobs"]
    answers = load.stop()
    assert answers
    assert all(ids_of(answer) == expected["wide"] for answer in answers)
    for config in (after, refused):
        assert (config["pid"], config["ranks"]) == (before["pid"], before["ranks"])


def test_a_model_is_deployed_again_without_a_new_ingress_and_no_request_fails(deployed, expected):
    url, redeploy = deployed
    ingress, before = ingress_actor(), replicas(url)
    loads = {name: Load(url, name) for name in SIZES}
    redeploy(gang_failures=7)
    until(
        lambda: replicas(url).get("wide", before["wide"])["replica"] != before["wide"]["replica"],
        "another replica of the changed model",
        120,
    )
    until(lambda: ready(url), "both models run", 120)
    for name, load in loads.items():
        answers = load.stop()
        assert answers
        assert all(ids_of(answer) == expected[name] for answer in answers)
    after = replicas(url)
    assert after["wide"]["config"]["gang_failures"] == 7
    assert after["small"]["replica"] == before["small"]["replica"]
    assert ingress_actor() == ingress


def test_an_ingress_is_replaced_and_no_request_fails(deployed, expected):
    url, redeploy = deployed
    before = ingress_actor()
    loads = {name: Load(url, name) for name in SIZES}
    redeploy(front={"resume_attempts": 9}, gang_failures=7)
    until(lambda: ingress_actors() and before not in ingress_actors(), "another ingress", 120)
    until(lambda: ready(url), "both models run", 120)
    for name, load in loads.items():
        answers = load.stop()
        assert answers
        assert all(ids_of(answer) == expected[name] for answer in answers)
