"""Every failure as OpenAI's error object, with its status and headers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from dflash_serve.errors import (
    ConflictError,
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    ForbiddenError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
    UnavailableError,
)

__all__ = [
    "BodyTooLargeError",
    "Failure",
    "JSONBody",
    "RepeatedRequestError",
    "describe",
    "from_status",
    "internal",
]


class BodyTooLargeError(RequestError):
    """A request body above the limit (HTTP 413)."""


class RepeatedRequestError(RequestError):
    """A request that is running already (HTTP 409)."""


class JSONBody(Response):
    """A JSON answer encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return msgspec.json.encode(content)


class Failure(NamedTuple):
    """An error as the client gets it.

    Attributes:
        status: HTTP status.
        body: {"error": {...}} as OpenAI shapes it.
        headers: retry advice.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    def response(self) -> JSONBody:
        """The failure as an HTTP answer."""
        return JSONBody(self.body, status_code=self.status, headers=self.headers)


def describe(error: DFlashError, *, delivered: bool = False) -> Failure:
    """The failure that an error of this package is for the client.

    Args:
        error: what was raised.
        delivered: whether tokens had been generated; a client library is then told not to
            repeat the work by itself.
    """
    status, kind, code = _classify(error)
    headers: dict[str, str] = {}
    if status >= 500 or status in (409, 429):
        headers["x-should-retry"] = "false" if delivered or status == 500 else "true"
    if isinstance(error, OverloadedError | UnavailableError):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    elif status == 409:
        headers["retry-after"] = "1"
    param = error.param if isinstance(error, RequestError) else None
    return Failure(status, _body(str(error), kind, param, code), headers)


def from_status(status: int, message: str, headers: dict[str, str] | None = None) -> Failure:
    """The failure of an HTTP status that the framework answers with."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    advice = {"retry-after": "1", "x-should-retry": "true"} if status == 503 else {}
    return Failure(status, _body(message, kind, None, code), advice | dict(headers or {}))


def internal(request_id: str) -> Failure:
    """The failure for an error nobody foresaw; says nothing about the inside."""
    message = f"the server failed on this request; its log has the reason under {request_id}"
    return Failure(
        500, _body(message, "server_error", None, "internal_error"), {"x-should-retry": "false"}
    )


def _classify(error: DFlashError) -> tuple[int, str, str | None]:
    match error:
        case ModelNotFoundError():
            return 404, "invalid_request_error", "model_not_found"
        case BodyTooLargeError():
            return 413, "invalid_request_error", "request_too_large"
        case RepeatedRequestError():
            return 409, "invalid_request_error", "request_running"
        case ConflictError():
            return 409, "invalid_request_error", "conflict"
        case ForbiddenError():
            return 403, "permission_error", "forbidden"
        case RequestError():
            return 400, "invalid_request_error", None
        case OverloadedError():
            return 429, "rate_limit_error", "server_overloaded"
        case EngineDeadError() | EngineStalledError():
            return 503, "server_error", "engine_unavailable"
        case _:
            return 500, "server_error", "generation_failed"


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
