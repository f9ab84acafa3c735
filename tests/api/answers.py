"""Requests over HTTP that the API tests share, and checks of what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fastapi import FastAPI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.api.fakes import MODEL

STORY = "Once upon a time there was a small brown fox that liked its own fox hole."
PROMPT = {"model": MODEL, "prompt": "The fox", "max_tokens": 200}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "The fox"}]}
PATHS = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}


def connect(app: FastAPI) -> httpx.AsyncClient:
    """A client that speaks to the application without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object, checked for its shape."""
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of every server-sent event, [DONE] as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def check_chunk(chunk: dict[str, Any], chat: bool) -> None:
    """Parse with the official types, which know no null finish reason for completions."""
    if chat:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        return
    choice = chunk["choices"][0]
    reason = choice["finish_reason"] or "stop"
    Completion.model_validate({**chunk, "choices": [{**choice, "finish_reason": reason}]})
