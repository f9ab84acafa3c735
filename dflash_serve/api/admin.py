"""Routes for whoever operates the server; off unless they are switched on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from dflash_serve.api.boundary import read_object
from dflash_serve.api.failures import JSONBody
from dflash_serve.api.protocol import Backend, ReplicaStatus, TraceRequest
from dflash_serve.errors import ForbiddenError, RequestError

__all__ = ["admin_routes", "busiest"]


def admin_routes(backend: Backend, max_body_bytes: int, *, enabled: bool) -> APIRouter:
    """POST /admin/trace; 403 where it is not enabled.

    Args:
        backend: not called before the first request.
        max_body_bytes: longer request bodies are refused with 413.
    """
    router = APIRouter(prefix="/admin")

    async def trace(request: Request) -> Response:
        """Profile the next steps of a replica: a `TraceRequest` gives a `TraceFiles`."""
        if not enabled:
            raise ForbiddenError(
                "/admin is off; set `admin: true` in the deployment's args, and only where whoever "
                "reaches this port may operate the server"
            )
        body = await read_object(request, max_body_bytes)
        try:
            order = msgspec.convert(body, TraceRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"{error}; allowed: {', '.join(_FIELDS)}") from error
        order.validate()
        return JSONBody(await backend.trace(order))

    router.add_api_route("/trace", trace, methods=["POST"], response_model=None)
    return router


_FIELDS = TraceRequest.__struct_fields__


def busiest(statuses: Sequence[ReplicaStatus], order: TraceRequest) -> ReplicaStatus:
    """The replica to trace: the one with the most requests among those that the order allows.

    Raises:
        RequestError: it names none of those that are there.
    """
    able = [
        status
        for status in statuses
        if order.model in ("", status.model) and order.replica in ("", status.replica)
    ]
    if not able:
        there = ", ".join(f"{status.replica} of {status.model}" for status in statuses)
        raise RequestError(
            f"no replica fits model {order.model!r:.80} and replica {order.replica!r:.80}; "
            f"there are: {there or 'none'}",
            "replica" if order.replica else "model",
        )
    return max(able, key=lambda status: status.outstanding)
