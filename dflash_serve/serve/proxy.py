"""What runs around Serve's HTTP servers: their plain-text errors become OpenAI's error object.

The proxy answers by itself when a request times out in it, when no application has the path, or
when the ingress dies. Deployment files name `middlewares` in the controller's environment
(RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH), which proxies inherit, and ingress replicas, which
listen themselves behind HAProxy (RAY_SERVE_ENABLE_HA_PROXY).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_serve.api.failures import from_status

__all__ = ["JsonErrors", "middlewares"]

_OWN_PATHS = "/-/"
"""Serve's health and route pages, which Kubernetes and not OpenAI clients read."""
_MAX_TEXT = 500
_REQUEST_ID = b"x-request-id"
_REPLACED_HEADERS = ("content-type", "content-length")


def middlewares() -> list[Middleware]:
    """The proxy's middlewares, as Serve's callback wants them."""
    return [Middleware(JsonErrors)]


class JsonErrors:
    """ASGI middleware that gives every error answer a JSON body; the others pass untouched.

    Args:
        app: the application inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"].startswith(_OWN_PATHS):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(scope, receive, send))


class _Rewriter:
    """Passes messages on, holding back those of an error that is not JSON."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._held: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            _keep_first_request_id(message)
            if _is_plain_error(message):
                self._held = message
                return
        if self._held is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._answer(self._held)

    async def _answer(self, start: Message) -> None:
        kept = {
            name: value
            for name, value in Headers(raw=list(start["headers"])).items()
            if name not in _REPLACED_HEADERS
        }
        text = self._body.decode(errors="replace").strip()[:_MAX_TEXT] or "no details given"
        answer = from_status(start["status"], text, kept).response()
        await answer(self._scope, self._receive, self._send)


def _keep_first_request_id(start: Message) -> None:
    """Drop the x-request-id that Serve adds to an answer of the ingress, which has one."""
    names = [name.lower() for name, _ in start.get("headers", ())]
    if names.count(_REQUEST_ID) > 1:
        first = names.index(_REQUEST_ID)
        start["headers"] = [
            header
            for number, header in enumerate(start["headers"])
            if names[number] != _REQUEST_ID or number == first
        ]


def _is_plain_error(start: Message) -> bool:
    kind = Headers(raw=list(start.get("headers", ()))).get("content-type", "")
    return start["status"] >= 400 and not kind.startswith("application/json")
