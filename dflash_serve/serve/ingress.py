"""The ingress deployment: the OpenAI application in front of the replicas' handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from dflash_serve.api.protocol import Delta, GenerationRequest, ReplicaStatus
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    ModelNotFoundError,
    OverloadedError,
)
from dflash_serve.serve import wire
from dflash_serve.serve.settings import ServeSettings

__all__ = ["HandleBackend", "Ingress", "translate_error"]

_CONTROL_TIMEOUT_S = 3.0
"""How long a replica may take to answer a status or health call."""
_HANDLE_ERRORS = (
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)


class HandleBackend:
    """A `Backend` over one deployment handle per model.

    Args:
        handles: replica deployments by model name, in configured order.
        queue_timeout_s: seconds until the first token must have come.
        request_timeout_s: seconds a whole request may take.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle],
        *,
        queue_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self._handles = dict(handles)
        self._streams = {
            name: handle.options(method_name="generate", stream=True)
            for name, handle in self._handles.items()
        }
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s

    def models(self) -> list[str]:
        """Names served, in configured order."""
        return list(self._handles)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one choice from a replica; leaving early cancels it there.

        Raises:
            RequestError, OverloadedError, EngineDeadError, EngineStalledError: see `Backend`.
        """
        handle = self._streams.get(request.model)
        if handle is None:
            raise ModelNotFoundError(
                f"model {request.model!r} is not served here; served: {', '.join(self._handles)}",
                "model",
            )
        stream = handle.remote(wire.encode_request(request))
        finished = False
        try:
            async for data in self._timed(stream, request.model):
                delta = wire.decode_delta(data)
                finished = delta.finish_reason is not None
                yield delta
            finished = True
        except DFlashError:
            finished = True  # the replica has ended the stream itself
            raise
        finally:
            if not finished:
                stream.cancel()

    async def status(self) -> list[ReplicaStatus]:
        """One entry per replica that answers in time."""
        answers = [await self._ask_all(name, "status") for name in self._handles]
        return [wire.decode_status(a) for model in answers for a in model if isinstance(a, bytes)]

    async def check_health(self) -> None:
        """Pass when every model has a replica that makes progress.

        Raises:
            EngineDeadError, EngineStalledError: the first replica's error of a model without one.
        """
        for name in self._handles:
            answers = await self._ask_all(name, "check_health")
            failures = [a for a in answers if isinstance(a, BaseException)]
            if len(failures) == len(answers):
                raise translate_error(failures[0], name) if failures else _no_replica(name)

    # -- internals --------------------------------------------------------------------------

    async def _timed(
        self, stream: DeploymentResponseGenerator[Any], model: str
    ) -> AsyncIterator[bytes]:
        """The stream's elements, under both deadlines, with Ray's errors translated."""
        started = time.monotonic()
        allowed = min(self._queue_timeout_s, self._request_timeout_s)
        first = True
        while True:
            try:
                remaining = started + allowed - time.monotonic()
                async with asyncio.timeout(max(0.0, remaining)):
                    data = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                stream.cancel()
                raise _timed_out(model, allowed, first=first) from None
            except _HANDLE_ERRORS as error:
                raise translate_error(error, model) from error
            yield data
            allowed, first = self._request_timeout_s, False

    async def _ask_all(self, model: str, method: str) -> list[Any]:
        """Every replica's answer to a call without arguments; errors are among the answers."""
        call = self._handles[model].broadcast(method)
        try:
            answers: list[Any] = await call.results_async(
                timeout_s=_CONTROL_TIMEOUT_S, return_exceptions=True
            )
        except TimeoutError:
            return [_no_replica(model)]
        except _HANDLE_ERRORS as error:
            return [translate_error(error, model)]
        return answers


def translate_error(error: BaseException, model: str) -> BaseException:
    """Our own error for what Ray or Serve raised; anything unknown comes back unchanged."""
    if isinstance(error, DFlashError) and not isinstance(error, RayTaskError):
        return error
    if isinstance(error, RayTaskError):
        return translate_error(error.cause, model) if error.cause is not None else error
    if isinstance(error, BackPressureError):
        return OverloadedError(
            f"{model} has no room: {error.message} Try again later", error.retry_after_s or 1.0
        )
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return _no_replica(model)
    if isinstance(error, RayActorError | TaskCancelledError):
        return EngineDeadError(
            f"the replica of {model} died while it worked on this request; send it again"
        )
    return error


def _no_replica(model: str) -> EngineDeadError:
    return EngineDeadError(f"no replica of {model} can take requests now; try again later")


def _timed_out(model: str, allowed_s: float, *, first: bool) -> DFlashError:
    if first:
        return OverloadedError(
            f"no replica of {model} began this request within {allowed_s:.0f} s "
            "(queue_timeout_s); try again later"
        )
    return EngineStalledError(
        f"the request to {model} took longer than {allowed_s:.0f} s (request_timeout_s); "
        "ask for fewer tokens"
    )


class Ingress:
    """Serves the HTTP application; `serve.ingress` wraps it in the builder.

    Args:
        settings: the deployment's settings.
        handle: the replica deployment.
    """

    def __init__(self, settings: ServeSettings, handle: DeploymentHandle) -> None:
        self._backend = HandleBackend(
            {settings.model: handle},
            queue_timeout_s=settings.queue_timeout_s,
            request_timeout_s=settings.request_timeout_s,
        )

    def __serve_build_asgi_app__(self) -> Any:
        from dflash_serve.api.app import create_app

        return create_app(self._backend)
