"""Acceptance per position and width: what counts, what is borrowed, what is forgotten."""

from __future__ import annotations

import math

import pytest

from dflash_serve.scheduler.acceptance import Acceptance, expected_tokens

LADDER = (1, 2, 3, 4, 6, 8)


def test_tokens_per_step_are_one_and_the_running_products() -> None:
    assert expected_tokens([]) == 1
    assert expected_tokens([0.5, 0.5, 1.0]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)


def test_before_any_measurement_every_position_has_the_initial_acceptance() -> None:
    acceptance = Acceptance(LADDER, initial=0.6)
    assert acceptance.conditional(4) == [0.6] * 3
    assert acceptance.tokens_per_step(1) == 1
    assert acceptance.conditional(1) == []


def test_positions_behind_a_rejection_learn_nothing() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(500):
        acceptance.observe(4, [1])  # the first is accepted, the second is not, the third unseen
    first, second, third = acceptance.conditional(4)
    assert first == pytest.approx(1, abs=0.05)
    assert second == pytest.approx(0, abs=0.05)
    assert third == pytest.approx(second)  # nothing else to go by
    for _ in range(100):
        acceptance.observe(4, [3])
    before = acceptance.conditional(4)[2]
    acceptance.observe(4, [0, 0, 1, 1])
    assert acceptance.conditional(4)[2] == pytest.approx(before, abs=0.01)


def test_averages_are_conditional_on_having_been_reached() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(200):
        acceptance.observe(4, [0, 3])
    assert acceptance.conditional(4) == pytest.approx([0.5, 1.0, 1.0], abs=0.03)


def test_widths_keep_averages_of_their_own() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(200):
        acceptance.observe(3, [2])
        acceptance.observe(4, [0])
    assert acceptance.conditional(3)[0] > 0.9
    assert acceptance.conditional(4)[0] < 0.1


def test_an_unmeasured_width_borrows_from_the_nearest_measured_one() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(200):
        acceptance.observe(2, [0])
        acceptance.observe(6, [5])
    assert acceptance.conditional(3)[0] == pytest.approx(acceptance.conditional(2)[0], abs=0.1)
    assert acceptance.conditional(8)[0] == pytest.approx(acceptance.conditional(6)[0], abs=0.1)


def test_positions_past_a_borrowed_width_continue_its_last_one() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(300):
        acceptance.observe(3, [0, 2, 2, 2])
    first, *rest = acceptance.conditional(8)
    assert first == pytest.approx(0.75, abs=0.05)
    assert rest == pytest.approx([1.0] * 6, abs=0.05)


def test_old_evidence_gives_way_to_a_newer_width() -> None:
    acceptance = Acceptance(LADDER, half_life=100)
    for _ in range(300):
        acceptance.observe(8, [0])
    assert acceptance.conditional(8)[0] < 0.1
    for _ in range(1000):
        acceptance.observe(6, [5])
    assert acceptance.conditional(8)[0] > 0.8


def test_a_change_of_content_makes_every_width_forget() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(100):
        for rows in LADDER[1:]:
            acceptance.observe(rows, [rows - 1] * 4)
    for _ in range(4):
        acceptance.observe(8, [0] * 4)
    assert max(acceptance.conditional(rows)[0] for rows in LADDER[1:]) < 0.75


def test_a_few_misses_in_a_row_are_no_change_of_content() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(100):
        for rows in LADDER[1:]:
            acceptance.observe(rows, [rows - 1] * 4)
    acceptance.observe(8, [0] * 3)
    assert min(acceptance.conditional(rows)[0] for rows in LADDER[1:]) > 0.9


def test_evidence_does_not_fade_while_nothing_newer_is_measured() -> None:
    acceptance = Acceptance(LADDER)
    for _ in range(300):
        acceptance.observe(8, [0])
    before = [acceptance.conditional(rows) for rows in LADDER]
    for _ in range(5000):
        acceptance.observe(1, [0])
    assert [acceptance.conditional(rows) for rows in LADDER] == before


def test_a_large_batch_replaces_no_more_than_a_quarter_at_once() -> None:
    acceptance = Acceptance(LADDER, sigmas=math.inf)
    for _ in range(50):
        acceptance.observe(2, [1] * 256)
    acceptance.observe(2, [0] * 256)
    assert acceptance.conditional(2)[0] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(("rows", "accepted"), [(5, [1]), (4, [4]), (4, [-1, 0])])
def test_impossible_observations_are_refused(rows: int, accepted: list[int]) -> None:
    with pytest.raises(ValueError, match=r"the ladder is|allowed: 0 to 3"):
        Acceptance(LADDER).observe(rows, accepted)
