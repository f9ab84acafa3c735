"""The pick is one well-defined choice per row, however the vocabulary is spread."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from torch import Tensor

from dflash_serve.kernels.accept import accept
from dflash_serve.kernels.noise import gumbel
from dflash_serve.kernels.pick import EMPTY, FAULT, best, order_keys, unpack_id
from dflash_serve.kernels.truncate import largest_below
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.pick import RowSampling, pick, row_noise
from dflash_serve.parallel.shard import VocabShard
from tests.engine.rows import ThreadGroup, kept_ids, on_ranks, row_sampling

TRUNCATIONS: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.37},
    {"top_p": 0.0001},
    {"min_p": 0.21},
    {"top_k": 9, "top_p": 0.83, "min_p": 0.03},
    {"top_p": 0.97, "min_p": 0.013},
    {"top_k": 500},
]


def sharded_pick(logits: Tensor, rows: RowSampling, valid: int, size: int) -> tuple[Tensor, Tensor]:
    """The pick on `size` simulated ranks, which must agree."""

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        shard = VocabShard.of(logits.shape[1], valid, group.rank, size)
        mine = logits[:, shard.first : shard.first + shard.rows]
        return pick(mine, rows, shard, group, noise=row_noise(rows, shard))

    results = on_ranks(size, work)
    for ids, faults in results:
        assert torch.equal(ids, results[0][0])
        assert torch.equal(faults, results[0][1])
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncated_pick_equals_a_plain_sort(
    truncation: dict[str, float], tied: bool, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    count, vocab, valid, temperature = 60, 41, 37, 1.3
    logits = 2.0 * torch.randn((count, vocab), generator=generator)
    if tied:
        logits = (logits * 1.5).round() / 1.5
    rows = row_sampling(count, temperature=temperature, **truncation)  # type: ignore[arg-type]
    ids, faults = sharded_pick(logits, rows, valid, size)
    assert not bool(faults.any())
    noise = rows.temperature[:, None] * gumbel(rows.seed, rows.position, 0, valid)
    limits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | truncation
    for row in range(count):
        kept = kept_ids(logits[row, :valid], temperature, **limits)  # type: ignore[arg-type]
        score = (logits[row, :valid] + noise[row]).tolist()
        assert int(ids[row]) == max(sorted(kept), key=lambda i: score[i])


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_equal_scores_go_to_the_lowest_id(size: int) -> None:
    logits = torch.zeros((3, 21))
    logits[1, [9, 13, 20]] = 5.0
    logits[2] = -0.0
    logits[2, 17] = 0.0
    ids, _ = sharded_pick(logits, row_sampling(3, temperature=0.0), 21, size)
    assert ids.tolist() == [0, 9, 0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.5}, {"top_k": 3}])
def test_nan_is_a_fault_of_its_row_only(size: int, truncation: dict[str, float]) -> None:
    logits = torch.randn((4, 24), generator=torch.Generator().manual_seed(1))
    rows = row_sampling(4, **truncation)  # type: ignore[arg-type]
    expected, _ = sharded_pick(logits, rows, 24, size)
    logits[2, 23] = math.nan
    ids, faults = sharded_pick(logits, rows, 24, size)
    assert faults.tolist() == [False, False, True, False]
    assert ids[2] == 0
    assert [ids[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("truncation", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_an_infinite_logit_under_truncation_is_a_fault_of_its_row_only(
    size: int, truncation: dict[str, float]
) -> None:
    logits = torch.randn((3, 24), generator=torch.Generator().manual_seed(1))
    rows = row_sampling(3, **truncation)  # type: ignore[arg-type]
    expected, _ = sharded_pick(logits, rows, 24, size)
    logits[1, 5] = math.inf
    ids, faults = sharded_pick(logits, rows, 24, size)
    assert faults.tolist() == [False, True, False]
    assert ids.tolist() == [expected[0], 0, expected[2]]


def test_truncating_batch_mates_do_not_fault_an_infinite_logit() -> None:
    logits = torch.randn((2, 24), generator=torch.Generator().manual_seed(1))
    logits[:, 5] = math.inf
    rows = dataclasses.replace(row_sampling(2, top_k=3), top_k=torch.tensor([0, 3]))
    ids, faults = sharded_pick(logits, rows, 24, 2)
    assert faults.tolist() == [False, True]
    assert ids.tolist() == [5, 0]


def test_nan_in_padding_is_no_fault() -> None:
    logits = torch.zeros((1, 24))
    logits[0, 20:] = math.nan
    _, faults = sharded_pick(logits, row_sampling(1), 20, 4)
    assert not bool(faults.any())


def test_rows_of_every_kind_mix_in_one_batch() -> None:
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(2))
    parts = [
        row_sampling(1, temperature=0.0),
        row_sampling(1, temperature=1.0, first_seed=1),
        row_sampling(1, top_k=3, first_seed=2),
        row_sampling(1, top_p=0.3, first_seed=3),
        row_sampling(1, temperature=0.0, top_k=1, first_seed=4),
    ]
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    rows = RowSampling(
        **{name: torch.cat([getattr(p, name) for p in parts]) for name in names},
        noisy=True,
        truncates=True,
    )
    together, _ = sharded_pick(logits, rows, 40, 4)
    alone = [sharded_pick(logits[i : i + 1], p, 40, 1)[0] for i, p in enumerate(parts)]
    assert together.tolist() == torch.cat(alone).tolist()


class CountingGroup(Single):
    """Counts its collectives."""

    calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[None]

    def maximum(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_the_number_of_collectives_depends_on_no_value() -> None:
    generator = torch.Generator().manual_seed(5)
    shard, calls = VocabShard(0, 50, 50), set()
    for spread in (0.0, 0.1, 30.0, 1e38, math.nan):
        logits = spread * torch.randn((8, 50), generator=generator)
        for truncation in TRUNCATIONS:
            group, rows = CountingGroup(), row_sampling(8, **truncation)  # type: ignore[arg-type]
            pick(logits, rows, shard, group, noise=row_noise(rows, shard))
            calls.add(group.calls)
    assert len(calls) == 1


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1 - 2.0**-53])
def test_top_p_among_equal_logits_keeps_the_lowest_ids(top_p: float, size: int) -> None:
    count, vocab = 400, 40
    rows = row_sampling(count, temperature=100.0, top_p=top_p)
    ids, _ = sharded_pick(torch.full((count, vocab), -3.0), rows, vocab, size)
    kept = min(vocab, math.ceil(top_p * vocab))
    assert sorted(ids.unique().tolist()) == list(range(kept))


def test_largest_below_is_the_last_integer_whose_float_is_below() -> None:
    generator = random.Random(2)
    bounds = [1.0, 0.25, 1.5, 2.0**53, 2.0**53 + 2, 2.0**57, 2.0**57 + 32]
    bounds += [generator.random() * 2.0 ** generator.randrange(61) + 1e-3 for _ in range(3000)]
    bounds += [float(generator.getrandbits(58) + 1) for _ in range(3000)]
    found = largest_below(torch.tensor(bounds, dtype=torch.float64)).tolist()
    for last, bound in zip(found, bounds, strict=True):
        assert float(last) < bound <= float(last + 1)


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 0.0001}, {"min_p": 1.0}])
def test_truncation_to_one_id_is_greedy(truncation: dict[str, float]) -> None:
    logits = torch.randn((200, 64), generator=torch.Generator().manual_seed(3))
    rows = row_sampling(200, temperature=1.5, **truncation)  # type: ignore[arg-type]
    ids, _ = sharded_pick(logits, rows, 64, 2)
    assert torch.equal(ids, logits.argmax(dim=1))


def test_scale_applies_to_the_logits_and_not_to_the_noise() -> None:
    logits = torch.randn((50, 30), generator=torch.Generator().manual_seed(4))
    rows, shard = row_sampling(50, temperature=0.7), VocabShard(0, 30, 30)
    noise = row_noise(rows, shard)
    assert noise is not None
    ids, _ = pick(logits, rows, shard, Single(), noise=noise, scale=2.5)
    assert torch.equal(ids, (2.5 * logits + noise).argmax(dim=1))


def test_keys_order_by_score_then_by_lower_id() -> None:
    scores = torch.tensor([[-math.inf, -2.0, -0.0, 0.0, 1e-30, 3.0, 3.0, math.inf]])
    keys = order_keys(scores, 100)[0].tolist()
    assert sorted(range(8), key=lambda i: keys[i]) == [0, 1, 3, 2, 4, 6, 5, 7]
    assert unpack_id(torch.tensor(keys)).tolist() == list(range(100, 108))
    assert all(EMPTY < key < FAULT for key in keys)


def test_an_empty_shard_or_mask_loses_against_everything() -> None:
    assert best(torch.empty((2, 0)), 50).tolist() == [EMPTY, EMPTY]
    none_allowed = torch.zeros((1, 3), dtype=torch.bool)
    assert best(torch.ones((1, 3)), 0, none_allowed).tolist() == [EMPTY]
    assert int(best(torch.full((1, 1), -math.inf), 7)[0]) > EMPTY


@pytest.mark.parametrize(
    ("drafted", "picked", "length", "bonus"),
    [
        ([5, 6, 8], [5, 6, 9, 1], 2, 9),
        ([5, 6, 8], [4, 6, 8, 1], 0, 4),
        ([5, 6, 8], [5, 6, 8, 1], 3, 1),
        ([5, 6, 8], [5, 7, 8, 1], 1, 7),
        ([], [3], 0, 3),
    ],
)
def test_accepted_run_ends_at_the_first_difference(
    drafted: list[int], picked: list[int], length: int, bonus: int
) -> None:
    drafts = torch.tensor([drafted], dtype=torch.int64)
    accepted, anchor = accept(drafts, torch.tensor([picked]))
    assert (int(accepted[0]), int(anchor[0])) == (length, bonus)
