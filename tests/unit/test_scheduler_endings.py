"""How requests end inside the scheduler, and what it counts."""

from __future__ import annotations

import pytest

from dflash_serve.engine.messages import Submit
from dflash_serve.scheduler.plan import DecodeResult, StepPlan, StepResult
from tests.unit.scheduling import VOCAB, Bench, submit, token_at

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True, params=[0, 1], ids=["plain", "overlapped"])
def _lag(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every property holds with the commit of a step before and after the next plan."""
    monkeypatch.setattr(Bench, "default_lag", request.param)


def tokens(count: int, seed: int = 1) -> list[int]:
    return [token_at(seed, len(PROMPT) + i) for i in range(count)]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("end", range(1, 10))
def test_nothing_past_a_stop_id_is_emitted(end: int, accepted: int) -> None:
    bench = Bench(accept=lambda seed, start: accepted)
    stop = tokens(end)[-1]
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=30, stop_token_ids=(stop,)))
    bench.run()
    assert bench.ids("r") == tokens(end)
    assert bench.ends("r") == ["stop"]


@pytest.mark.parametrize("end", range(1, 8))
def test_end_of_sequence_inside_a_block_ends_there(end: int) -> None:
    bench = Bench()
    bench.override[1, len(PROMPT) + end - 1] = 1
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=30))
    bench.run()
    assert bench.ids("r") == [*tokens(end)[:-1], 1]
    assert bench.ends("r") == ["stop"]


def test_end_of_sequence_may_be_ignored() -> None:
    bench = Bench()
    bench.override[1, len(PROMPT) + 2] = 1
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=9, ignore_eos=True))
    bench.run()
    assert len(bench.ids("r")) == 9
    assert bench.ends("r") == ["length"]


@pytest.mark.parametrize("limit", range(1, 11))
def test_exactly_max_tokens_come_out(limit: int) -> None:
    bench = Bench()
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=limit))
    bench.run()
    assert bench.ids("r") == tokens(limit)
    assert bench.scheduler.snapshot().pages_used == 0


def test_pages_past_the_end_of_a_request_are_not_offered_to_others() -> None:
    bench = Bench()
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=5))
    bench.run()
    known = PROMPT + tokens(5)
    bench.scheduler.submit(submit("next", [*known, *tokens(8)[5:], 9], seed=2))
    plan = bench.step()
    assert plan.setups[0].start == 8


def test_abort_while_waiting_takes_no_step() -> None:
    bench = Bench(max_running=1)
    bench.scheduler.submit(submit("a", PROMPT, seed=1, max_tokens=20))
    bench.scheduler.submit(submit("b", PROMPT, seed=2))
    bench.step()
    bench.scheduler.abort("b")
    bench.run()
    assert bench.ends("b") == ["abort"]
    assert bench.ids("b") == []
    assert bench.ids("a") == tokens(20)


def test_abort_during_prefill_frees_slot_and_pages() -> None:
    bench = Bench(prefill_chunk=4)
    bench.scheduler.submit(submit("r", PROMPT * 4, seed=1))
    bench.step()
    assert bench.scheduler.snapshot().running == 1
    bench.scheduler.abort("r")
    bench.run()
    assert bench.ends("r") == ["abort"]
    stats = bench.scheduler.snapshot()
    assert (stats.running, stats.pages_used) == (0, 0)


def test_abort_during_decode_keeps_what_was_emitted() -> None:
    bench = Bench()
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=40))
    for _ in range(3):
        bench.step()
    bench.scheduler.abort("r")
    bench.run()
    # A step still under way when the request is aborted brings nothing.
    assert bench.ids("r") == tokens(9 - 4 * bench.lag)
    assert bench.ends("r") == ["abort"]
    assert bench.scheduler.snapshot().pages_used == 0


def test_abort_after_preemption_ends_the_waiting_request() -> None:
    bench = Bench(max_running=2, num_pages=16, max_model_len=60, prefix_cache=False)
    for i in (1, 2):
        bench.scheduler.submit(submit(f"r{i}", PROMPT, seed=i, max_tokens=40))
    while not bench.scheduler.stats.preemptions:
        bench.step()
    bench.scheduler.abort("r2")
    bench.run()
    assert bench.ends("r2") == ["abort"]
    assert bench.ids("r1") == tokens(40, 1)


def test_abort_of_unknown_and_finished_requests_is_ignored() -> None:
    bench = Bench()
    bench.scheduler.abort("never")
    bench.scheduler.submit(submit("r", PROMPT, seed=1))
    bench.run()
    bench.scheduler.abort("r")
    assert bench.scheduler.take_events() == []


BAD = {
    "empty prompt": (submit("bad", []), "empty"),
    "token too large": (submit("bad", [VOCAB]), f"{VOCAB} is out of range"),
    "token negative": (submit("bad", [-1]), "-1"),
    "emitted out of range": (submit("bad", [5], emitted=[VOCAB]), str(VOCAB)),
    "prompt fills the context": (submit("bad", [5] * 64), "64"),
    "temperature": (submit("bad", [5], temperature=-1.0), "temperature"),
    "no output": (submit("bad", [5], max_tokens=0), "max_tokens"),
}


@pytest.mark.parametrize(("request_", "shown"), BAD.values(), ids=BAD)
def test_bad_request_ends_alone_with_a_text(request_: Submit, shown: str) -> None:
    bench = Bench()
    bench.scheduler.submit(submit("good", PROMPT, seed=1))
    bench.scheduler.submit(request_)
    bench.run()
    assert bench.ends("bad") == ["error"]
    assert shown in next(e.error for e in bench.events if e.error is not None)
    assert bench.ids("good") == tokens(8)


def test_not_a_number_in_a_prefill_ends_that_request_alone() -> None:
    bench = Bench()
    for i in (1, 2):
        bench.scheduler.submit(submit(f"r{i}", PROMPT, seed=i))
    bench.override[1, len(PROMPT)] = -1
    bench.run()
    assert bench.ends("r1") == ["error"]
    assert bench.ids("r1") == []
    assert bench.ids("r2") == tokens(8, 2)


def test_not_a_number_in_a_block_emits_nothing_of_that_block() -> None:
    bench = Bench(lag=0)
    bench.scheduler.submit(submit("r", PROMPT, seed=1))
    bench.step()
    plan: StepPlan = bench.scheduler.plan()
    fault = DecodeResult(picked=[0] * 4, accepted=3, fault=True)
    bench.scheduler.commit(plan, StepResult(decoded=[fault]))
    bench.run()
    assert bench.ids("r") == tokens(1)
    assert bench.ends("r") == ["error"]
    assert bench.scheduler.snapshot().pages_used == 0


@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_counters_add_up_to_the_events(accepted: int) -> None:
    bench = Bench(accept=lambda seed, start: accepted, max_running=2)
    for i in range(5):
        bench.scheduler.submit(submit(f"r{i}", PROMPT, seed=i, max_tokens=6 + i))
    bench.run()
    stats = bench.scheduler.snapshot()
    block = stats.by_length[4]
    assert stats.generated_tokens == sum(len(e.token_ids) for e in bench.events)
    assert block.emitted == stats.generated_tokens - 5, "each prefill brings one token"
    assert block.drafts == sum(1 for e in bench.events if e.drafted)
    assert sum(block.accepted_per_position) == sum(e.accepted for e in bench.events)
    assert stats.prompt_tokens == 5 * len(PROMPT)
    assert stats.finished == {"length": 5}
    assert stats.steps == sum(not plan.empty for plan in bench.plans)
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


def test_tokens_past_the_end_of_a_request_are_not_counted() -> None:
    bench = Bench()
    bench.scheduler.submit(submit("r", PROMPT, seed=1, max_tokens=3))
    bench.run()
    block = bench.scheduler.stats.by_length[4]
    assert (block.drafts, block.emitted) == (1, 2)
    assert block.accepted_per_position == [1, 1, 0]


def test_gauges_follow_waiting_and_running_requests() -> None:
    bench = Bench(max_running=1)
    for i in range(3):
        bench.scheduler.submit(submit(f"r{i}", PROMPT, seed=i, max_tokens=20))
    bench.step()
    stats = bench.scheduler.snapshot()
    assert (stats.running, stats.waiting) == (1, 2)
    assert stats.pages_used > 0
    assert stats.pages_total == 79


def test_requests_taken_are_ended_running_or_waiting_in_every_snapshot() -> None:
    bench = Bench()
    for number in range(12):
        bench.scheduler.submit(submit(f"r{number}", PROMPT, seed=number, max_tokens=4 + number))
    seen = set()
    for turn in range(60):
        if turn in (1, 3, 5):
            bench.scheduler.abort(f"r{turn * 2}")
        stats = bench.scheduler.snapshot()
        seen.add((stats.running > 0, stats.waiting > 0, bool(stats.ended)))
        held = stats.running + stats.waiting
        assert stats.accepted == sum(stats.ended.values()) + held
        if not bench.scheduler.idle:
            bench.step()
    assert stats.accepted == 12
    assert stats.ended["abort"] == 3
    assert len(seen) > 2
