"""Completions and chats over HTTP: OpenAI shapes, streams, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import LocalBackend, TextEngine
from tests.api.answers import (
    CHAT,
    PATHS,
    PROMPT,
    STORY,
    check_chunk,
    connect,
    error_of,
    events_of,
)
from tests.api.fakes import MODEL, FakeEngine

# -- answers --------------------------------------------------------------------------------


async def test_a_completion_is_what_openai_says_it_is(
    client: httpx.AsyncClient, codec: TextCodec
) -> None:
    response = await client.post("/v1/completions", json=PROMPT)
    answer = Completion.model_validate(response.json(), strict=True)
    story = codec.encode(STORY)
    assert (answer.object, answer.choices[0].text) == ("text_completion", STORY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(codec.encode("The fox"))
    assert answer.usage.completion_tokens == len(story)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(story)


async def test_a_chat_completion_is_what_openai_says_it_is(
    client: httpx.AsyncClient, codec: TextCodec
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "stop": " small"})
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "Once upon a time there was a"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(codec.encode_chat(CHAT["messages"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stop", [None, "own fox", "Once", "hole!"])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_stream_joins_to_the_same_answer(
    client: httpx.AsyncClient, path: str, stop: str | None, include_usage: bool
) -> None:
    body = {**PATHS[path], "stop": stop, "return_token_ids": True}
    whole = (await client.post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    chunks = events_of(await client.post(path, json={**body, **options}))
    assert chunks.pop() == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    chat = path == "/v1/chat/completions"
    for chunk in chunks:
        check_chunk(chunk, chat)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [c["delta"].get("content") if chat else c["text"] for c in choices]
    expected = whole["choices"][0]
    assert "".join(text or "" for text in texts) == (
        expected["message"]["content"] if chat else expected["text"]
    )
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert ids == expected["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [*[None] * (len(reasons) - 1), expected["finish_reason"]]
    if chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}


async def test_a_stream_has_no_empty_text_in_its_middle(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "stream": True, "stop": "own fox"}
    chunks = events_of(await client.post("/v1/chat/completions", json=body))
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2])


@pytest.mark.parametrize("max_tokens", range(1, 21))
async def test_usage_is_the_number_of_ids_delivered(
    client: httpx.AsyncClient, max_tokens: int
) -> None:
    body = {**PROMPT, "max_tokens": max_tokens, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert len(answer["choices"][0]["token_ids"]) == max_tokens
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["dflash"]["accepted_tokens"] <= max_tokens


async def test_a_prompt_of_ids_is_taken_as_it_is(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post("/v1/completions", json={**PROMPT, "prompt": [5, 6, 7]})
    assert engine.submitted[0].prompt_ids == [5, 6, 7]


# -- refusals -------------------------------------------------------------------------------

LONG = [5] * 300
BAD = [
    ("/v1/completions", {"prompt": LONG}, 400, "prompt"),
    ("/v1/completions", {"prompt": "fox " * 300}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": [""]}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [320]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"max_tokens": 300}, 400, "max_tokens"),
    ("/v1/completions", {"echo": True, "max_tokens": 0, "logprobs": 1}, 400, "echo"),
    ("/v1/completions", {"best_of": 10**6}, 400, "best_of"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "fox " * 300}]},
        400,
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [*CHAT["messages"], {"role": "system", "content": "late"}]},
        400,
        "messages",
    ),
    ("/v1/chat/completions", {"logprobs": True}, 400, "logprobs"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    *(
        (path, changes, 400, next(iter(changes)))
        for path in PATHS
        for changes in (
            {"temperature": -1},
            {"top_p": 0},
            {"top_p": 1.1},
            {"n": 0},
            {"n": -1},
            {"n": 3},
            {"max_tokens": -1},
            {"max_tokens": 0},
            {"max_tokens": "many"},
            {"stop": 5},
            {"stream": "yes"},
            {"stop_token_ids": [320]},
            {"nonsense": 1},
            {"model": 5},
        )
    ),
    *((path, {"model": "other"}, 404, "model") for path in PATHS),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "changes", "status", "param"), BAD)
async def test_bad_input_is_refused_and_the_engine_is_untouched(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    changes: dict[str, Any],
    status: int,
    param: str,
    stream: bool,
) -> None:
    response = await client.post(path, json={**PATHS[path], "stream": stream, **changes})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error"
    assert engine.submitted == []
    assert (await client.post(path, json=PATHS[path])).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"model": NaN}', b"\xff\xfe", b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_refused(
    client: httpx.AsyncClient, path: str, body: bytes
) -> None:
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert "object" in error_of(response)["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_above_the_limit_is_refused(
    engine: FakeEngine, codec: TextCodec, announced: bool
) -> None:
    app = create_app(LocalBackend(TextEngine(engine, codec, MODEL)), max_body_bytes=1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    async with connect(app) as client:
        content = b" " * 1100 if announced else parts()
        response = await client.post("/v1/completions", content=content)
    assert response.status_code == 413
    assert "at most 1000" in error_of(response)["message"]


async def test_unknown_routes_and_methods_answer_in_the_same_shape(
    client: httpx.AsyncClient,
) -> None:
    missing = await client.get("/v1/embeddings")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = await client.get("/v1/completions")
    assert wrong.status_code == 405
    assert "allowed: POST" in error_of(wrong)["message"]
    assert wrong.headers["allow"] == "POST"
