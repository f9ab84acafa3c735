"""Prometheus families made from the replicas' own counters at the time of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_serve.api.protocol import ReplicaState, ReplicaStatus
from dflash_serve.engine.messages import LengthStats
from dflash_serve.scheduler.verify_length import PolicyStats

__all__ = ["accept_length", "lengths_of", "replica_families", "speculative"]

Labels: TypeAlias = tuple[str, ...]
Samples: TypeAlias = Iterable[tuple[Labels, float]]

FINISHED_REASONS = ("stop", "length", "abort", "error")


class _Family(NamedTuple):
    """One metric: its samples as a function of a replica's status."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    read: Callable[[ReplicaStatus], Samples]
    labels: tuple[str, ...] = ()


def lengths_of(status: ReplicaStatus) -> dict[int, LengthStats]:
    """Counters per verify length; the configured one is there before the first step."""
    return {status.info.verify_length: LengthStats(), **status.stats.by_length}


def speculative(status: ReplicaStatus) -> dict[int, LengthStats]:
    """The verify lengths that draft anything: above one row."""
    return {g: s for g, s in lengths_of(status).items() if g > 1}


def accept_length(lengths: Iterable[LengthStats]) -> float | None:
    """Tokens committed per verified block, bonus token included; None before the first block."""
    parts = list(lengths)
    drafts = sum(part.drafts for part in parts)
    return sum(part.emitted for part in parts) / drafts if drafts else None


def _one(read: Callable[[ReplicaStatus], float]) -> Callable[[ReplicaStatus], Samples]:
    return lambda status: [((), read(status))]


def _pages_share(status: ReplicaStatus) -> float:
    stats = status.stats
    return stats.pages_used / stats.pages_total if stats.pages_total else 0.0


def _finished(status: ReplicaStatus) -> Samples:
    counts = {**dict.fromkeys(FINISHED_REASONS, 0), **status.stats.finished}
    return [((reason,), count) for reason, count in counts.items()]


def _drafts(status: ReplicaStatus) -> float:
    return sum(part.drafts for part in speculative(status).values())


def _draft_tokens(status: ReplicaStatus) -> float:
    return sum((g - 1) * part.drafts for g, part in speculative(status).items())


def _accepted_per_position(status: ReplicaStatus) -> list[int]:
    lengths = speculative(status)
    counts = [0] * (max(lengths, default=1) - 1)
    for part in lengths.values():
        for position, count in enumerate(part.accepted_per_position):
            counts[position] += count
    return counts


def _per_position(status: ReplicaStatus) -> Samples:
    return [((str(k),), count) for k, count in enumerate(_accepted_per_position(status))]


def _per_length(read: Callable[[LengthStats], float]) -> Callable[[ReplicaStatus], Samples]:
    return lambda status: [((str(g),), read(part)) for g, part in lengths_of(status).items()]


def _chosen(read: Callable[[PolicyStats], float]) -> Callable[[ReplicaStatus], Samples]:
    """Of replicas that choose the verify length per step."""
    return lambda status: [((), read(status.stats.policy))] if status.stats.policy else []


def _predicted(
    read: Callable[[PolicyStats], dict[int, float]],
) -> Callable[[ReplicaStatus], Samples]:
    return lambda status: (
        [((str(g),), value) for g, value in read(status.stats.policy).items()]
        if status.stats.policy
        else []
    )


_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

_FAMILIES = (
    # What vLLM has, under vLLM's names and with its meanings.
    _Family(
        _GAUGE,
        "vllm:num_requests_running",
        "Requests that hold pages and take part in steps.",
        _one(lambda s: s.stats.running),
    ),
    _Family(
        _GAUGE,
        "vllm:num_requests_waiting",
        "Requests waiting for a place in the batch.",
        _one(lambda s: s.stats.waiting),
    ),
    _Family(_GAUGE, "vllm:kv_cache_usage_perc", "KV pages in use, 0 to 1.", _one(_pages_share)),
    _Family(
        _COUNTER,
        "vllm:num_preemptions",
        "Requests that lost their pages and were computed again.",
        _one(lambda s: s.stats.preemptions),
    ),
    _Family(
        _COUNTER,
        "vllm:prompt_tokens",
        "Prompt tokens of the requests taken.",
        _one(lambda s: s.stats.prompt_tokens),
    ),
    _Family(
        _COUNTER,
        "vllm:prompt_tokens_cached",
        "Prompt tokens found in the prefix cache.",
        _one(lambda s: s.stats.cached_tokens),
    ),
    _Family(
        _COUNTER,
        "vllm:generation_tokens",
        "Tokens generated.",
        _one(lambda s: s.stats.generated_tokens),
    ),
    _Family(
        _COUNTER,
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        _one(lambda s: s.stats.prefix_queries),
    ),
    _Family(
        _COUNTER,
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache.",
        _one(lambda s: s.stats.prefix_hits),
    ),
    _Family(
        _COUNTER,
        "vllm:request_success",
        "Requests ended, by how the client saw the end.",
        _finished,
        ("finished_reason",),
    ),
    _Family(_COUNTER, "vllm:spec_decode_num_drafts", "Draft blocks verified.", _one(_drafts)),
    _Family(_COUNTER, "vllm:spec_decode_num_draft_tokens", "Tokens drafted.", _one(_draft_tokens)),
    _Family(
        _COUNTER,
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that the target confirmed.",
        _one(lambda s: sum(_accepted_per_position(s))),
    ),
    _Family(
        _COUNTER,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that the target confirmed, by position in the draft.",
        _per_position,
        ("position",),
    ),
    # What vLLM has not.
    _Family(
        _COUNTER,
        "dflash_engine_requests_accepted",
        "Requests the engine took: those it ended, those running and those waiting.",
        _one(lambda s: s.stats.accepted),
    ),
    _Family(
        _COUNTER,
        "dflash_engine_requests_ended",
        "Requests the engine took and ended, by reason.",
        lambda s: [((reason,), s.stats.ended.get(reason, 0)) for reason in FINISHED_REASONS],
        ("finished_reason",),
    ),
    _Family(_COUNTER, "dflash_steps", "Engine steps.", _one(lambda s: s.stats.steps)),
    _Family(
        _COUNTER,
        "dflash_step_seconds",
        "Seconds spent in engine steps.",
        _one(lambda s: s.stats.step_seconds),
    ),
    _Family(
        _COUNTER,
        "dflash_step_gap_seconds",
        "Seconds from the end of a step to the launch of the next while requests were running.",
        _one(lambda s: s.stats.gap_seconds),
    ),
    _Family(
        _COUNTER,
        "dflash_engine_first_token_seconds",
        "Sum of the times from a request's arrival in rank 0 to its first token.",
        _one(lambda s: s.stats.first_token_seconds),
    ),
    _Family(
        _COUNTER,
        "dflash_engine_first_tokens",
        "Requests in dflash_engine_first_token_seconds.",
        _one(lambda s: s.stats.first_tokens),
    ),
    _Family(
        _COUNTER,
        "dflash_engine_request_seconds",
        "Sum of the times from a request's arrival in rank 0 to its end, where that was its own.",
        _one(lambda s: s.stats.request_seconds),
    ),
    _Family(
        _COUNTER,
        "dflash_engine_requests_timed",
        "Requests in dflash_engine_request_seconds.",
        _one(lambda s: s.stats.requests_timed),
    ),
    _Family(
        _COUNTER,
        "dflash_spec_drafts",
        "Blocks verified, by rows verified per step.",
        _per_length(lambda part: part.drafts),
        ("verify_length",),
    ),
    _Family(
        _COUNTER,
        "dflash_spec_emitted_tokens",
        "Tokens committed by verified blocks, by rows verified per step.",
        _per_length(lambda part: part.emitted),
        ("verify_length",),
    ),
    _Family(
        _GAUGE,
        "dflash_verify_length",
        "Rows verified per step, where they are chosen per step.",
        _chosen(lambda policy: policy.rows),
    ),
    _Family(
        _COUNTER,
        "dflash_verify_length_switches",
        "Changes of the rows verified per step.",
        _chosen(lambda policy: policy.switches),
    ),
    _Family(
        _COUNTER,
        "dflash_verify_length_explorations",
        "Times that another number of rows was tried for a few steps.",
        _chosen(lambda policy: policy.explorations),
    ),
    _Family(
        _GAUGE,
        "dflash_predicted_tokens_per_second",
        "What the choice rests on, by rows verified per step.",
        _predicted(lambda policy: policy.tokens_per_second),
        ("verify_length",),
    ),
    _Family(
        _GAUGE,
        "dflash_predicted_tokens_per_step",
        "Tokens one block is expected to commit, by rows verified per step.",
        _predicted(lambda policy: policy.tokens_per_step),
        ("verify_length",),
    ),
    _Family(
        _COUNTER,
        "dflash_replayed_steps",
        "Decode steps run from a captured graph.",
        _one(lambda s: s.stats.replayed_steps),
    ),
    _Family(
        _COUNTER,
        "dflash_eager_steps",
        "Decode steps run kernel by kernel.",
        _one(lambda s: s.stats.eager_steps),
    ),
    _Family(
        _COUNTER,
        "dflash_late_graphs",
        "Steps captured while requests were waiting.",
        _one(lambda s: s.stats.late_graphs),
    ),
    _Family(
        _GAUGE,
        "dflash_draft_scale",
        "Factor on the draft's logits, where it is fitted.",
        lambda s: [((), s.stats.scale.scale)] if s.stats.scale else [],
    ),
    _Family(
        _COUNTER,
        "dflash_consensus_steps",
        "Steps whose tokens were sent after all ranks had committed the same.",
        _one(lambda s: s.stats.consensus_steps),
    ),
    _Family(
        _COUNTER,
        "dflash_consensus_mismatches",
        "Steps in which ranks committed different tokens; the first one ends the engine.",
        _one(lambda s: s.stats.consensus_mismatches),
    ),
    _Family(
        _GAUGE,
        "dflash_step_age_seconds",
        "Seconds since the last step while work is pending.",
        _one(lambda s: s.step_age_s),
    ),
    _Family(
        _GAUGE,
        "dflash_outstanding_requests",
        "Requests submitted to the engine and not finished, by the front end's count.",
        _one(lambda s: s.outstanding),
    ),
    _Family(
        _GAUGE,
        "dflash_replica_state",
        "1 for the state a replica is in, 0 for the others.",
        lambda s: [((state,), float(s.state == state)) for state in get_args(ReplicaState)],
        ("state",),
    ),
    _Family(
        _COUNTER,
        "dflash_gang_restarts",
        "Times a replica's ranks were started again after one had died.",
        _one(lambda s: s.restarts),
    ),
    _Family(
        _GAUGE,
        "dflash_gang_start_seconds",
        "Seconds that the phases of the last start of a replica's ranks took.",
        lambda s: [((phase,), seconds) for phase, seconds in s.start_seconds.items()],
        ("phase",),
    ),
    _Family(_GAUGE, "dflash_pages", "KV pages there are.", _one(lambda s: s.stats.pages_total)),
    _Family(
        _GAUGE,
        "dflash_pages_cached",
        "KV pages kept for later prompts only.",
        _one(lambda s: s.stats.pages_cached),
    ),
    _Family(
        _GAUGE,
        "dflash_fallbacks",
        "Places where a slower path than asked for is in use; /server_info names them.",
        _one(lambda s: len(s.info.fallbacks)),
    ),
)


def replica_families(
    statuses: Sequence[ReplicaStatus], on_error: Callable[[Exception], None]
) -> list[Metric]:
    """Every family, with one set of samples per replica.

    Args:
        statuses: the replicas that answered.
        on_error: told of each sample that could not be made; the others still are.
    """
    families = []
    for family in _FAMILIES:
        metric = family.kind(
            family.name, family.text, labels=["model_name", "engine", *family.labels]
        )
        for status in statuses:
            try:
                for labels, value in family.read(status):
                    metric.add_metric([status.model, status.replica, *labels], value)
            except Exception as error:  # one odd status must not take the page away
                on_error(error)
        families.append(metric)
    return families
