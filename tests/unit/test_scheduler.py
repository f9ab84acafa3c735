"""The scheduler with a fake runner: order, budgets, preemption, the prefix cache, endings."""

from __future__ import annotations

import random

import pytest

from dflash_serve.scheduler.plan import StepResult
from tests.unit.scheduling import Bench, submit, token_at


@pytest.fixture(autouse=True, params=[0, 1], ids=["plain", "overlapped"])
def _lag(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every property holds with the commit of a step before and after the next plan."""
    monkeypatch.setattr(Bench, "default_lag", request.param)


def expected(seed: int, prompt_len: int, count: int) -> list[int]:
    return [token_at(seed, prompt_len + i) for i in range(count)]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=length)


def test_requests_are_admitted_in_order_of_arrival() -> None:
    bench = Bench(max_running=2)
    for i in range(5):
        bench.scheduler.submit(submit(f"r{i}", prompt(5, i), seed=i))
    bench.run()
    first = [e.request_id for e in bench.events]
    assert sorted(set(first), key=first.index) == [f"r{i}" for i in range(5)]


def test_no_more_requests_run_than_there_are_slots() -> None:
    bench = Bench(max_running=2)
    for i in range(6):
        bench.scheduler.submit(submit(f"r{i}", prompt(3, i), seed=i))
    while not bench.scheduler.idle:
        bench.step()
        stats = bench.scheduler.snapshot()
        assert stats.running <= 2
    assert all(bench.ids(f"r{i}") == expected(i, 3, 8) for i in range(6))


def test_slots_are_used_again() -> None:
    bench = Bench(max_running=2)
    for i in range(7):
        bench.scheduler.submit(submit(f"r{i}", prompt(3, i), seed=i))
    bench.run()
    used = [setup.slot for plan in bench.plans for setup in plan.setups]
    assert len(used) == 7
    assert set(used) == {0, 1}


def test_a_step_computes_no_more_prompt_than_the_chunk() -> None:
    bench = Bench(prefill_chunk=8)
    bench.scheduler.submit(submit("long", prompt(30, 1), seed=1))
    bench.scheduler.submit(submit("short", prompt(5, 2), seed=2))
    bench.run()
    chunks = [[len(c.token_ids) for c in plan.prefill] for plan in bench.plans]
    assert chunks[:5] == [[8], [8], [8], [6, 2], [3]]
    assert bench.ids("long") == expected(1, 30, 8)
    assert bench.ids("short") == expected(2, 5, 8)


def test_decoding_goes_on_while_another_prompt_is_computed() -> None:
    bench = Bench(prefill_chunk=4)
    bench.scheduler.submit(submit("a", prompt(3, 1), seed=1, max_tokens=30))
    bench.step()
    bench.scheduler.submit(submit("b", prompt(20, 2), seed=2))
    plan = bench.step()
    assert plan.decode
    assert plan.prefill


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_ids_do_not_depend_on_chunks_or_acceptance(accepted: int, chunk: int) -> None:
    bench = Bench(accept=lambda seed, start: accepted, prefill_chunk=chunk)
    for i in range(6):
        bench.scheduler.submit(submit(f"r{i}", prompt(3 + 5 * i, i), seed=i, max_tokens=9 + i))
    bench.run()
    for i in range(6):
        assert bench.ids(f"r{i}") == expected(i, 3 + 5 * i, 9 + i)
        assert bench.ends(f"r{i}") == ["length"]


def test_preempted_requests_come_back_and_lose_nothing() -> None:
    bench = Bench(max_running=4, num_pages=18, max_model_len=60)
    for i in range(4):
        bench.scheduler.submit(submit(f"r{i}", prompt(6, i), seed=i, max_tokens=40))
    bench.run()
    stats = bench.scheduler.snapshot()
    assert stats.preemptions > 0
    assert stats.pages_used == 0
    for i in range(4):
        assert bench.ids(f"r{i}") == expected(i, 6, 40)


def test_the_request_admitted_last_is_preempted_first() -> None:
    bench = Bench(max_running=3, num_pages=16, max_model_len=60, prefix_cache=False)
    for i in range(3):
        bench.scheduler.submit(submit(f"r{i}", prompt(6, i), seed=i, max_tokens=40))
    bench.run()
    ends = [e.request_id for e in bench.events if e.finish_reason]
    assert bench.scheduler.stats.preemptions > 0
    assert ends == ["r0", "r1", "r2"]


def test_preempted_requests_go_before_newcomers() -> None:
    bench = Bench(max_running=2, num_pages=16, max_model_len=60, prefix_cache=False)
    bench.scheduler.submit(submit("a", prompt(6, 0), seed=0, max_tokens=40))
    bench.scheduler.submit(submit("b", prompt(6, 1), seed=1, max_tokens=40))
    bench.step()
    bench.scheduler.submit(submit("c", prompt(6, 2), seed=2, max_tokens=4))
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    admitted = [setup.seed for plan in bench.plans for setup in plan.setups]
    assert admitted[:3] == [0, 1, 1]


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9, 12])
def test_a_prefix_hit_never_covers_the_last_prompt_token(length: int) -> None:
    bench = Bench()
    ids = prompt(length, 3)
    for name in ("cold", "warm"):
        bench.scheduler.submit(submit(name, ids, seed=1))
        bench.run()
    setup = next(s for plan in reversed(bench.plans) for s in plan.setups)
    assert setup.start == (length - 1) // 4 * 4
    assert bench.ids("warm") == bench.ids("cold") == expected(1, length, 8)
    reported = [e.cached_tokens for e in bench.events if e.request_id == "warm"]
    assert reported[0] == (length - 1) // 4 * 4
    assert set(reported[1:]) <= {None}


def test_output_is_found_in_the_cache_by_a_later_turn() -> None:
    bench = Bench()
    bench.scheduler.submit(submit("first", prompt(6, 1), seed=1, max_tokens=10))
    bench.run()
    turn = prompt(6, 1) + bench.ids("first") + [5, 6]
    bench.scheduler.submit(submit("second", turn, seed=2))
    bench.run()
    # The last block was accepted past the end, so the last output token is committed too.
    assert next(e.cached_tokens for e in bench.events if e.request_id == "second") == 16


def test_requests_with_another_salt_share_no_pages() -> None:
    bench = Bench()
    for name, salt in (("a", ""), ("b", "x"), ("c", "x")):
        bench.scheduler.submit(submit(name, prompt(9, 1), seed=1, salt=salt))
        bench.run()
    cached = {e.request_id: e.cached_tokens for e in bench.events if e.cached_tokens is not None}
    assert cached == {"a": 0, "b": 0, "c": 8}


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    bench = Bench(prefix_cache=False)
    for name in ("a", "b"):
        bench.scheduler.submit(submit(name, prompt(9, 1), seed=1))
        bench.run()
    stats = bench.scheduler.snapshot()
    assert (stats.pages_cached, stats.prefix_hits, stats.cached_tokens) == (0, 0, 0)


def test_a_continued_request_goes_on_as_if_it_had_never_stopped() -> None:
    for emitted in range(1, 20):
        bench = Bench()
        whole = expected(4, 7, 20)
        bench.scheduler.submit(
            submit("r", prompt(7, 4), seed=4, max_tokens=20, emitted=whole[:emitted])
        )
        bench.run()
        assert bench.ids("r") == whole[emitted:]
        assert bench.ends("r") == ["length"]


def test_a_continued_request_found_whole_in_the_cache_decodes_at_once() -> None:
    bench = Bench()
    whole = expected(4, 7, 20)
    bench.scheduler.submit(submit("first", prompt(7, 4), seed=4, max_tokens=20))
    bench.run()
    # 7 + 10 known tokens: 16 of them fill four cached pages, the last is the anchor.
    again = submit("again", prompt(7, 4), seed=4, max_tokens=20, emitted=whole[:10])
    bench.scheduler.submit(again)
    plan = bench.step()
    assert plan.setups[0].start == 16
    assert not plan.prefill
    bench.run()
    assert bench.ids("again") == whole[10:]


@pytest.mark.parametrize("emitted", [3, 4], ids=["limit reached", "limit passed"])
def test_a_continued_request_that_is_over_ends_without_a_step(emitted: int) -> None:
    bench = Bench()
    ids = expected(1, 5, emitted)
    bench.scheduler.submit(submit("r", prompt(5, 1), seed=1, max_tokens=3, emitted=ids))
    assert bench.scheduler.idle
    bench.run()
    assert bench.ends("r") == ["length"]


def test_a_continued_request_whose_last_id_ended_it_ends_without_a_step() -> None:
    bench = Bench()
    bench.scheduler.submit(submit("r", prompt(5, 1), emitted=[9, 1]))
    bench.run()
    assert bench.ends("r") == ["stop"]


def test_the_context_limit_ends_a_request() -> None:
    bench = Bench(max_model_len=20)
    bench.scheduler.submit(submit("r", prompt(13, 1), seed=1, max_tokens=100))
    bench.run()
    assert bench.ids("r") == expected(1, 13, 7)
    assert bench.ends("r") == ["length"]


def test_a_plan_without_requests_is_empty_and_harmless() -> None:
    bench = Bench()
    plan = bench.scheduler.plan()
    assert plan.empty
    bench.scheduler.commit(plan, StepResult())
    assert bench.scheduler.take_events() == []


def test_random_load_gives_every_request_its_own_tokens_once() -> None:
    rng = random.Random(11)
    bench = Bench(
        accept=lambda seed, start: (seed * 31 + start) % 4,
        max_running=3,
        num_pages=20,
        max_model_len=60,
        prefill_chunk=6,
    )
    sizes = {}
    for i in range(40):
        sizes[i] = (rng.randint(1, 25), rng.randint(1, 30))
        length, count = sizes[i]
        bench.scheduler.submit(submit(f"r{i}", prompt(length, i % 5), seed=i, max_tokens=count))
        for _ in range(rng.randint(0, 4)):
            bench.step()
    bench.run(3000)
    for i, (length, count) in sizes.items():
        assert bench.ids(f"r{i}") == expected(i, length, count)
        assert bench.ends(f"r{i}") == ["length"]
    assert bench.scheduler.snapshot().pages_used == 0
