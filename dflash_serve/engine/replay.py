"""Running a flight record again, on CPU and from a cold state.

A slot can be replayed from the plan that set it up, if that plan is in the record and every page
it took from the prefix cache was filled by a step that is replayed too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import load_pair
from dflash_serve.engine.recorder import FlightRecord, StepRecord
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import ConfigError
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import DecodeResult, SlotSetup, StepPlan, StepResult

__all__ = ["ColdPlan", "Difference", "Replay", "cold_plans", "replay"]

_EARLIER = "it was set up before the record begins"


@dataclasses.dataclass(frozen=True)
class ColdPlan:
    """The part of a recorded step that can run from a cold state.

    Attributes:
        plan: the recorded plan without the slots left out, its pages renumbered from 1.
        prefill, decode: which entries of the recorded plan are in it.
        skipped: slots left out, and why.
    """

    record: StepRecord
    plan: StepPlan
    prefill: list[int]
    decode: list[int]
    skipped: dict[int, str]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay first left the record; ids are those one step committed for one slot."""

    step: int
    slot: int
    recorded: list[int]
    replayed: list[int]


@dataclasses.dataclass
class Replay:
    """What a replay showed.

    Attributes:
        steps: recorded steps, those still under way at the end left out.
        entries: prefill chunks and decoded blocks that were run and compared.
        skipped: slots that could not be replayed in some step, and why.
        difference: the first one; None when every id is as recorded.
    """

    steps: int = 0
    entries: int = 0
    skipped: dict[int, str] = dataclasses.field(default_factory=dict)
    difference: Difference | None = None


def cold_plans(steps: list[StepRecord], page_size: int) -> Iterator[ColdPlan]:
    """What of each step can be run by an engine that knows nothing but the record."""
    warm: set[int] = set()  # slots whose whole state comes from steps before
    filled: dict[int, bool] = {}  # page → whether its contents do
    reasons: dict[int, str] = {}
    renumbered: dict[int, int] = {}
    for record in steps:
        plan = record.plan
        hits = {setup.slot: setup.start // page_size for setup in plan.setups}
        for setup in plan.setups:
            _set_up(setup, plan, hits[setup.slot], filled, warm, reasons)
        for slot, first, pages in plan.pages:
            for page in pages[max(0, hits.get(slot, 0) - first) :]:
                filled[page] = slot in warm
        prefill = [i for i, chunk in enumerate(plan.prefill) if chunk.slot in warm]
        decode = [i for i, slot in enumerate(plan.decode) if slot in warm]
        slots = {chunk.slot for chunk in plan.prefill} | set(plan.decode)
        cold = msgspec.structs.replace(
            plan,
            setups=[setup for setup in plan.setups if setup.slot in warm],
            pages=[
                (slot, first, [renumbered.setdefault(p, len(renumbered) + 1) for p in pages])
                for slot, first, pages in plan.pages
                if slot in warm
            ],
            prefill=[plan.prefill[i] for i in prefill],
            decode=[plan.decode[i] for i in decode],
        )
        skipped = {slot: reasons.get(slot, _EARLIER) for slot in sorted(slots - warm)}
        yield ColdPlan(record, cold, prefill, decode, skipped)


def _set_up(
    setup: SlotSetup,
    plan: StepPlan,
    hits: int,
    filled: dict[int, bool],
    warm: set[int],
    reasons: dict[int, str],
) -> None:
    """Decide whether a slot's new request can be replayed."""
    pages = [p for slot, _, pages in plan.pages if slot == setup.slot for p in pages][:hits]
    if all(filled.get(page, False) for page in pages):
        warm.add(setup.slot)
        reasons.pop(setup.slot, None)
    else:
        warm.discard(setup.slot)
        reasons[setup.slot] = (
            f"its first {setup.start} tokens come from cached pages that no replayed step filled"
        )


def replay(record: FlightRecord, target: str, draft: str | None, **fields: object) -> Replay:
    """Run a record's plans with a pair of checkpoints and compare every id.

    Args:
        target, draft: folders; they need not be where the record's engine had them.
        fields: of `EngineConfig`, in place of the record's.

    Raises:
        ConfigError: the record's configuration or the checkpoints cannot be used.
    """
    steps = [step for step in record.steps if step.result is not None]
    plans = list(cold_plans(steps, record.page_size))
    config = _config(record, plans, target, draft, fields)
    outcome = Replay(steps=len(plans))
    runner: Runner | None = None
    for cold in plans:
        outcome.skipped |= cold.skipped
        if cold.plan.empty:
            continue
        runner = runner or Runner(load_pair(config, Single()), config)
        result = runner.execute(cold.plan)
        outcome.difference = _compare(cold, result)
        outcome.entries += len(cold.prefill) + len(cold.decode)
        if outcome.difference is not None:
            return outcome
    return outcome


def _config(
    record: FlightRecord,
    plans: list[ColdPlan],
    target: str,
    draft: str | None,
    fields: dict[str, object],
) -> EngineConfig:
    """The record's configuration on one CPU rank, no larger than its plans need."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(record.config) - known)
    if unknown:
        raise ConfigError(
            f"the record was written by version {record.package} and has settings this one does "
            f"not know: {', '.join(unknown)}; replay it with that version"
        )
    slots, length, pages = 1, 1, 1
    for plan in (cold.plan for cold in plans):
        ends = [chunk.start + len(chunk.token_ids) for chunk in plan.prefill]
        length = max([length, plan.longest, *ends])
        slots = max([slots, *(slot + 1 for slot, _, _ in plan.pages)])
        pages = max([pages, *(page for _, _, ids in plan.pages for page in ids)])
    length = min(length + 1, record.max_model_len)
    per_request = length // record.page_size
    return EngineConfig(
        **record.config
        | {
            "target": target,
            "draft": draft,
            "device": "cpu",
            "executor": "inproc",
            "tensor_parallel_size": 1,
            "kv_cache_gib": None,
            "page_size": record.page_size,
            "max_model_len": length,
            # The pool has room for so many whole requests, hence for every page of the record.
            "max_running": max(slots, -(-pages // max(per_request, 1))),
        }
        | fields
    )


def _compare(cold: ColdPlan, result: StepResult) -> Difference | None:
    recorded = cold.record.result
    assert recorded is not None
    plan, step = cold.record.plan, cold.plan.step
    for i, token in zip(cold.prefill, result.sampled, strict=True):
        if token != recorded.sampled[i]:
            before, after = _one(recorded.sampled[i]), _one(token)
            return Difference(step, plan.prefill[i].slot, before, after)
    for i, decoded in zip(cold.decode, result.decoded, strict=True):
        before, after = _committed(recorded.decoded[i]), _committed(decoded)
        if before != after:
            return Difference(step, plan.decode[i], before, after)
    return None


def _one(token: int | None) -> list[int]:
    return [] if token is None else [token]


def _committed(decoded: DecodeResult) -> list[int]:
    return [] if decoded.fault else decoded.picked[: decoded.accepted + 1]
