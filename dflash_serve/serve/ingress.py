"""The ingress deployment: the OpenAI application in front of the replicas' handles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from dflash_serve.api.protocol import (
    Delta,
    GenerationRequest,
    ReplicaStatus,
    TraceFiles,
    TraceRequest,
)
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    UnavailableError,
)
from dflash_serve.observe.resumes import ResumeMetrics
from dflash_serve.serve import wire
from dflash_serve.serve.journal import ResumeLimits
from dflash_serve.serve.resume import Resumer
from dflash_serve.serve.room import ROOM, Room
from dflash_serve.serve.senders import own_actor_name
from dflash_serve.serve.settings import REPLICA
from dflash_serve.serve.tracing import trace_one

__all__ = ["HandleBackend", "Ingress", "IngressArguments", "translate_error"]

_CONTROL_TIMEOUT_S = 3.0
"""How long a replica may take to answer a status or health call."""
_CANCEL_TIMEOUT_S = 2.0
"""How long a replica that is out of reach may take to end what it was told to cancel."""
_HANDLE_ERRORS = (RayError, RayServeException)


class _AbsentError(UnavailableError):
    """Serve says that there is no replica, other than one that does not answer."""


class HandleBackend:
    """A `Backend` over one deployment handle per model; requests outlive their replicas.

    Args:
        handles: replica deployments by model name, in configured order.
        limits: how long a request is held on to.
        sleepers: models that may have no replica while nobody asks for them.
        sender: this process's name among Ray's actors; replicas end its requests when it dies.
        room: told which replicas say that they can take nothing.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle],
        limits: ResumeLimits,
        *,
        sleepers: Collection[str] = (),
        sender: str | None = None,
        room: Room = ROOM,
    ) -> None:
        self._handles = dict(handles)
        self._streams = {
            name: handle.options(method_name="generate", stream=True)
            for name, handle in self._handles.items()
        }
        self._sleepers = frozenset(sleepers)
        self._sender = sender
        self._room = room
        self._metrics = ResumeMetrics(list(self._handles))
        self._resumer = Resumer(self._attempt, limits, self._metrics)

    def models(self) -> list[str]:
        """Names served, in configured order."""
        return list(self._handles)

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one choice from as many replicas as it takes; leaving early cancels it there.

        Raises:
            RequestError, OverloadedError, EngineDeadError, EngineStalledError: see `Backend` and
                `final_error`.
        """
        if request.model not in self._handles:
            raise ModelNotFoundError(
                f"model {request.model!r} is not served here; served: {', '.join(self._handles)}",
                "model",
            )
        return self._resumer.generate(request)

    def own_metrics(self) -> bytes:
        """Prometheus text of what happened to requests whose engine failed."""
        return self._metrics.page()

    async def status(self) -> list[ReplicaStatus]:
        """One entry per replica that answers in time."""
        answers = await self._ask_everyone("status")
        found = [
            wire.decode_status(answer)
            for of_model in answers.values()
            for answer in of_model
            if isinstance(answer, bytes)
        ]
        if self._resumer.closed:  # nothing reaches them from here any more
            return [msgspec.structs.replace(status, state="leaving") for status in found]
        return found

    async def drain(self, grace_s: float) -> int:
        """Stop taking requests; see `Resumer.drain`."""
        return await self._resumer.drain(grace_s)

    def may_sleep(self, model: str) -> bool:
        """Whether the model is scaled to zero while nobody asks for it."""
        return model in self._sleepers

    async def trace(self, order: TraceRequest) -> TraceFiles:
        """Profile one replica's next steps; see `trace_one`."""
        return await trace_one(self._handles, await self.status(), order)

    async def check_health(self) -> None:
        """Pass when every model has a replica that makes progress, or may have none and has none.

        Raises:
            EngineDeadError, EngineStalledError: the first replica's error of a model without one.
        """
        for name, answers in (await self._ask_everyone("check_health")).items():
            failures = [a for a in answers if isinstance(a, BaseException)]
            if len(failures) == len(answers):
                if name in self._sleepers and all(isinstance(f, _AbsentError) for f in failures):
                    continue
                raise translate_error(failures[0], name) if failures else _no_replica(name)

    # -- internals --------------------------------------------------------------------------

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """One submission to one replica.

        Raises:
            DFlashError: what the replica or Ray said; nothing of the request runs there any more.
        """
        stream = self._streams[request.model].remote(wire.encode_request(request), self._sender)
        ended = False
        try:
            async for data in stream:
                delta = self._decode(data)
                ended = delta.finish_reason is not None
                yield delta
            ended = True
        except DFlashError:
            ended = True  # the replica has ended the stream itself
            raise
        except _HANDLE_ERRORS as error:
            await _cancel(stream)
            ended = True
            raise translate_error(error, request.model) from error
        finally:
            if not ended:
                stream.cancel()

    def _decode(self, data: bytes) -> Delta:
        try:
            return wire.decode_delta(data)
        except DFlashError:
            replica = wire.unable_replica(data)
            if replica is not None:
                self._room.none_at(replica)
            raise

    async def _ask_everyone(self, method: str) -> dict[str, list[Any]]:
        """`_ask_all` of every model at once: one that does not answer costs the others no time."""
        answers = await asyncio.gather(*(self._ask_all(name, method) for name in self._handles))
        return dict(zip(self._handles, answers, strict=True))

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
        if isinstance(error.cause, asyncio.CancelledError):
            return _died(model)  # raised here it would look like a cancellation of this request
        return translate_error(error.cause, model) if error.cause is not None else error
    if isinstance(error, BackPressureError):
        return OverloadedError(
            f"{model} has no room: {error.message} Try again later", error.retry_after_s or 1.0
        )
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return _AbsentError(str(_no_replica(model)))
    if isinstance(error, RayError):
        return _died(model)
    return error


def _died(model: str) -> EngineDeadError:
    return EngineDeadError(
        f"the replica of {model} died while it worked on this request; send it again"
    )


def _no_replica(model: str) -> UnavailableError:
    return UnavailableError(f"no replica of {model} can take requests now; try again later")


async def _cancel(stream: DeploymentResponseGenerator[Any]) -> None:
    """Cancel a stream that broke and wait for its end: its replica may only be out of reach."""
    stream.cancel()
    with contextlib.suppress(*_HANDLE_ERRORS, TimeoutError):
        async with asyncio.timeout(_CANCEL_TIMEOUT_S):
            async for _ in stream:
                pass


@dataclasses.dataclass(frozen=True, slots=True)
class IngressArguments:
    """What an ingress is told of the settings, and no more.

    Attributes:
        models: names served, in the order shown.
        applications: by model, the application of those whose replicas are not in this one.
        sleepers: models that may have no replica while nobody asks for them.
        limits: how long a request is held on to.
        admin: serve /admin.
    """

    models: tuple[str, ...]
    applications: Mapping[str, str]
    sleepers: tuple[str, ...]
    limits: ResumeLimits
    admin: bool = False


class Ingress:
    """Serves the HTTP application; `serve.ingress` wraps it in the builder.

    Args:
        arguments: what is served, and the limits.
        handles: by model, the replica deployments of this application.
    """

    def __init__(
        self, arguments: IngressArguments, handles: Mapping[str, DeploymentHandle]
    ) -> None:
        # A handle by name needs no deployment yet: applications may start in any order, and
        # one that is deployed again keeps its name.
        elsewhere = {
            model: DeploymentHandle(REPLICA, application)
            for model, application in arguments.applications.items()
        }
        found = {**handles, **elsewhere}
        self._admin = arguments.admin
        self._backend = HandleBackend(
            {model: found[model] for model in arguments.models},
            arguments.limits,
            sleepers=arguments.sleepers,
            sender=own_actor_name(),
        )

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests (503) and end what is not done within `grace_s` with an error event.

        Returns:
            How many requests were ended so.
        """
        return await self._backend.drain(grace_s)

    def __serve_build_asgi_app__(self) -> Any:
        from dflash_serve.api.app import create_app

        return create_app(self._backend, admin=self._admin)
