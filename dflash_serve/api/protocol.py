"""The line between the HTTP side (ingress) and the text side (replica).

The ingress parses OpenAI requests into `GenerationRequest`, draws what the client left out (the
seed), and shapes `Delta`s into OpenAI responses. The replica owns tokenizer, detokeniser, stop
strings and engine. Everything here is plain data, so it crosses a Ray handle as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from dflash_serve.engine.messages import EngineInfo, EngineStats
from dflash_serve.errors import RequestError
from dflash_serve.sampling import SamplingParams

__all__ = [
    "MOST_TRACE_SECONDS",
    "Backend",
    "Delta",
    "GenerationRequest",
    "ReplicaState",
    "ReplicaStatus",
    "TraceFiles",
    "TraceRequest",
]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice to generate.

    Attributes:
        request_id: unique; also the abort key.
        model: name the client asked for.
        messages: chat messages as the template takes them, or None for a completion.
        prompt: completion prompt as text or token ids, or None for a chat.
        params: sampling parameters, seed included. `max_tokens` 0 means "whatever still fits".
        stop: strings that end the request; they are not part of the output.
        emitted_ids: output ids the client already has (a continued request).
        session: what the client says its requests belong together by; may decide which replica
            they go to, and nothing else.
    """

    request_id: str
    model: str
    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    stop: tuple[str, ...] = ()
    emitted_ids: list[int] = []
    cache_salt: str = ""
    session: str = ""


class Delta(msgspec.Struct, kw_only=True):
    """What one engine step added to one choice, after stop strings and UTF-8 were settled.

    Attributes:
        text: new text; never half a character, never a part of a stop string.
        token_ids: ids counted as delivered by this delta. Summed over a request they are
            exactly `usage.completion_tokens`.
        finish_reason: None until the last delta.
        prompt_ids: the tokenised prompt; on the first delta only.
        cached_tokens: prompt tokens found in the prefix cache; on the first delta only.
    """

    text: str = ""
    token_ids: list[int] = []
    finish_reason: Literal["stop", "length"] | None = None
    prompt_ids: list[int] | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0


ReplicaState = Literal["serving", "restarting", "leaving"]
"""Takes requests; starts its ranks again; ends."""


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """One replica's answer for /server_info and /metrics.

    Attributes:
        replica: names this replica among those of its model; the `engine` label of its metrics.
        stats: the engine's counters, with `finished` counted as the client saw the end.
        outstanding: requests submitted and not yet finished.
        step_age_s: seconds since the last step while work is pending; 0 when idle.
        state: whether it takes requests.
        restarts: how often its ranks were started again after one had died.
        start_seconds: what the phases of the last start took.
    """

    model: str
    replica: str = "0"
    info: EngineInfo
    stats: EngineStats
    config: dict[str, Any]
    outstanding: int = 0
    step_age_s: float = 0.0
    state: ReplicaState = "serving"
    restarts: int = 0
    start_seconds: dict[str, float] = {}


MOST_TRACE_SECONDS = 600.0


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile the next steps of one replica.

    Attributes:
        steps: how many; the engine says how many at most.
        timeout_s: how long to wait for so many steps and for the files.
        model, replica: which one; left out: whichever has the most requests.
    """

    steps: int
    timeout_s: float = 60.0
    model: str = ""
    replica: str = ""

    def validate(self) -> None:
        """Check what does not depend on the engine.

        Raises:
            RequestError: names the field, and what is allowed.
        """
        if self.steps < 1:
            raise RequestError(f"steps is {self.steps}; allowed: 1 or more", "steps")
        if not 0 < self.timeout_s <= MOST_TRACE_SECONDS:
            raise RequestError(
                f"timeout_s is {self.timeout_s}; allowed: above 0, at most "
                f"{MOST_TRACE_SECONDS:.0f}",
                "timeout_s",
            )


class TraceFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Traces that were written.

    Attributes:
        host, replica: whose disk they are on, and who wrote them.
        paths: a Chrome trace for every rank, in their order.
    """

    host: str
    replica: str
    paths: list[str]


class Backend(Protocol):
    """What the HTTP application needs; a local engine or Ray Serve handles implement it."""

    def models(self) -> list[str]:
        """Names served, in configured order."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Stream one choice. Leaving the iteration early aborts it.

        Raises:
            RequestError: the request cannot be served as given (HTTP 400, 404).
            OverloadedError: no room now (HTTP 429).
            EngineDeadError: the engine died (HTTP 503).
        """

    def own_metrics(self) -> bytes:
        """Prometheus text of what the backend itself counts; may be empty."""

    async def status(self) -> list[ReplicaStatus]:
        """One entry per reachable replica."""

    def may_sleep(self, model: str) -> bool:
        """Whether a model without any replica is in order: the next request starts one."""

    async def trace(self, order: TraceRequest) -> TraceFiles:
        """Profile the next steps of one replica.

        Raises:
            ConflictError: that replica is being traced (HTTP 409).
            RequestError: the order is out of range, or names nobody (HTTP 400).
            EngineDeadError: the engine died, or there is none (HTTP 503).
        """

    async def check_health(self) -> None:
        """Pass when every model can make progress.

        Raises:
            EngineDeadError, EngineStalledError: as the engine says.
        """
