"""Failures behind the HTTP application, and the routes operators use."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types import Model

from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.api.replica import LocalBackend, TextEngine
from dflash_serve.engine.messages import LengthStats
from dflash_serve.errors import EngineDeadError, EngineStalledError, OverloadedError
from tests.api.answers import PATHS, PROMPT, connect, error_of, events_of
from tests.api.fakes import MODEL, FakeEngine, engine_info

# -- failures of the backend ----------------------------------------------------------------


class BrokenBackend(LocalBackend):
    """Raises an error after some deltas."""

    def __init__(self, error: Exception, deltas: int = 0) -> None:
        super().__init__()
        self._error, self._deltas = error, deltas

    def models(self) -> list[str]:
        return [MODEL]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:  # type: ignore[override]
        for _ in range(self._deltas):
            yield Delta(text="a", token_ids=[5])
        raise self._error

    async def status(self) -> Any:
        raise self._error

    async def check_health(self) -> None:
        raise self._error


FAILURES = [
    (OverloadedError("full", retry_after_s=2.6), 429, "server_overloaded", "true"),
    (EngineDeadError("rank 1 died"), 503, "engine_unavailable", "true"),
    (EngineStalledError("no step for 31 s"), 503, "engine_unavailable", "true"),
    (RuntimeError("secret /path"), 500, "internal_error", "false"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry"), FAILURES)
async def test_a_backend_failure_is_mapped(
    error: Exception, status: int, code: str, retry: str, stream: bool
) -> None:
    async with connect(create_app(BrokenBackend(error))) as client:
        response = await client.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert response.headers["x-should-retry"] == retry
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    assert "secret" not in response.text


@pytest.mark.parametrize(("error", "status", "code", "retry"), FAILURES)
async def test_a_failure_in_mid_stream_ends_it_with_an_error_event(
    error: Exception, status: int, code: str, retry: str
) -> None:
    async with connect(create_app(BrokenBackend(error, deltas=2))) as client:
        response = await client.post("/v1/completions", json={**PROMPT, "stream": True})
    events = events_of(response)
    assert response.status_code == 200
    assert events[0]["choices"][0]["text"].startswith("a")
    assert events[-1]["error"]["code"] == code
    assert "[DONE]" not in events
    assert "secret" not in response.text


async def test_a_failure_after_work_was_done_tells_clients_not_to_repeat_it() -> None:
    error = EngineDeadError("rank 1 died")
    async with connect(create_app(BrokenBackend(error, deltas=2))) as client:
        response = await client.post("/v1/completions", json=PROMPT)
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")


async def test_an_answer_that_just_stops_is_an_error_and_not_an_end() -> None:
    class Silent(BrokenBackend):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:  # type: ignore[override]
            yield Delta(text="a", token_ids=[5])

    async with connect(create_app(Silent(RuntimeError()))) as client:
        whole = await client.post("/v1/completions", json=PROMPT)
        streamed = await client.post("/v1/completions", json={**PROMPT, "stream": True})
    assert error_of(whole)["code"] == "engine_unavailable"
    assert events_of(streamed)[-1]["error"]["code"] == "engine_unavailable"


# -- operation ------------------------------------------------------------------------------


async def test_models_are_listed_and_found(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [Model.model_validate(card).id for card in listed["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
    assert MODEL in error_of(missing)["message"]


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_follows_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    assert (await client.get(path)).status_code == 200
    engine.health = EngineStalledError("no step for 31 s")
    response = await client.get(path)
    assert response.status_code == 503
    assert "31 s" in error_of(response)["message"]


async def test_server_info_tells_configuration_and_acceptance(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    before = (await client.get("/server_info")).json()
    assert before["avg_spec_accept_length"] is None
    engine.stats.by_length = {
        1: LengthStats(drafts=10, emitted=10),
        4: LengthStats(drafts=10, emitted=20, accepted_per_position=[6, 3, 1]),
        8: LengthStats(drafts=30, emitted=100, accepted_per_position=[30, 20, 20, 0, 0, 0, 0]),
    }
    info = (await client.get("/server_info")).json()
    assert (info["speculative_algorithm"], info["speculative_num_draft_tokens"]) == ("DFLASH", 8)
    assert info["avg_spec_accept_length"] == 3.0
    by_length = info["avg_spec_accept_length_by_verify_length"]
    assert by_length == {"1": 1.0, "4": 2.0, "8": pytest.approx(10 / 3)}
    replica = info["replicas"][0]
    assert replica["config"] == {"target": "folder"}
    assert replica["engine"]["dtype"] == "float32"
    assert replica["stats"]["by_length"]["4"]["drafts"] == 10


async def test_server_info_without_a_draft_names_no_algorithm(codec: TextCodec) -> None:
    engine = FakeEngine([5], info=engine_info(block_size=None, verify_length=1))
    app = create_app(LocalBackend(TextEngine(engine, codec, MODEL)))
    async with connect(app) as client:
        info = (await client.get("/server_info")).json()
    assert info["speculative_algorithm"] is None
    assert info["speculative_num_draft_tokens"] is None
    assert info["avg_spec_accept_length"] is None


async def test_the_metrics_page_counts_requests_and_failures(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=PROMPT)
    await client.post("/v1/completions", json={**PROMPT, "n": 0})
    page = (await client.get("/metrics")).text
    labels = f'engine="0",finished_reason="length",model_name="{MODEL}"'
    assert f"vllm:request_success_total{{{labels}}} 1.0" in page
    assert 'dflash_http_failures_total{status="400"} 1.0' in page
    count = f'vllm:time_to_first_token_seconds_count{{engine="all",model_name="{MODEL}"}} 1.0'
    assert count in page


async def test_the_metrics_page_stays_when_the_replicas_do_not_answer() -> None:
    async with connect(create_app(BrokenBackend(EngineDeadError("gone")))) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert "dflash_build_info" in response.text


async def test_a_failing_metric_never_changes_an_answer(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("counters can only grow")

    for metric in ("Histogram", "Counter"):
        monkeypatch.setattr(f"prometheus_client.{metric}.labels", fail, raising=True)
    for path, body in PATHS.items():
        for stream in (False, True):
            response = await client.post(path, json={**body, "stream": stream})
            assert response.status_code == 200
            assert "hole" in response.text
    monkeypatch.undo()
    assert "dflash_metrics_errors_total 0.0" not in (await client.get("/metrics")).text


async def test_request_ids_are_echoed_or_made(client: httpx.AsyncClient) -> None:
    given = await client.get("/version", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for bad in ("x" * 1000, "a b"):
        response = await client.get("/version", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req-")


async def test_two_requests_with_the_same_request_id_are_both_served(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        await client.post("/v1/completions", json=PROMPT, headers={"x-request-id": "same"})
    assert len({submit.request_id for submit in engine.submitted}) == 2


class Recorder(LocalBackend):
    """Keeps the requests it gets; has no replica, which is in order where it may sleep."""

    def __init__(self, may_sleep: bool = False) -> None:
        super().__init__()
        self._may_sleep = may_sleep
        self.requests: list[GenerationRequest] = []

    def models(self) -> list[str]:
        return [MODEL]

    def may_sleep(self, model: str) -> bool:
        return self._may_sleep

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:  # type: ignore[override]
        self.requests.append(request)
        yield Delta(token_ids=[5], finish_reason="stop", prompt_ids=[1])


@pytest.mark.parametrize("path", PATHS)
async def test_a_session_is_the_headers_else_the_user(path: str) -> None:
    backend = Recorder()
    async with connect(create_app(backend)) as client:
        for user, headers in (
            (None, {}),
            ("alice", {}),
            ("alice", {"x-session-id": "chat-1"}),
        ):
            body = {**PROMPT, "messages": [{"role": "user", "content": "hi"}], "user": user}
            del body["prompt" if "chat" in path else "messages"]
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
    assert [request.session for request in backend.requests] == ["", "alice", "chat-1"]


@pytest.mark.parametrize(("may_sleep", "status"), [(False, 503), (True, 200)])
async def test_a_model_without_a_replica_is_ready_where_it_may_sleep(
    may_sleep: bool, status: int
) -> None:
    async with connect(create_app(Recorder(may_sleep))) as client:
        assert (await client.get("/ready")).status_code == status


async def test_no_prompt_text_is_logged(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="dflash_serve"):
        await client.post("/v1/completions", json={**PROMPT, "prompt": "my secret"})
        await client.post("/v1/completions", json={**PROMPT, "prompt": ["my secret", "b"]})
    assert "secret" not in caplog.text


async def test_the_backend_is_not_called_before_the_first_request() -> None:
    class Late(BrokenBackend):
        def models(self) -> list[str]:
            raise AssertionError("called too early")

    create_app(Late(RuntimeError()))
