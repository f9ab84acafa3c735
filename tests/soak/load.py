"""Streaming clients of which some leave at a random moment."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import threading
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Load"]

_LINE_LIMIT = 2**20
_RETRY_S = 0.2


class Load:
    """Clients that send one request after another, in a thread, until told to stop.

    Args:
        url: the server.
        model: the model's name.
        clients: streams at a time.
        leaving: share of the requests whose client closes the connection early.
        seed: of prompts and moments.

    Attributes:
        ends: how requests ended: "finished", "left", "refused", "failed".
    """

    def __init__(self, url: str, model: str, *, clients: int, leaving: float, seed: int) -> None:
        self._place = urlsplit(url)
        self._model = model
        self._leaving = leaving
        self._stop = threading.Event()
        self.ends: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, str] = {}
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(clients, seed)), name="clients"
        )
        self._thread.start()

    def stop(self) -> None:
        """Begin no more requests, and wait for those under way."""
        self._stop.set()
        self._thread.join()

    async def _run(self, clients: int, seed: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._one_after_another(random.Random(f"{seed} {number}")))

    async def _one_after_another(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            end = await self._ask(rng)
            self.ends[end] += 1
            if end in ("refused", "failed"):
                await asyncio.sleep(_RETRY_S)

    async def _ask(self, rng: random.Random) -> str:
        patience = rng.expovariate(2.0) if rng.random() < self._leaving else None
        body = self._body(rng)
        try:
            reader, writer = await asyncio.open_connection(
                self._place.hostname, self._place.port, limit=_LINE_LIMIT
            )
        except OSError as error:
            return self._note("refused", str(error))
        try:
            async with asyncio.timeout(patience):
                return await self._exchange(reader, writer, body)
        except TimeoutError:
            return "left"
        except OSError as error:
            return self._note("failed", str(error))
        finally:
            writer.close()

    def _body(self, rng: random.Random) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": [rng.randrange(2, 250) for _ in range(rng.randint(4, 200))],
            "max_tokens": rng.randint(8, 120),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(2**31),
            "stream": rng.random() < 0.8,
            "ignore_eos": rng.random() < 0.5,
        }

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> str:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._place.netloc}\r\n"
            "Connection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await reader.readline()
        rest = await reader.read()
        if b" 200 " not in status:
            return self._note("refused", (status + rest[-500:]).decode(errors="replace"))
        if body["stream"] and b"data: [DONE]" not in rest:
            return self._note("failed", rest[-500:].decode(errors="replace"))
        return "finished"

    def _note(self, end: str, detail: str) -> str:
        self.examples.setdefault(end, detail)
        return end
