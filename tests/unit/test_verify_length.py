"""The choice of g against a simulated server whose acceptance is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from dflash_serve.bench.roofline import (
    H200,
    TARGETS,
    Workload,
    draft_like,
    geometric_rate,
    step_floor,
)
from dflash_serve.scheduler.acceptance import Acceptance
from dflash_serve.scheduler.verify_length import (
    CostTable,
    Decision,
    VerifyLengthPolicy,
    verify_ladder,
)
from tests.bench.published import BLOCK, CONTEXT, Row, table

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def costs_of(name: str, tp: int = 1, block: int = BLOCK) -> CostTable:
    """Steps of a very good engine on H200."""
    target, machine = TARGETS[name], H200.estimate()
    draft = draft_like(target)

    def seconds(batch: int, rows: int) -> float:
        return step_floor(target, draft, Workload(batch, CONTEXT, rows, tp), machine).seconds

    return CostTable.from_function(BUCKETS, verify_ladder(block), seconds)


def linear_costs(slope: float, block: int = BLOCK) -> CostTable:
    """A step of g rows costs 1 + slope · g ms at any batch."""
    return CostTable.from_function(
        BUCKETS, verify_ladder(block), lambda _, rows: 1e-3 * (1 + slope * rows)
    )


class Server:
    """Runs what a policy decides, with an acceptance per position that may change."""

    def __init__(self, policy: VerifyLengthPolicy, seed: int = 1) -> None:
        self.policy = policy
        self.tokens = 0
        self.seconds = 0.0
        self._random = random.Random(seed)

    def run(self, steps: int, batch: int, alpha: float | Callable[[int], float]) -> list[Decision]:
        """Decide, run and observe; `alpha` may depend on g."""
        decisions = []
        for _ in range(steps):
            decision = self.policy.decide(batch)
            rows = decision.rows
            rate = alpha if isinstance(alpha, float) else alpha(rows)
            accepted = [self._accepted(rows, rate) for _ in range(batch)]
            self.policy.observe(rows, accepted)
            self.tokens += sum(accepted) + batch
            self.seconds += self.policy.costs.cost(batch, rows)
            decisions.append(decision)
        return decisions

    def _accepted(self, rows: int, rate: float) -> int:
        return min(int(math.log(1 - self._random.random()) / math.log(rate)), rows - 1)


def settled(decisions: list[Decision], last: int = 100) -> int:
    """The g that was held most over the last steps."""
    rows = [d.rows for d in decisions[-last:] if d.reason != "explore"]
    return max(set(rows), key=rows.count)


# -- the ladder and the table -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "ladder"),
    [
        (16, (1, 2, 3, 4, 6, 8, 12, 16)),
        (20, (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        (10, (1, 2, 3, 4, 6, 8, 10)),
        (8, (1, 2, 3, 4, 6, 8)),
        (2, (1, 2)),
        (1, (1,)),
    ],
)
def test_the_ladder_ends_with_the_block(block: int, ladder: tuple[int, ...]) -> None:
    assert verify_ladder(block) == ladder


def test_a_block_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        verify_ladder(0)


def test_noisy_timings_become_monotone_in_batch_and_rows() -> None:
    noise = random.Random(3)
    seconds = {
        (batch, rows): 1e-3 * (5 + batch * rows / 100) * noise.uniform(0.8, 1.2)
        for batch in BUCKETS
        for rows in verify_ladder(BLOCK)
    }
    costs = CostTable(seconds)
    for batch in BUCKETS:
        across = [costs.cost(batch, rows) for rows in costs.ladder]
        assert across == sorted(across)
    for rows in costs.ladder:
        down = [costs.cost(batch, rows) for batch in BUCKETS]
        assert down == sorted(down)
    assert all(costs.cost(batch, rows) >= seconds[batch, rows] for batch, rows in seconds)


def test_a_table_that_is_monotone_already_stays_as_it_is() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 2): 2.0, (4, 1): 3.0, (4, 2): 4.0})
    assert [costs.cost(b, g) for b in (1, 4) for g in (1, 2)] == [1, 2, 3, 4]


def test_a_batch_costs_what_the_smallest_bucket_holding_it_costs() -> None:
    costs = CostTable({(1, 1): 1.0, (4, 1): 3.0, (16, 1): 9.0})
    assert [costs.cost(batch, 1) for batch in (1, 2, 4, 5, 16)] == [1, 3, 3, 9, 9]


def test_longer_contexts_cost_their_reading_per_request() -> None:
    costs = CostTable({(8, 1): 1.0}, context=1000, context_seconds=0.001)
    assert costs.cost(8, 1, 1500) == pytest.approx(1 + 8 * 500 * 0.001)
    assert costs.cost(8, 1, 200) == 1.0


@pytest.mark.parametrize("batch", [0, 257])
def test_a_batch_outside_the_table_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match="covers 1 to 256"):
        linear_costs(0.1).cost(batch, 1)


@pytest.mark.parametrize("seconds", [{}, {(1, 1): 1.0, (2, 2): 1.0}, {(1, 1): 0.0}])
def test_a_table_with_holes_or_without_times_is_refused(
    seconds: dict[tuple[int, int], float],
) -> None:
    with pytest.raises(ValueError, match="cost table"):
        CostTable(seconds)


# -- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", table("lengths"), ids=lambda r: "-".join(list(r.values())[:5]))
def test_the_choice_settles_within_a_rung_of_the_published_best(row: Row) -> None:
    costs = costs_of(row["target"], int(row["tp"]))
    batch, alpha = int(row["batch"]), geometric_rate(float(row["tau"]), BLOCK)
    decisions = Server(VerifyLengthPolicy(costs)).run(600 if batch < 32 else 150, batch, alpha)
    ladder = costs.ladder
    below = max(rows for rows in ladder if rows <= int(row["best"]))
    above = min(rows for rows in ladder if rows >= int(row["best"]))
    allowed = ladder[ladder.index(below) - 1 : ladder.index(above) + 2]
    assert settled(decisions) in allowed


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_poor_acceptance_costs_no_more_than_the_exploration(batch: int) -> None:
    costs = costs_of("qwen3-8b")
    server = Server(VerifyLengthPolicy(costs, explore_cost=0.01))
    alpha = geometric_rate(1.2, BLOCK)
    server.run(200, batch, alpha)  # finding out
    server.tokens, server.seconds = 0, 0.0
    server.run(3000, batch, alpha)
    off = batch / costs.cost(batch, 1)
    assert server.tokens / server.seconds >= 0.99 * off * 0.99  # the second for chance


def test_poor_acceptance_at_a_large_batch_turns_speculation_off() -> None:
    decisions = Server(VerifyLengthPolicy(costs_of("qwen3-8b"))).run(
        200, 128, geometric_rate(1.2, BLOCK)
    )
    assert settled(decisions) == 1


@pytest.mark.parametrize("batch", [1, 32, 128])
def test_the_choice_follows_a_sudden_change_and_comes_back(batch: int) -> None:
    good, poor = geometric_rate(6.5, BLOCK), 0.03
    server = Server(VerifyLengthPolicy(costs_of("qwen3-8b")))
    first = settled(server.run(400, batch, good))
    assert settled(server.run(800, batch, poor)) == 1
    ladder = server.policy.costs.ladder
    again = settled(server.run(3000, batch, good))
    assert abs(ladder.index(again) - ladder.index(first)) <= 1


def test_speculation_is_found_to_pay_again_after_it_was_off() -> None:
    server = Server(VerifyLengthPolicy(costs_of("qwen3-8b")))
    assert settled(server.run(2000, 128, 0.05)) == 1
    assert settled(server.run(2000, 128, 0.86)) in (2, 3, 4)


def test_a_width_that_suits_the_draft_badly_is_left_after_it_was_measured() -> None:
    def alpha(rows: int) -> float:
        return 0.4 if rows > 8 else 0.85

    server = Server(VerifyLengthPolicy(linear_costs(0.02)))
    decisions = server.run(3000, 16, alpha)
    assert settled(decisions) == 8
    assert sum(d.rows > 8 for d in decisions) < 300


def test_without_speculation_on_the_ladder_every_step_has_one_row() -> None:
    decisions = Server(VerifyLengthPolicy(linear_costs(0.1, block=1))).run(600, 4, 0.5)
    assert {d.rows for d in decisions} == {1}


def test_longer_contexts_favour_more_rows() -> None:
    seconds = {(8, rows): 1e-3 * rows for rows in verify_ladder(BLOCK)}
    costs = CostTable(seconds, context_seconds=1e-6)
    acceptance = Acceptance(costs.ladder, initial=0.7)
    short = VerifyLengthPolicy(costs, acceptance).decide(8, 0)
    long = VerifyLengthPolicy(costs, acceptance).decide(8, 32768)
    assert short.rows == 1
    assert long.rows > 8


def test_an_acceptance_over_another_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="the costs over"):
        VerifyLengthPolicy(linear_costs(0.1), Acceptance((1, 2)))


# -- hysteresis ---------------------------------------------------------------------------------


def test_a_choice_is_held_and_a_change_must_win_by_the_margin() -> None:
    policy = VerifyLengthPolicy(costs_of("qwen3-8b"), hold=16, margin=0.03)
    server = Server(policy)
    last, since = 0, 0
    for index in range(3000):
        before = policy.stats().rows
        decision = server.run(1, 32, 0.9 if index // 500 % 2 else 0.3)[0]
        if decision.reason == "switch":
            rates = policy.stats().tokens_per_second
            assert index - since >= 16
            assert rates[decision.rows] > 1.03 * rates[before]
            since = index
        last = decision.rows
    assert last > 1
    assert policy.stats().switches >= 5


def test_a_gain_below_the_margin_changes_nothing() -> None:
    costs = CostTable({(1, 1): 1.0, (1, 2): 1.5})
    policy = VerifyLengthPolicy(costs, Acceptance(costs.ladder, initial=0.45), explore_every=10**6)
    assert policy.decide(1).rows == 1
    policy.acceptance = Acceptance(costs.ladder, initial=0.54)  # 1.54 / 1.5: 2.7 % more
    assert {policy.decide(1).rows for _ in range(100)} == {1}
    policy.acceptance = Acceptance(costs.ladder, initial=0.56)  # 1.56 / 1.5: 4 % more
    decisions = [policy.decide(1) for _ in range(16)]
    assert Decision(2, pytest.approx(1.04), "switch") in decisions


def test_a_batch_that_moves_by_more_than_a_bucket_ends_the_hold() -> None:
    policy = VerifyLengthPolicy(costs_of("qwen3-8b"), Acceptance(verify_ladder(16), initial=0.85))
    assert policy.decide(1).rows == 16
    assert policy.decide(2).reason == "hold"
    decision = policy.decide(128)
    assert decision.reason == "switch"
    assert decision.rows < 6
    assert policy.decide(64).reason == "hold"


# -- exploration --------------------------------------------------------------------------------


def test_exploration_tries_neighbours_only_and_no_more_often_than_asked() -> None:
    policy = VerifyLengthPolicy(costs_of("qwen3-8b"), explore_every=100, explore_steps=4)
    server = Server(policy)
    ladder = policy.costs.ladder
    explored = 0
    for _ in range(5000):
        decision = server.run(1, 4, 0.8)[0]
        if decision.reason == "explore":
            explored += 1
            at = ladder.index(policy.stats().rows)
            assert abs(ladder.index(decision.rows) - at) == 1
    assert 0 < explored <= 4 * policy.stats().explorations <= 4 * 5000 / 100


@pytest.mark.parametrize("share", [0.002, 0.02])
def test_explorations_that_cost_much_come_seldom(share: float) -> None:
    costs = CostTable({(1, 1): 1.0, (1, 2): 1.5})
    policy = VerifyLengthPolicy(costs, explore_cost=share, hold=4)
    decisions = Server(policy).run(20000, 1, 0.01)
    explored = sum(d.reason == "explore" for d in decisions[2000:]) / 18000
    loss = 1 - 1.01 / 1.5
    assert share / 2 < explored * loss < 1.5 * share


def test_a_width_that_could_not_win_even_if_all_were_accepted_is_not_explored() -> None:
    policy = VerifyLengthPolicy(linear_costs(0.01), explore_every=50)
    decisions = Server(policy).run(2000, 8, 0.97)
    assert settled(decisions) == 16
    assert min(d.rows for d in decisions) >= 12


def test_a_large_batch_is_explored_for_fewer_steps() -> None:
    counts = {}
    for batch in (1, 16, 256):
        policy = VerifyLengthPolicy(linear_costs(0.3), explore_every=100)
        decisions = Server(policy).run(1000, batch, 0.6)
        counts[batch] = sum(d.reason == "explore" for d in decisions) / policy.stats().explorations
    assert counts == {1: 8, 16: 2, 256: 1}


# -- the record ---------------------------------------------------------------------------------


def test_the_same_steps_bring_the_same_decisions() -> None:
    runs = [Server(VerifyLengthPolicy(costs_of("qwen3-4b"))).run(1500, 16, 0.7) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_record_holds_the_inputs_of_the_last_decision() -> None:
    costs = costs_of("qwen3-8b")
    policy = VerifyLengthPolicy(costs)
    decision = policy.decide(20, 700.0)
    stats = policy.stats()
    assert (stats.rows, stats.batch, stats.mean_context) == (decision.rows, 20, 700.0)
    assert set(stats.tokens_per_step) == set(stats.tokens_per_second) == set(costs.ladder)
    assert stats.tokens_per_step[1] == 1
    assert stats.tokens_per_second[decision.rows] == decision.predicted
    assert max(stats.tokens_per_second.values()) == decision.predicted
    assert (stats.switches, stats.explorations) == (0, 0)
