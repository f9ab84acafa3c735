"""The fit of the draft's logit scale against a simulated agreement curve."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from dflash_serve.scheduler.draft_scale import DraftScale

Curve = Callable[[float], float]


def peak(at: float, height: float = 0.8, slope: float = 0.06) -> Curve:
    """Acceptance that falls on both sides of a scale, by `slope` per doubling."""
    return lambda scale: height - slope * abs(math.log2(scale / at))


def run(
    fit: DraftScale, curve: Curve, steps: int, *, batch: int = 32, rows: int = 8, seed: int = 1
) -> list[float]:
    """Let a fit choose and see what came of it; returns the scales that were run."""
    source = random.Random(seed)
    used = []
    for _ in range(steps):
        scale = fit.choose()
        rate = math.log(curve(scale))
        accepted = [min(int(math.log(1 - source.random()) / rate), rows - 1) for _ in range(batch)]
        fit.observe(scale, rows, accepted)
        used.append(scale)
    return used


@pytest.mark.parametrize("best", [0.5, 0.7071, 1.0, 2.0, 4.0])
def test_the_fit_ends_within_a_step_of_the_best_scale(best: float) -> None:
    fit = DraftScale(rest=200)
    run(fit, peak(best), 4000)
    assert abs(math.log2(fit.scale / best)) <= 0.51


def test_a_flat_curve_moves_nothing() -> None:
    fit = DraftScale(rest=100)
    run(fit, lambda _: 0.7, 3000)
    assert (fit.scale, fit.stats().moves) == (1.0, 0)


def test_a_gain_below_the_margin_moves_nothing() -> None:
    fit = DraftScale(rest=100, margin=0.05, most_trials=4096)
    run(fit, peak(4.0, slope=0.06), 3000)  # 0.03 per step of the grid
    assert fit.stats().moves == 0


def test_a_best_scale_that_changes_is_found_again() -> None:
    fit = DraftScale(rest=200)
    run(fit, peak(2.0), 4000)
    assert fit.scale == pytest.approx(2.0, rel=0.5)
    run(fit, peak(0.7071), 6000)
    assert fit.scale == pytest.approx(0.7071, rel=0.5)


def test_after_both_neighbours_lost_only_the_scale_in_use_runs() -> None:
    fit = DraftScale(rest=500)
    run(fit, peak(1.0, slope=0.2), 200)
    assert fit.stats().comparisons == 2
    assert fit.stats().compared is None
    assert set(run(fit, peak(1.0, slope=0.2), 200)) == {1.0}


def test_scales_stay_on_the_grid_and_next_to_the_one_in_use() -> None:
    grid = (0.5, 1.0, 2.0)
    fit = DraftScale(grid, start=2.0, rest=50)
    for _ in range(3000):
        before = grid.index(fit.scale)
        (used,) = run(fit, peak(2.0, slope=0.1), 1)
        assert abs(grid.index(used) - before) <= 1


def test_content_that_drifts_favours_neither_scale() -> None:
    fit, seeds = DraftScale(rest=100), random.Random(1)
    for block in range(300):
        rate = 0.4 + 0.4 * (block % 2)
        run(fit, peak(1.0, rate, slope=0.0), 10, seed=seeds.getrandbits(32))
    assert fit.stats().comparisons >= 3
    assert fit.stats().moves == 0


def test_steps_that_drafted_nothing_teach_nothing() -> None:
    fit = DraftScale()
    for _ in range(2000):
        fit.observe(fit.choose(), 1, [0] * 64)
    assert fit.stats().comparisons == 0


def test_positions_behind_a_rejection_are_no_trials() -> None:
    fit = DraftScale(least_trials=4, most_trials=4)
    used, other = fit.choose(), fit.choose()
    fit.observe(used, 8, [0, 0])  # two trials
    fit.observe(other, 8, [1, 1])  # four
    assert fit.stats().comparisons == 0
    fit.observe(used, 8, [7])  # the whole block was accepted: seven
    fit.observe(other, 8, [1])
    assert fit.stats().comparisons == 1


def test_steps_that_come_twice_from_one_scale_do_not_tip_the_comparison() -> None:
    fit = DraftScale(least_trials=1, most_trials=1)
    used, other = fit.choose(), fit.choose()
    fit.observe(used, 8, [0] * 1000)
    fit.observe(used, 8, [7] * 1000)
    fit.observe(other, 8, [1] * 1000)
    assert fit.scale == other


def test_an_outcome_of_a_scale_not_compared_now_is_left_out() -> None:
    fit = DraftScale(least_trials=1, most_trials=1)
    fit.observe(4.0, 8, [7] * 1000)
    assert fit.stats().comparisons == 0


def test_the_same_steps_bring_the_same_scales() -> None:
    runs = [run(DraftScale(rest=50), peak(2.0), 2000) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("grid", [(0.5, 2.0), (1.0, 0.5), (-1.0, 1.0), (0.0, 1.0)])
def test_a_grid_that_cannot_be_climbed_is_refused(grid: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="grid"):
        DraftScale(grid)
