"""A streaming HTTP client that costs little: raw sockets, one event loop, times of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

__all__ = ["Stream", "stream_all"]

_LINE_LIMIT = 2**20


class Stream(msgspec.Struct):
    """What one request brought.

    Attributes:
        sent: when it was sent, by `time.perf_counter`.
        events: when each event with tokens came, and how many it held.
    """

    sent: float = 0.0
    events: list[tuple[float, int]] = []


def stream_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Stream]:
    """Send completion requests, `concurrency` at a time, each on a connection of its own.

    Raises:
        OSError: the server refused a request, or a stream broke.
    """
    return asyncio.run(_stream_all(url, bodies, concurrency))


async def _stream_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Stream]:
    waiting = iter(bodies)
    done: list[Stream] = []

    async def one_after_another() -> None:
        for body in waiting:
            done.append(await _ask(url, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    return done


async def _ask(url: str, body: dict[str, Any]) -> Stream:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=_LINE_LIMIT)
    try:
        data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        stream = Stream(sent=time.perf_counter())
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise OSError(
                f"{url} answered {status.decode().strip()!r}: {await reader.read(2000)!r}"
            )
        await _read_events(reader, stream)
        return stream
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Chunk sizes and headers lie between the events; none of them begins with "data: "."""
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            return
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = msgspec.json.decode(line[len(b"data: ") :])
        if "error" in event:
            raise OSError(f"the server broke off: {event['error']}")
        tokens = sum(len(c.get("token_ids") or ()) for c in event["choices"])
        if tokens:
            stream.events.append((now, tokens))
    raise OSError("the stream ended without [DONE]")
