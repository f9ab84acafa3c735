"""A steady load of streaming clients, each comparing what it gets with an undisturbed run.

The clients are openai's own, without retries, on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import httpx
import openai

__all__ = ["Answer", "Load", "Record"]

_TIMEOUT_S = 180.0
_RETRY_S = 0.2

End = Literal["finished", "cut", "failed", "refused", "left"]


class Answer(NamedTuple):
    """What a client has in the end."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str | None


@dataclasses.dataclass
class Record:
    """One request as its client saw it; times are of `time.monotonic`.

    Attributes:
        body: which of the bodies.
        accepted: when the status line came; None for a request that was refused.
        events: when each event came.
        end: "finished" with a reason, "cut" without one, "failed" with an error event, "refused"
            with an error status or no connection, "left" by the client itself.
    """

    body: int
    started: float
    accepted: float | None = None
    events: list[float] = dataclasses.field(default_factory=list)
    end: End | None = None
    ended: float = 0.0
    detail: str = ""
    answer: Answer | None = None

    def running_at(self, moment: float) -> bool:
        """Whether the stream had begun and not ended then."""
        begun = bool(self.events) and self.events[0] <= moment
        return begun and (self.end is None or self.ended > moment)

    def pause_after(self, moment: float) -> float:
        """The longest time without an event, of the time after `moment`."""
        times = [moment, *(t for t in self.events if t > moment)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Load:
    """Clients that send one request after another until told to finish.

    Args:
        url: the server.
        bodies: what to ask, in turn; "messages" makes a chat.
        clients: how many at a time.
    """

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], clients: int) -> None:
        self._bodies = list(bodies)
        self._next = 0
        self._hold = threading.Event()
        self._finish = threading.Event()
        self._leaving: dict[int, float] = {}
        self.records: list[Record] = []
        self._loop = asyncio.new_event_loop()
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=_TIMEOUT_S,
            http_client=httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S),
        )
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(clients),), name="clients"
        )
        self._thread.start()

    def running(self) -> list[Record]:
        """Streams under way."""
        return [r for r in list(self.records) if r.events and r.end is None]

    def hold(self) -> None:
        """Begin no request until `release`; those under way go on."""
        self._hold.set()

    def release(self) -> None:
        """Begin requests again."""
        self._hold.clear()

    def leave(self, records: Sequence[Record], within_s: float, rng: random.Random) -> None:
        """Have clients close their streams at random moments; waits until all have."""
        now = time.monotonic()
        for record in records:
            self._leaving[id(record)] = now + rng.uniform(0.0, within_s)
        deadline = now + within_s + 10.0
        while any(r.end is None for r in records) and time.monotonic() < deadline:
            time.sleep(0.01)

    def finish(self) -> list[Record]:
        """Begin no more requests, and wait for those under way; returns all."""
        self._finish.set()
        self._thread.join()
        return self.records

    # -- the clients' thread ----------------------------------------------------------------

    async def _run(self, clients: int) -> None:
        async with self._client:
            await asyncio.gather(*(self._one_after_another() for _ in range(clients)))

    async def _one_after_another(self) -> None:
        while not self._finish.is_set():
            if self._hold.is_set():
                await asyncio.sleep(0.02)
                continue
            record = Record(self._next % len(self._bodies), time.monotonic())
            self._next += 1
            self.records.append(record)
            await self._ask(record)
            if record.end == "refused":
                await asyncio.sleep(_RETRY_S)

    async def _ask(self, record: Record) -> None:
        try:
            end = await self._stream(record)
        except openai.APIStatusError as error:
            end, record.detail = "refused", f"{error.status_code}: {error.message}"
        except (openai.OpenAIError, httpx.HTTPError) as error:
            broken = isinstance(error, openai.APIConnectionError | httpx.HTTPError)
            end = "refused" if record.accepted is None else "cut" if broken else "failed"
            record.detail = f"{type(error).__name__}: {error}"
        record.ended = time.monotonic()
        record.end = end

    async def _stream(self, record: Record) -> End:
        body = dict(self._bodies[record.body])
        extra = {n: body.pop(n) for n in ("ignore_eos", "return_token_ids", "top_k") if n in body}
        chat = "messages" in body
        api = self._client.chat.completions if chat else self._client.completions
        stream = await api.create(**body, stream=True, extra_body=extra)  # type: ignore[call-overload]
        record.accepted = time.monotonic()
        texts: list[str] = []
        ids: list[int] = []
        reason = None
        async with stream:
            async for chunk in stream:
                record.events.append(time.monotonic())
                for choice in chunk.choices:
                    texts.append((choice.delta.content if chat else choice.text) or "")
                    ids += getattr(choice, "token_ids", None) or []
                    reason = choice.finish_reason or reason
                if reason is None and self._leaving.get(id(record), 1e18) <= time.monotonic():
                    return "left"
        if reason is None:
            record.detail = "the stream ended without a finish reason"
            return "cut"
        record.answer = Answer("".join(texts), tuple(ids), reason)
        return "finished"
