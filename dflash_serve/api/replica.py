"""The text side of one engine: prompts to ids, events to deltas, stop strings, usage.

What counts as a completion token: every id the engine emitted for the request, its end-of-sequence
or stop id included, as vLLM counts; after a stop string, the ids up to and including the token in
which the stop string begins (see `stops`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from dflash_serve.api.admin import busiest
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.protocol import (
    Delta,
    GenerationRequest,
    ReplicaStatus,
    TraceFiles,
    TraceRequest,
)
from dflash_serve.api.stops import StopBuffer
from dflash_serve.engine.messages import EngineInfo, EngineStats, Submit, TokenEvent
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
)
from dflash_serve.sampling import SamplingParams

__all__ = ["Engine", "LocalBackend", "TextEngine"]

_INLINE_CHARS = 10_000
"""Longer prompts are tokenised in a thread, so that other requests' events are not held up."""


class Engine(Protocol):
    """The part of `EngineClient` used here."""

    @property
    def info(self) -> EngineInfo:
        """What the engine says about itself."""

    @property
    def stats(self) -> EngineStats:
        """Counters as of the last report."""

    @property
    def outstanding(self) -> int:
        """Requests submitted and not yet finished."""

    @property
    def step_age_s(self) -> float:
        """Seconds since the last report while work is pending."""

    def stream(self, submit: Submit) -> AsyncIterator[TokenEvent]:
        """Run one request; leaving the iteration early aborts it."""

    def check_health(self) -> None:
        """Raise when the engine makes no progress."""

    def trace(self, steps: int, *, timeout_s: float) -> list[str]:
        """Profile the next steps, blocking; returns a file's path for every rank."""


class TextEngine:
    """Serves `GenerationRequest`s with one engine.

    Args:
        engine: a started engine.
        codec: the checkpoint's tokenizer.
        model: the name clients ask for.
        config: what /server_info shows as this replica's configuration.
        replica: names this replica among those of the model.
        max_outstanding: requests held at once; None sets no limit here.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        model: str,
        config: dict[str, Any] | None = None,
        *,
        replica: str = "0",
        max_outstanding: int | None = None,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._model = model
        self._config = dict(config or {})
        self._replica = replica
        self._max_outstanding = max_outstanding
        self._active = 0
        self._unanswered_tokens = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    @property
    def model(self) -> str:
        """The name clients ask for."""
        return self._model

    @property
    def held_tokens(self) -> int:
        """Tokens the engine has on its hands: in cache pages of requests, and in prompts that
        have no answer yet (those being computed count in both)."""
        in_pages = self._engine.stats.pages_used * self._engine.info.page_size
        return in_pages + self._unanswered_tokens

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Stream one choice, one delta per engine step that brought something to deliver.

        Leaving the iteration early, cancellation included, aborts the request.

        Raises:
            RequestError: the request cannot be served as given; the engine has not seen it.
            OverloadedError: `max_outstanding` requests are held already.
            EngineDeadError: the engine died.
            DFlashError: the engine gave this request up (a numerical fault).
        """
        self._admit(request)
        self._active += 1
        reason = "abort"
        unanswered = 0
        try:
            submit = await self._submission(request)
            unanswered = len(submit.prompt_ids) + len(submit.emitted_ids)
            self._unanswered_tokens += unanswered
            output = _Output(self._codec, request, submit.prompt_ids)
            # Closed here and now: the engine must not work on for a client that has gone.
            async with contextlib.aclosing(_closable(self._engine.stream(submit))) as events:
                async for event in events:
                    self._unanswered_tokens -= unanswered
                    unanswered = 0
                    delta = output.take(event)
                    if delta is None:
                        continue
                    reason = delta.finish_reason or reason
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise EngineDeadError("the engine ended the request without a reason; send it again")
        except RequestError:
            reason = "refused"
            raise
        except DFlashError:
            reason = "error"
            raise
        finally:
            self._active -= 1
            self._unanswered_tokens -= unanswered
            if reason in self._finished:
                self._finished[reason] += 1

    def status(self) -> ReplicaStatus:
        """This replica's state for /server_info and /metrics."""
        stats = msgspec.structs.replace(self._engine.stats, finished=dict(self._finished))
        return ReplicaStatus(
            model=self._model,
            replica=self._replica,
            info=self._engine.info,
            stats=stats,
            config=dict(self._config),
            outstanding=self._engine.outstanding,
            step_age_s=self._engine.step_age_s,
        )

    def check_health(self) -> None:
        """Pass while the engine makes progress.

        Raises:
            EngineDeadError, EngineStalledError: as the engine says.
        """
        self._engine.check_health()

    async def trace(self, order: TraceRequest) -> TraceFiles:
        """Profile the engine's next steps.

        Raises:
            ConflictError: another trace is being taken.
            RequestError: the order is out of range, or so many steps did not come in time.
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        order.validate()
        paths = await asyncio.to_thread(self._engine.trace, order.steps, timeout_s=order.timeout_s)
        return TraceFiles(host=socket.gethostname(), replica=self._replica, paths=paths)

    # -- admission --------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> None:
        if request.model != self._model:
            raise ModelNotFoundError(
                f"model {request.model!r} is not served here; served: {self._model}", "model"
            )
        if self._max_outstanding is not None and self._active >= self._max_outstanding:
            raise OverloadedError(
                f"{self._model} holds {self._active} requests, its limit; try again later"
            )
        if request.stop and not self._codec.has_tokenizer:
            raise RequestError(
                "stop is given, but this model has no tokenizer; use stop_token_ids", "stop"
            )

    async def _submission(self, request: GenerationRequest) -> Submit:
        field = "prompt" if request.messages is None else "messages"
        prompt_ids = await self._prompt_ids(request)
        self._check_prompt(prompt_ids, field)
        return Submit(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            params=self._fitted(request.params, len(prompt_ids)),
            emitted_ids=request.emitted_ids,
            cache_salt=request.cache_salt,
        )

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        if request.messages is not None:
            size = sum(len(str(message.get("content", ""))) for message in request.messages)
            if size > _INLINE_CHARS:
                return await asyncio.to_thread(self._codec.encode_chat, request.messages)
            return self._codec.encode_chat(request.messages)
        if isinstance(request.prompt, str):
            if len(request.prompt) > _INLINE_CHARS:
                return await asyncio.to_thread(self._codec.encode, request.prompt)
            return self._codec.encode(request.prompt)
        return request.prompt or []

    def _check_prompt(self, prompt_ids: list[int], field: str) -> None:
        info = self._engine.info
        if not prompt_ids:
            raise RequestError(f"{field} gives no tokens; allowed: at least one", field)
        if len(prompt_ids) >= info.max_model_len:
            raise RequestError(
                f"{field} has {len(prompt_ids)} tokens; allowed: at most "
                f"{info.max_model_len - 1}, since the context of {info.max_model_len} tokens "
                "must hold one of output; shorten it",
                field,
            )
        self._check_ids(prompt_ids, field)

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        limit = self._engine.info.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < limit:
                raise RequestError(
                    f"{field} holds token id {token_id}; allowed: 0 to {limit - 1}", field
                )

    def _fitted(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """The parameters with the output limit filled in and checked against the context."""
        self._check_ids(list(params.stop_token_ids), "stop_token_ids")
        info = self._engine.info
        room = info.max_model_len - prompt_len
        if params.max_tokens > room:
            raise RequestError(
                f"max_tokens is {params.max_tokens} and the prompt has {prompt_len} tokens; "
                f"allowed: at most {info.max_model_len} together, so max_tokens at most {room}",
                "max_tokens",
            )
        fitted = msgspec.structs.replace(
            params,
            max_tokens=params.max_tokens or room,
            # Keeping as many ids as there are, or more, keeps all.
            top_k=params.top_k if params.top_k < info.vocab_size else 0,
        )
        fitted.validate()
        return fitted


class _Output:
    """Turns the events of one request into deltas."""

    def __init__(self, codec: TextCodec, request: GenerationRequest, prompt_ids: list[int]) -> None:
        self._detokenizer = codec.detokenizer(request.emitted_ids)
        self._stops = StopBuffer(request.stop)
        self._next = Delta(prompt_ids=prompt_ids)

    def take(self, event: TokenEvent) -> Delta | None:
        """The delta an event leads to, or None when all of it is held back.

        Raises:
            EngineDeadError: the engine aborted the request by itself.
            DFlashError: the engine gave the request up.
        """
        self._count(event)
        for token_id in event.token_ids:
            self._stops.push(token_id, self._detokenizer.push(token_id))
            if self._stops.matched:
                return self._deliver("stop")
        if event.finish_reason is None:
            return self._deliver(None)
        return self._deliver(self._end(event))

    def _count(self, event: TokenEvent) -> None:
        self._next.drafted += event.drafted
        self._next.accepted += event.accepted
        if event.cached_tokens is not None:
            self._next.cached_tokens = event.cached_tokens

    def _end(self, event: TokenEvent) -> Literal["stop", "length"]:
        if event.finish_reason == "error":
            raise DFlashError(event.error or "the engine gave this request up")
        if event.finish_reason == "stop" or event.finish_reason == "length":
            self._stops.push_text(self._detokenizer.flush())
            return "stop" if self._stops.matched else event.finish_reason
        raise EngineDeadError("the engine aborted this request; send it again")

    def _deliver(self, reason: Literal["stop", "length"] | None) -> Delta | None:
        text, token_ids = self._stops.release() if reason is None else self._stops.flush()
        if not text and not token_ids and reason is None:
            return None
        delta, self._next = self._next, Delta()
        delta.text, delta.token_ids, delta.finish_reason = text, token_ids, reason
        return delta


async def _closable(events: AsyncIterator[TokenEvent]) -> AsyncGenerator[TokenEvent, None]:
    """The iterator as a generator, whose closing closes the iterator where that can be closed."""
    try:
        async for event in events:
            yield event
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


class LocalBackend:
    """A `Backend` over text engines in this process, one per model.

    Args:
        engines: in the order shown by /v1/models.
    """

    def __init__(self, *engines: TextEngine) -> None:
        self._engines = {engine.model: engine for engine in engines}

    def models(self) -> list[str]:
        """Names served, in configured order."""
        return list(self._engines)

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one choice; see `TextEngine.generate`.

        Raises:
            ModelNotFoundError: no engine serves the model.
        """
        engine = self._engines.get(request.model)
        if engine is None:
            raise ModelNotFoundError(
                f"model {request.model!r} is not served here; served: {', '.join(self._engines)}",
                "model",
            )
        return engine.generate(request)

    def own_metrics(self) -> bytes:
        """Nothing: what there is to count, the engines count."""
        return b""

    async def status(self) -> list[ReplicaStatus]:
        """One entry per engine."""
        return [engine.status() for engine in self._engines.values()]

    def may_sleep(self, model: str) -> bool:
        """Never: the engines are here from the start."""
        return False

    async def trace(self, order: TraceRequest) -> TraceFiles:
        """Profile the engine that the order names, or the busiest.

        Raises:
            DFlashError: as `TextEngine.trace`.
        """
        chosen = busiest(await self.status(), order)
        return await self._engines[chosen.model].trace(order)

    async def check_health(self) -> None:
        """Pass when every engine makes progress.

        Raises:
            EngineDeadError, EngineStalledError: as the first failing engine says.
        """
        for engine in self._engines.values():
            engine.check_health()
