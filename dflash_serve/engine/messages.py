"""What travels between a front end and rank 0: typed, without pickle (msgpack through msgspec).

Commands go to rank 0 and are drained once per step. Reports come back at most once per step and
carry every event of that step.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.draft_scale import ScaleStats
from dflash_serve.scheduler.tuning import Tuning
from dflash_serve.scheduler.verify_length import PolicyStats

__all__ = [
    "Abort",
    "Command",
    "EngineInfo",
    "EngineStats",
    "FinishReason",
    "LengthStats",
    "Report",
    "Shutdown",
    "Submit",
    "TokenEvent",
    "Trace",
    "Traced",
    "Tune",
    "decode_commands",
    "decode_report",
    "encode",
]

FinishReason = Literal["stop", "length", "abort", "error"]


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request, or one to be continued.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: the prompt, at least one id.
        emitted_ids: output ids the client already has; generation goes on after them as if it
            had never stopped. `params.max_tokens` counts them.
        params: sampling parameters.
        cache_salt: requests share cached pages only with requests of the same salt.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    emitted_ids: list[int] = []
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free its pages. Unknown and finished ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop every rank."""


class Trace(msgspec.Struct, frozen=True, tag="trace"):
    """Profile the next steps on every rank.

    Attributes:
        steps: 0 takes an order back that no step has begun to obey.
        folder: where the traces go.
    """

    steps: int
    folder: str


class Tune(msgspec.Struct, frozen=True, tag="tune"):
    """Decide otherwise from the next step on."""

    tuning: Tuning


Command = Submit | Abort | Shutdown | Trace | Tune


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's trace.

    Attributes:
        folder: as ordered.
        path: the file, or None where none could be written.
        error: why.
    """

    rank: int
    folder: str
    path: str | None = None
    error: str | None = None


class TokenEvent(msgspec.Struct, kw_only=True):
    """What one step brought to one request.

    Attributes:
        request_id: the request.
        token_ids: new output ids in order, never past a stop id or a length limit.
        finish_reason: None while the request runs. "stop": a stop id or end of sequence;
            "length": max_tokens or the context is full; "abort": asked for; "error": see `error`.
        error: text for finish_reason "error".
        cached_tokens: prompt tokens found in the prefix cache; set on the first event.
        drafted: tokens the draft proposed in this step for this request.
        accepted: of those, how many the target confirmed.
    """

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int | None = None
    drafted: int = 0
    accepted: int = 0


class LengthStats(msgspec.Struct):
    """Counters of the decode steps that verified the same number of rows.

    Attributes:
        drafts: blocks verified.
        emitted: tokens committed by them, bonus tokens included.
        accepted_per_position: how often the draft token at each position (0-based) was accepted.
    """

    drafts: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = []


class EngineStats(msgspec.Struct):
    """Cumulative counters and gauges of rank 0, sent with every report.

    Attributes:
        replayed_steps, eager_steps: decode steps run from a captured graph, and kernel by kernel.
        late_graphs: steps captured while requests were waiting.
        policy: what the choice of the verify length rests on, where it is chosen per step.
        scale: the fit of the draft's scale, where there is one.
        accepted: requests taken. Of one snapshot, accepted = ended + running + waiting.
        ended: requests that were taken and have ended, by reason.
        gap_seconds: time in which requests were running and no step was: from the end of one to the
            launch of the next. Nothing is added where steps are launched ahead.
        first_token_seconds, first_tokens: sum and number of the times from a request's arrival in
            rank 0 to its first token's departure.
        request_seconds, requests_timed: the same to its end, where that was its own.
        tuning: what was changed since the start.
        consensus_steps: steps on which several ranks agreed before their tokens were sent.
        consensus_mismatches: steps on which they did not, which ends the engine.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = {}
    accepted: int = 0
    ended: dict[str, int] = {}
    step_seconds: float = 0.0
    gap_seconds: float = 0.0
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    request_seconds: float = 0.0
    requests_timed: int = 0
    by_length: dict[int, LengthStats] = {}
    replayed_steps: int = 0
    eager_steps: int = 0
    late_graphs: int = 0
    policy: PolicyStats | None = None
    scale: ScaleStats | None = None
    tuning: Tuning = Tuning()
    consensus_steps: int = 0
    consensus_mismatches: int = 0


class EngineInfo(msgspec.Struct, kw_only=True):
    """What a started engine says about itself; shown in /server_info.

    Attributes:
        max_model_len: longest prompt + output in tokens.
        vocab_size: ids below it may be given in a prompt.
        eos_token_ids: ids that end a request unless it ignores them.
        verify_length: rows verified per step; 1 without a draft.
        block_size: the draft's block, or None without a draft.
        dummy_weights: the weights are random; the output means nothing.
        draft_quantization: what the draft is computed in besides `dtype`, "fp8" or nothing.
        synthetic_acceptance: chance with which a proposal counts as accepted whatever the target
            says, for benchmarks; None where the output is real.
        startup: seconds (or bytes, by the name) of the parts of the start: first runs, in which
            kernels are compiled, capture, timing of the steps.
        verify_lengths: values of g that may be chosen while it runs.
        fallbacks: every place where a slower or rarer path than asked for is in use.
    """

    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    verify_length: int
    block_size: int | None
    tensor_parallel_size: int
    device: str
    dtype: str
    executor: str
    num_pages: int
    page_size: int
    max_running: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    dummy_weights: bool = False
    draft_quantization: str | None = None
    synthetic_acceptance: float | None = None
    startup: dict[str, float] = {}
    verify_lengths: list[int] = []
    fallbacks: list[str] = []
    versions: dict[str, str] = {}


class Report(msgspec.Struct, kw_only=True):
    """Everything rank 0 says after one step.

    Attributes:
        info: in the first report only.
        traces: every rank's, once all have ended.
    """

    events: list[TokenEvent] = []
    stats: EngineStats | None = None
    info: EngineInfo | None = None
    fatal: str | None = None
    traces: list[Traced] = []


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_report = msgspec.msgpack.Decoder(Report)


def encode(message: list[Command] | Report) -> bytes:
    """Serialise a batch of commands or one report."""
    return _encoder.encode(message)


def decode_commands(data: bytes) -> list[Command]:
    """Inverse of `encode` for commands."""
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    """Inverse of `encode` for a report."""
    return _report.decode(data)
