"""The outermost layer of the application: request ids, unforeseen errors, bodies, counting."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_serve.api.failures import BodyTooLargeError, internal
from dflash_serve.errors import RequestError
from dflash_serve.log import get_logger

__all__ = ["Boundary", "read_object"]

logger = get_logger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """ASGI middleware around the whole application.

    Echoes the client's x-request-id, or makes one; answers 500 in OpenAI's shape for errors that
    nothing else maps; tells `on_failure` the status of every error answer.

    Args:
        app: the application inside.
        on_failure: called with the status.
    """

    def __init__(self, app: ASGIApp, on_failure: Callable[[int], None]) -> None:
        self._app = app
        self._on_failure = on_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        started = False

        async def send_marked(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if message["status"] >= 400:
                    self._on_failure(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception as error:  # nothing outside would answer in OpenAI's shape
            logger.error(
                "%s %s failed (%s)", scope["method"], scope["path"], request_id, exc_info=error
            )
            if started:
                raise  # the server then cuts the connection, so that nobody takes it for complete
            await internal(request_id).response()(scope, receive, send_marked)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request body as a JSON object.

    Args:
        request: not yet read.
        max_bytes: longer bodies are refused, as soon as that is known.

    Raises:
        BodyTooLargeError: the body is too long.
        RequestError: the body is not JSON, or not an object.
    """
    data = await _read(request, max_bytes)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}; send a JSON object") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply; send a flat JSON object") from error
    if not isinstance(body, dict):
        raise RequestError(
            f"the body is a JSON {_KINDS.get(type(body), 'value')}; allowed: an object"
        )
    return body


_KINDS: dict[type, str] = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(size: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {size} bytes or more; allowed: at most {max_bytes}; send a shorter prompt"
    )
