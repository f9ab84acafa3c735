"""The same request twice: at once it is refused, one after the other it gives the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import LocalBackend, TextEngine
from tests.api.answers import PATHS, PROMPT, STORY, connect, error_of
from tests.api.fakes import MODEL, FakeEngine

MINE = {"x-request-id": "mine"}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def hanging(codec: TextCodec) -> FakeEngine:
    """Says a little and then nothing more."""
    return FakeEngine(codec.encode(STORY), hang_after=1)


async def while_running(
    engine: FakeEngine, codec: TextCodec, check: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> None:
    """Run `check` while a request called "mine" is under way, then let that one go."""
    app = create_app(LocalBackend(TextEngine(engine, codec, MODEL)))
    async with connect(app) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=MINE))
        await until(lambda: engine.outstanding == 1)
        await check(client)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_the_same_request_at_once_is_refused_and_may_come_again(
    hanging: FakeEngine, codec: TextCodec
) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        again = await client.post("/v1/completions", json=PROMPT, headers=MINE)
        assert again.status_code == 409
        assert error_of(again)["code"] == "request_running"
        assert (again.headers["x-should-retry"], again.headers["retry-after"]) == ("true", "1")
        assert hanging.outstanding == 1, "the first is untouched"

    await while_running(hanging, codec, check)


@pytest.mark.parametrize(
    ("path", "changes", "headers"),
    [
        ("/v1/completions", {}, {}),
        ("/v1/completions", {}, {"x-request-id": "yours"}),
        ("/v1/completions", {"seed": 5}, MINE),
        ("/v1/chat/completions", {}, MINE),
    ],
)
async def test_other_requests_run_beside_it(
    hanging: FakeEngine, codec: TextCodec, path: str, changes: dict, headers: dict
) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        other = asyncio.create_task(client.post(path, json=PATHS[path] | changes, headers=headers))
        await until(lambda: hanging.outstanding == 2)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    await while_running(hanging, codec, check)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_after_the_other_gives_the_same(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    body = {**PROMPT, "seed": 7, "stream": stream}
    answers = [await client.post("/v1/completions", json=body, headers=MINE) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [submit.params.seed for submit in engine.submitted] == [7] * 3


async def test_a_client_that_left_may_send_it_again_at_once(
    hanging: FakeEngine, codec: TextCodec
) -> None:
    app = create_app(LocalBackend(TextEngine(hanging, codec, MODEL)))
    async with connect(app) as client:
        for _ in range(3):
            task = asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=MINE))
            await until(lambda: hanging.outstanding == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: hanging.outstanding == 0)
    assert len(hanging.submitted) == 3


async def test_a_refused_request_is_forgotten(client: httpx.AsyncClient) -> None:
    wrong = {**PROMPT, "max_tokens": 10_000}
    answers = [await client.post("/v1/completions", json=wrong, headers=MINE) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [400, 400]
