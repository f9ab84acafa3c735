"""From a backend's deltas to the socket: piling up, server-sent events, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_serve.api.failures import Failure, describe, internal
from dflash_serve.api.protocol import Delta
from dflash_serve.api.responses import Shape, merge
from dflash_serve.errors import DFlashError, EngineDeadError
from dflash_serve.log import get_logger
from dflash_serve.observe.metrics import RequestTimer

__all__ = ["ClientGoneError", "DeltaStream", "EventStream", "server_sent_events", "until_gone"]

logger = get_logger(__name__)

_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


class DeltaStream:
    """Reads a backend's deltas as they come; what nobody has fetched yet piles up.

    A slow client therefore gets fewer and larger events, and never slows the engine down.

    Args:
        source: the backend's deltas.
        timer: told when tokens arrive.
        on_end: called once, when nothing runs any more.
    """

    def __init__(
        self,
        source: AsyncIterator[Delta],
        timer: RequestTimer,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._timer = timer
        self._pending: Delta | None = None
        self._changed = asyncio.Event()
        self._delivered = self._finished = False
        self._task = asyncio.create_task(self._read(source))
        self._task.add_done_callback(lambda _: self._changed.set())
        self._task.add_done_callback(lambda _: on_end())

    @property
    def delivered(self) -> bool:
        """Whether anything came."""
        return self._delivered

    async def next(self) -> Delta | None:
        """Everything that came since the last call, as one delta; None at the end.

        Raises:
            DFlashError: what the backend raised, once what came before it was fetched.
            EngineDeadError: the deltas ended without a finish reason.
        """
        while self._pending is None and not self._task.done():
            self._changed.clear()
            await self._changed.wait()
        if self._pending is None:
            self._task.result()
            return None
        pending, self._pending = self._pending, None
        return pending

    async def rest(self) -> Delta:
        """Everything up to the end, as one delta.

        Raises:
            DFlashError: see `next`.
        """
        total = Delta()
        while (delta := await self.next()) is not None:
            merge(total, delta)
        return total

    async def aclose(self) -> None:
        """Leave the backend's iteration, which aborts a request that still runs. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # marks it as seen; whoever cared has had it from `next`

    async def _read(self, source: AsyncIterator[Delta]) -> None:
        prompt_tokens = 0
        try:
            async for delta in source:
                self._delivered = True
                self._timer.tokens(len(delta.token_ids))
                prompt_tokens += len(delta.prompt_ids or ())
                self._finished = delta.finish_reason is not None
                self._pending = merge(self._pending or Delta(), delta)
                self._changed.set()
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()
        if not self._finished:
            raise EngineDeadError("the answer broke off without a finish reason; send it again")
        self._timer.finished(prompt_tokens)


async def server_sent_events(
    first: Delta | None, deltas: DeltaStream, shape: Shape
) -> AsyncGenerator[bytes, None]:
    """The body of a streamed answer; a failure becomes a last event with an error object.

    Args:
        first: the first delta, fetched before the response began.
        deltas: the ones after it.
        shape: makes the chunks.
    """
    chunks = shape.opening()
    delta = first
    try:
        while delta is not None:
            chunks += shape.chunks(delta)
            if chunks:
                yield b"".join(map(_event, chunks))
            chunks = []
            delta = await deltas.next()
        yield b"".join(map(_event, shape.closing())) + _DONE
    except DFlashError as error:
        yield _event(describe(error, delivered=True).body)
    except Exception as error:  # the status line has gone out: an event is the only way to tell
        yield _event(_unforeseen(error, shape).body)
    finally:
        await deltas.aclose()


def _unforeseen(error: Exception, shape: Shape) -> Failure:
    logger.error("request %s failed while streaming", shape.request_id, exc_info=error)
    return internal(shape.request_id)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class EventStream(Response):
    """Sends server-sent events until they end or the client goes.

    Starlette's own streaming response watches for a disconnect only on old ASGI versions, and
    leaves its iterator to the garbage collector; both would keep a request running unheard.

    Args:
        events: the body; closed in every case.
        deltas: what the body is made of; closed even if the body was never begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], deltas: DeltaStream) -> None:
        self._events = events
        self._deltas = deltas
        self.status_code = 200
        self.background = None
        # Proxies that buffer would undo the streaming.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            with contextlib.suppress(ClientGoneError):
                await until_gone(receive, self._send(send))
        finally:
            await self._events.aclose()
            await self._deltas.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:  # how ASGI servers say that the connection is closed
            raise ClientGoneError from error


_T = TypeVar("_T")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client disconnects first.

    Args:
        receive: ASGI receive of a request whose body has been read.
        work: what to wait for.

    Raises:
        ClientGoneError: the client disconnected first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for started in (task, watcher):
            started.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
