"""Deltas that pile up, and streams that are left early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dflash_serve.api.protocol import Delta
from dflash_serve.api.responses import ChatShape
from dflash_serve.api.schema import parse_chat
from dflash_serve.api.streaming import (
    ClientGoneError,
    DeltaStream,
    EventStream,
    server_sent_events,
    until_gone,
)
from dflash_serve.errors import EngineDeadError
from dflash_serve.observe.metrics import Metrics

CALL = parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True})


class Source:
    """Deltas that appear when the test says so."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.closed = False

    def put(self, text: str, finish: Any = None) -> None:
        token_ids = list(text.encode())
        self.queue.put_nowait(Delta(text=text, token_ids=token_ids, finish_reason=finish))

    async def deltas(self) -> AsyncIterator[Delta]:
        try:
            while True:
                item = await self.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.closed = True


@pytest.fixture
def source() -> Source:
    return Source()


def reader(source: Source) -> DeltaStream:
    return DeltaStream(source.deltas(), Metrics(["m"]).request("m"))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_came_during_a_send_goes_out_as_one(source: Source) -> None:
    stream = reader(source)
    source.put("a")
    first = await stream.next()
    assert first is not None
    assert first.text == "a"
    for text in "bcd":
        source.put(text)
    source.put("e", "stop")
    await settle()
    merged = await stream.next()
    assert merged is not None
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("bcde", [*b"bcde"], "stop")
    assert await stream.next() is None


async def test_what_came_before_a_failure_is_delivered_first(source: Source) -> None:
    stream = reader(source)
    source.put("ab")
    source.queue.put_nowait(EngineDeadError("rank 1 died"))
    await settle()
    delta = await stream.next()
    assert delta is not None
    assert delta.text == "ab"
    with pytest.raises(EngineDeadError):
        await stream.next()


async def test_piling_up_leaves_the_backends_deltas_alone(source: Source) -> None:
    own = Delta(text="a", token_ids=[1])
    stream = reader(source)
    source.queue.put_nowait(own)
    source.put("b", "stop")
    assert (await stream.rest()).text == "ab"
    assert (own.text, own.token_ids) == ("a", [1])


async def test_closing_closes_the_source_even_in_the_middle_of_a_wait(source: Source) -> None:
    stream = reader(source)
    source.put("a")
    await stream.next()
    await stream.aclose()
    assert source.closed
    await stream.aclose()


async def test_work_is_cancelled_when_the_client_goes() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def receive() -> dict[str, str]:
        await settle()
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await until_gone(receive, work())
    assert cancelled


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_ends_the_source(source: Source, begun: bool) -> None:
    stream = reader(source)
    if begun:
        source.put("a")
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        await settle()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if not begun:
            await asyncio.Event().wait()

    events = server_sent_events(Delta(text="x"), stream, ChatShape(CALL))
    await EventStream(events, stream)({"type": "http"}, receive, send)
    assert source.closed
    assert sent[0]["type"] == "http.response.start"


async def test_a_socket_that_breaks_on_send_ends_the_source(source: Source) -> None:
    stream = reader(source)

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    events = server_sent_events(Delta(text="x"), stream, ChatShape(CALL))
    await EventStream(events, stream)({"type": "http"}, receive, send)
    assert source.closed
