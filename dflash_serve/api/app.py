"""The OpenAI-compatible HTTP application over a `Backend`."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dflash_serve import __version__
from dflash_serve.api.admin import admin_routes
from dflash_serve.api.boundary import Boundary, read_object
from dflash_serve.api.failures import JSONBody, describe, from_status
from dflash_serve.api.info import server_info
from dflash_serve.api.protocol import Backend, ReplicaStatus
from dflash_serve.api.repeats import RunningRequests
from dflash_serve.api.responses import ChatShape, CompletionShape, Shape
from dflash_serve.api.schema import Call, parse_chat, parse_completion
from dflash_serve.api.streaming import (
    ClientGoneError,
    DeltaStream,
    EventStream,
    server_sent_events,
    until_gone,
)
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from dflash_serve.log import get_logger
from dflash_serve.observe.metrics import CONTENT_TYPE, Metrics

__all__ = ["MAX_BODY_BYTES", "create_app"]

MAX_BODY_BYTES = 8 * 2**20

SESSION_HEADER = "x-session-id"
"""Names a session, the same header that Ray Serve's own routers read."""

CLIENT_GONE_STATUS = 499
"""What proxies log for a client that left; nobody receives it."""

logger = get_logger(__name__)


def create_app(
    backend: Backend, *, max_body_bytes: int = MAX_BODY_BYTES, admin: bool = False
) -> FastAPI:
    """The application; calls no method of the backend before the first request.

    Args:
        backend: serves the requests.
        max_body_bytes: longer request bodies are refused with 413.
        admin: serve /admin; otherwise those paths answer 403. They have no key of their own: switch
            them on only where whoever reaches the port may operate the server.
    """
    routes = _Routes(backend, max_body_bytes)
    # The documentation pages would load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="dflash-serve", version=__version__, docs_url=None, redoc_url=None)
    for path, get in (
        ("/v1/models", routes.models),
        ("/v1/models/{model:path}", routes.model),
        ("/health", routes.health),
        ("/ready", routes.ready),
        ("/server_info", routes.server_info),
        ("/metrics", routes.metrics_page),
        ("/version", routes.version),
    ):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    for path, post in (
        ("/v1/completions", routes.completions),
        ("/v1/chat/completions", routes.chat_completions),
    ):
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    app.include_router(admin_routes(backend, max_body_bytes, enabled=admin))
    app.add_exception_handler(DFlashError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_middleware(Boundary, on_failure=routes.count_failure)
    return app


class _Routes:
    """The handlers, with what they share."""

    def __init__(self, backend: Backend, max_body_bytes: int) -> None:
        self._backend = backend
        self._max_body_bytes = max_body_bytes
        self._running = RunningRequests()

    @functools.cached_property
    def metrics(self) -> Metrics:
        """Made on first use: the backend may not be there yet when the application is built."""
        return Metrics(self._backend.models())

    # -- generation -------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, parse_completion, CompletionShape)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, parse_chat, ChatShape)

    async def _generate(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], Call],
        make_shape: Callable[[Call], Shape],
    ) -> Response:
        body = await read_object(request, self._max_body_bytes)
        call = _in_session(parse(body), request.headers.get(SESSION_HEADER))
        model = call.request.model
        self._check_model(model)
        source = self._backend.generate(call.request)
        key = self._running.begin(request.headers, request.url.path, body)
        logger.debug("%s begins, model %s", call.request.request_id, model)
        deltas = DeltaStream(source, self.metrics.request(model), lambda: self._running.end(key))
        answered = False
        try:
            shape = make_shape(call)
            if not call.stream:
                total = await until_gone(request.receive, deltas.rest())
                return JSONBody(shape.whole(total))
            # What is wrong with a request shows before its first delta, in time for a status.
            first = await until_gone(request.receive, deltas.next())
            answered = True
            return EventStream(server_sent_events(first, deltas, shape), deltas)
        except DFlashError as error:
            return describe(error, delivered=deltas.delivered).response()
        finally:
            if not answered:
                await deltas.aclose()

    # -- models -----------------------------------------------------------------------------

    async def models(self) -> Response:
        """GET /v1/models."""
        served = [_model_card(name) for name in self._backend.models()]
        return JSONBody({"object": "list", "data": served})

    async def model(self, model: str) -> Response:
        """GET /v1/models/{id}."""
        self._check_model(model)
        return JSONBody(_model_card(model))

    def _check_model(self, name: str) -> None:
        served = self._backend.models()
        if name not in served:
            raise ModelNotFoundError(
                f"model is {name!r:.80}, which is not served here; allowed: {', '.join(served)}",
                "model",
            )

    # -- operation --------------------------------------------------------------------------

    async def health(self) -> Response:
        """GET /health: whether every model makes progress."""
        await self._backend.check_health()
        return JSONBody({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: healthy, and every model has a replica that takes requests."""
        await self._backend.check_health()
        statuses = await self._backend.status()
        able = {status.model for status in statuses if status.state == "serving"}
        awake = {status.model for status in statuses}
        missing = [
            name
            for name in self._backend.models()
            if name not in able and (name in awake or not self._backend.may_sleep(name))
        ]
        if missing:
            raise UnavailableError(
                f"no replica takes requests for {', '.join(missing)}; try again later"
            )
        return JSONBody({"status": "ready"})

    async def server_info(self) -> Response:
        """GET /server_info."""
        return JSONBody(server_info(self._backend.models(), await self._backend.status()))

    async def metrics_page(self) -> Response:
        """GET /metrics, Prometheus text."""
        page = self.metrics.page(await self._reachable()) + self._backend.own_metrics()
        return Response(page, media_type=CONTENT_TYPE)

    async def version(self) -> Response:
        """GET /version."""
        return JSONBody({"version": __version__})

    def count_failure(self, status: int) -> None:
        """Count an error answer."""
        if status != CLIENT_GONE_STATUS:
            self.metrics.failure(status)

    async def _reachable(self) -> list[ReplicaStatus]:
        """The replicas that answer; a scrape must not fail because an engine did."""
        try:
            return await self._backend.status()
        except (EngineDeadError, EngineStalledError, OverloadedError) as error:
            logger.warning("/metrics goes without the replicas' part: %s", error)
            return []


def _in_session(call: Call, session: str | None) -> Call:
    """The call with the session its header names, which counts more than the body's `user`."""
    if session is None:
        return call
    request = msgspec.structs.replace(call.request, session=session)
    return dataclasses.replace(call, request=request)


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": "dflash-serve"}


_STARTED = int(time.time())


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DFlashError), "registered for this class only"
    return describe(error).response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class only"
    message = str(error.detail)
    if error.status_code == 404:
        message = (
            f"there is no {request.url.path[:200]!r} here; see /openapi.json for what there is"
        )
    elif error.status_code == 405:
        allowed = Headers(error.headers).get("allow", "another method")
        message = f"method {request.method} on {request.url.path!r}; allowed: {allowed}"
    return from_status(error.status_code, message, dict(error.headers or {})).response()


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)
