"""The floor against the published tables, and what must hold of any floor."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_serve.bench.roofline import (
    H200,
    MACHINES,
    TARGETS,
    Floor,
    Machine,
    Workload,
    best_length,
    draft_like,
    geometric_rate,
    step_floor,
)
from dflash_serve.errors import ConfigError
from tests.bench.published import BLOCK, CONTEXT, Row, differing, table


def block_step(
    name: str,
    batch: int,
    *,
    context: int = CONTEXT,
    rows: int = BLOCK,
    tp: int = 1,
    machine: Machine = H200,
) -> Floor:
    target = TARGETS[name]
    return step_floor(target, draft_like(target), Workload(batch, context, rows, tp), machine)


def plain_step(
    name: str, batch: int, *, context: int = CONTEXT, tp: int = 1, machine: Machine = H200
) -> Floor:
    return step_floor(TARGETS[name], None, Workload(batch, context, 1, tp), machine)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_steps_are_the_published_ones_to_the_last_digit(name: str) -> None:
    rows = [row for row in table("steps") if row["target"] == name]
    assert len(rows) == 16
    wrong = {}
    for row in rows:
        batch, tp = int(row["batch"]), int(row["tp"])
        step, plain = block_step(name, batch, tp=tp), plain_step(name, batch, tp=tp)
        estimate = block_step(name, batch, tp=tp, machine=H200.estimate()).seconds
        values = {
            "gigabytes": step.bytes / 1e9,
            "teraflop": step.flops / 1e12,
            "link_megabytes": step.collective_bytes / 1e6,
            "floor_ms": step.seconds * 1e3,
            "estimate_ms": estimate * 1e3,
            "rate_3": 3 * batch / step.seconds,
            "rate_5": 5 * batch / step.seconds,
            "rate_6.5": 6.5 * batch / step.seconds,
            "estimate_rate_5": 5 * batch / estimate,
            "plain_ms": plain.seconds * 1e3,
            "plain_rate": batch / plain.seconds,
            "even_at": step.seconds / plain.seconds,
        }
        if difference := differing(row, values):
            wrong[tp, batch] = difference
    assert wrong == {}


@pytest.mark.parametrize("row", table("phases"), ids=lambda r: "-".join(list(r.values())[:3]))
def test_every_phase_takes_the_published_time(row: Row) -> None:
    floor = block_step("qwen3-8b", int(row["batch"]), tp=int(row["tp"]))
    seconds = {phase.name: phase.seconds for phase in floor.phases} | {"sum": floor.seconds}
    assert not differing(row, {"floor_ms": seconds[row["phase"]] * 1e3})


@pytest.mark.parametrize("row", table("contexts"), ids=lambda r: f"{r['context']}-{r['batch']}")
def test_longer_contexts_cost_the_published_time(row: Row) -> None:
    batch, context = int(row["batch"]), int(row["context"])
    step = block_step("qwen3-8b", batch, context=context)
    plain = plain_step("qwen3-8b", batch, context=context)
    empty = block_step("qwen3-8b", batch, context=0)
    values = {
        "floor_ms": step.seconds * 1e3,
        "plain_ms": plain.seconds * 1e3,
        "even_at": step.seconds / plain.seconds,
        "kv_percent": 100 * (1 - empty.bytes / step.bytes),
    }
    assert not differing(row, values)


@pytest.mark.parametrize("row", table("lengths"), ids=lambda r: "-".join(list(r.values())[:5]))
def test_the_best_length_and_its_gain_are_the_published_ones(row: Row) -> None:
    name, batch, tp = row["target"], int(row["batch"]), int(row["tp"])
    machine = H200.estimate()
    alpha = geometric_rate(float(row["tau"]), BLOCK)
    plain = plain_step(name, batch, tp=tp, machine=machine).seconds

    def tokens(rows: int) -> float:
        return sum(alpha**i for i in range(rows))

    def seconds(rows: int) -> float:
        return block_step(name, batch, rows=rows, tp=tp, machine=machine).seconds

    best, rate = best_length(seconds, tokens, BLOCK)
    whole = tokens(BLOCK) / seconds(BLOCK)
    values = {
        "best": best,
        "gain": rate * plain,
        "gain_16": whole * plain,
        "plain_rate": batch / plain,
    }
    assert not differing(row, values)


@pytest.mark.parametrize(
    ("change", "milliseconds"),
    [
        ({}, (5.68, 3.59, 2.32, 1.69)),
        ({"collective_seconds": 2e-6}, (5.68, 3.32, 2.06, 1.42)),
        ({"node_seconds": 0.7e-6}, (5.43, 3.33, 2.06, 1.43)),
        ({"bandwidth": 0.95 * 4.3e12}, (5.14, 3.32, 2.18, 1.62)),
    ],
)
def test_each_overhead_of_the_estimate_has_the_published_weight(
    change: dict[str, float], milliseconds: tuple[float, ...]
) -> None:
    machine = dataclasses.replace(H200.estimate(), **change)  # type: ignore[arg-type]
    for tp, expected in zip((1, 2, 4, 8), milliseconds, strict=True):
        seconds = block_step("qwen3-8b", 1, tp=tp, machine=machine).seconds
        assert f"{seconds * 1e3:.2f}" == f"{expected:.2f}"


def test_the_read_ceiling_gives_the_measured_machines_floor() -> None:
    read = MACHINES["h200-read"]
    assert f"{block_step('qwen3-8b', 1, machine=read).seconds * 1e3:.2f}" == "4.46"
    assert f"{plain_step('qwen3-8b', 1, machine=read).seconds * 1e3:.2f}" == "3.64"


def test_collectives_are_counted_only_between_devices() -> None:
    assert block_step("qwen3-8b", 1).collectives == 0
    assert block_step("qwen3-8b", 1, tp=2).collectives == 87
    assert block_step("qwen3-32b", 1, tp=8).collectives == 143
    assert block_step("llama-3.1-8b", 1, tp=4).collectives == 79


@pytest.mark.parametrize(
    ("batch", "tp", "link", "bound"),
    [(1, 1, 450e9, "bytes"), (128, 1, 450e9, "flops"), (128, 8, 20e9, "link")],
)
def test_the_bound_is_the_longest_of_memory_arithmetic_and_link(
    batch: int, tp: int, link: float, bound: str
) -> None:
    floor = block_step("qwen3-8b", batch, tp=tp, machine=dataclasses.replace(H200, link=link))
    assert {p.name: p.bound for p in floor.phases}["target"] == bound


def test_a_step_bound_by_memory_costs_the_same_for_more_rows() -> None:
    few, many = (block_step("qwen3-8b", 1, rows=rows).seconds for rows in (2, 16))
    assert many == pytest.approx(few, rel=0.01)


def test_one_row_drafts_nothing_and_still_injects() -> None:
    floor = block_step("qwen3-8b", 8, rows=1)
    plain = plain_step("qwen3-8b", 8)
    assert [p.name for p in floor.phases] == ["target", "target head", "inject"]
    assert floor.phases[:2] == plain.phases


@pytest.mark.parametrize("tau", [0.9, 16.1])
def test_tokens_that_no_block_can_bring_are_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match="a block of 16 brings 1 to 16"):
        geometric_rate(tau, 16)


@pytest.mark.parametrize("tau", [1.0, 1.2, 5.0, 16.0])
def test_the_geometric_rate_brings_the_tokens_asked_for(tau: float) -> None:
    alpha = geometric_rate(tau, BLOCK)
    assert sum(alpha**i for i in range(BLOCK)) == pytest.approx(tau)
