"""Sampled ids follow the target's distribution, alone and together with their neighbours."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dflash_serve.engine import step
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.pick import RowSampling, pick, row_noise
from dflash_serve.parallel.shard import VocabShard
from tests.engine.law import (
    FALSE_ALARM,
    FREQUENT,
    RANGES,
    Law,
    Rounds,
    chi_square_p,
    exact_probabilities,
    wide_bins,
)
from tests.engine.rows import row_sampling
from tests.tiny import make_pair

ROUNDS = 20_000
CONTROL_ROUNDS = 6_000
ROWS = 4
LAWS = [
    Law(1.0),
    Law(0.4),
    Law(0.6, top_k=6),
    Law(0.8, top_p=0.85),
    Law(0.7, top_k=11, top_p=0.9, min_p=0.03),
]
WIDE = 151_936


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    """The real step over a vocabulary of 16 ids."""
    pair = make_pair(tmp_path_factory.mktemp("law"), vocab=16, seed=4)
    return Rounds(pair, ROWS, slots=1000)


@pytest.mark.parametrize(
    "law",
    [LAWS[0], LAWS[-1], *(pytest.param(law, marks=pytest.mark.slow) for law in LAWS[1:-1])],
    ids=str,
)
def test_single_ids_pairs_and_triples_follow_the_target(rounds: Rounds, law: Law) -> None:
    ids, accepted = rounds.sample(law, ROUNDS)
    assert {0, 1, 2, 3} <= set(accepted)
    p_values = rounds.p_values(ids, law)
    print(law, p_values)
    assert min(p_values.values()) > FALSE_ALARM


def test_control_draft_distribution_in_place_of_the_targets_is_found(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(drafted: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        picked[:, :-1] = drafted
        return torch.full_like(picked[:, 0], ROWS - 1), picked[:, -1].clone()

    monkeypatch.setattr("dflash_serve.kernels.accept.accept", trusting)
    ids, _ = rounds.sample(LAWS[1], CONTROL_ROUNDS)
    p_values = rounds.p_values(ids, LAWS[1])
    assert all(p < FALSE_ALARM for p in p_values.values())


def test_control_noise_used_twice_is_found(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step.row_noise

    def repeating(rows: RowSampling, shard: VocabShard) -> Tensor | None:
        rows = rows.per_row()
        return honest(dataclasses.replace(rows, position=(rows.position + 1) // 2), shard)

    monkeypatch.setattr(step, "row_noise", repeating)
    ids, _ = rounds.sample(LAWS[0], CONTROL_ROUNDS)
    p_values = rounds.p_values(ids, LAWS[0])
    assert p_values["first"] > FALSE_ALARM
    assert max(p_values["pair 1-2"], p_values["triple"]) < FALSE_ALARM


def test_control_rows_shifted_by_one_are_found(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = step.head_rows

    def shifted(
        target: object, hidden: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        rolled = hidden.view(-1, ROWS, hidden.shape[-1]).roll(1, dims=1).flatten(0, 1)
        return honest(target, rolled, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "head_rows", shifted)
    ids, _ = rounds.sample(LAWS[1], CONTROL_ROUNDS)
    p_values = rounds.p_values(ids, LAWS[1])
    assert max(p_values["first"], p_values["pair 1-2"], p_values["triple"]) < FALSE_ALARM


def wide_logits() -> Tensor:
    """A head and a long tail that together hold comparable mass."""
    logits = torch.randn(WIDE, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(0, WIDE, WIDE // 40)] += 9.0
    return logits


def wide_counts(law: Law, draws: int) -> tuple[Tensor, Tensor]:
    """Counts and exact probabilities by bin, see `wide_bins`."""
    logits, shard = wide_logits(), VocabShard(0, WIDE, WIDE)
    exact = exact_probabilities(logits, law.temperature, law.top_k, law.top_p, law.min_p)
    bins = wide_bins(exact)
    probabilities = torch.zeros(FREQUENT + RANGES, dtype=torch.float64).index_add_(0, bins, exact)
    counts = torch.zeros(FREQUENT + RANGES, dtype=torch.int64)
    for first in range(0, draws, 20):
        rows = row_sampling(
            20,
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            min_p=law.min_p,
            first_seed=first,
        )
        noise = row_noise(rows, shard)
        ids, _ = pick(logits.expand(20, -1), rows, shard, Single(), noise=noise)
        assert bool((exact[ids] > 0).all()), "an id outside the kept set was picked"
        counts.index_add_(0, bins[ids], torch.ones_like(ids))
    return counts, probabilities


@pytest.mark.parametrize(
    ("law", "draws"),
    [
        (Law(1.0), 400),
        (Law(1.0, top_p=0.7), 200),
        pytest.param(Law(1.0), ROUNDS, marks=pytest.mark.slow),
        pytest.param(Law(0.9, top_k=5000, top_p=0.95), ROUNDS // 10, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_single_ids_of_a_wide_vocabulary_follow_the_target(law: Law, draws: int) -> None:
    counts, probabilities = wide_counts(law, draws)
    assert chi_square_p(counts, probabilities) > FALSE_ALARM


def test_control_of_a_wide_vocabulary_is_found() -> None:
    counts, _ = wide_counts(Law(1.0), 400)
    _, other = wide_counts(Law(0.7), 0)
    assert chi_square_p(counts, other) < FALSE_ALARM
