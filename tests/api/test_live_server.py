"""The application on a real socket, driven by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import LocalBackend, TextEngine
from tests.api.fakes import MODEL, FakeEngine

STORY = "Once upon a time there was a small 😀 fox that liked its own fox hole."
MESSAGES: Any = [{"role": "user", "content": "The fox"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "The fox"},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
}

Serve = Callable[[FakeEngine], AbstractAsyncContextManager[str]]


@pytest.fixture
def serve(codec: TextCodec) -> Serve:
    """Serves an engine on a free port; gives the address."""

    @contextlib.asynccontextmanager
    async def running(engine: FakeEngine) -> AsyncIterator[str]:
        app = create_app(LocalBackend(TextEngine(engine, codec, MODEL)))
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task

    return running


def official(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, two seconds at most."""
    async with asyncio.timeout(2.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_official_client_streams_a_chat(serve: Serve, codec: TextCodec) -> None:
    async with serve(FakeEngine(codec.encode(STORY))) as address, official(address) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    usage = chunks.pop().usage
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == STORY
    assert chunks[-1].choices[0].finish_reason == "length"
    assert usage is not None
    assert usage.completion_tokens == len(codec.encode(STORY))


async def test_the_official_client_gets_completions_both_ways(
    serve: Serve, codec: TextCodec
) -> None:
    async with serve(FakeEngine(codec.encode(STORY))) as address, official(address) as client:
        options: dict[str, Any] = {"model": MODEL, "prompt": "The fox", "max_tokens": 100}
        whole = await client.completions.create(**options, stop=["own fox"])
        stream = await client.completions.create(**options, stop=["own fox"], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        listed = [model.id async for model in client.models.list()]
    assert whole.choices[0].text == text == STORY[: STORY.index("own fox")]
    assert listed == [MODEL]


async def test_the_official_client_raises_its_own_errors(serve: Serve, codec: TextCodec) -> None:
    engine = FakeEngine(codec.encode(STORY), die_after=2)
    async with serve(engine) as address, official(address) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="The fox", n=0)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="The fox")
        stream = await client.completions.create(
            model=MODEL, prompt="The fox", max_tokens=100, stream=True
        )
        with pytest.raises(openai.APIError, match="rank 1 died"):
            _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 1, 2])
async def test_a_client_that_goes_away_aborts_its_request(
    serve: Serve, codec: TextCodec, path: str, stream: bool, hang_after: int
) -> None:
    engine = FakeEngine(codec.encode(STORY), hang_after=hang_after)
    async with serve(engine) as address, httpx.AsyncClient(base_url=address) as client:
        body = {**PATHS[path], "stream": stream, "max_tokens": 50}
        request = asyncio.create_task(client.post(path, json=body))
        await until(lambda: engine.outstanding == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: engine.outstanding == 0)
        assert len(engine.aborted) == 1
        page = (await client.get("/metrics")).text
    assert f'finished_reason="abort",model_name="{MODEL}"}} 1.0' in page
    assert 'dflash_outstanding_requests{engine="0",model_name="tiny"} 0.0' in page


async def test_a_hundred_clients_that_go_at_once_leave_nothing_behind(
    serve: Serve, codec: TextCodec
) -> None:
    engine = FakeEngine(codec.encode(STORY), hang_after=1)
    limits = httpx.Limits(max_connections=100)
    async with (
        serve(engine) as address,
        httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client,
    ):
        body = {**PATHS["/v1/completions"], "stream": True}
        requests = [
            asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(100)
        ]
        async with asyncio.timeout(20):
            while engine.outstanding < 100:
                await asyncio.sleep(0.01)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await until(lambda: engine.outstanding == 0)
    assert len(engine.aborted) == 100
