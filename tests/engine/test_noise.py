"""The noise is Philox4x32-10 by the book, the same on every rank, and a Gumbel variate."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats

from dflash_serve.kernels.noise import gumbel, philox

MASK = 0xFFFFFFFF


def reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 with plain integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(b >> 32) ^ x[1] ^ k[0], b & MASK, (a >> 32) ^ x[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return tuple(x)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((MASK,) * 4, (MASK, MASK), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_plain_integer_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    assert " ".join(f"{w:08x}" for w in reference(counter, key)) == words


def test_philox_gives_the_published_answer_for_zeros() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    words = philox(zero, zero, zero)[0, 0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_equals_plain_integers_for_any_seed_position_and_block() -> None:
    generator = random.Random(0)
    seeds = [0, 1, MASK, 2**32, 2**63 - 1] + [generator.getrandbits(63) for _ in range(40)]
    positions = [0, 1, MASK, 2**32, 2**40 + 7] + [generator.getrandbits(20) for _ in range(40)]
    blocks = [0, 1, MASK] + [generator.getrandbits(18) for _ in range(20)]
    words = philox(torch.tensor(seeds), torch.tensor(positions), torch.tensor(blocks))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, block in enumerate(blocks):
            counter = (block, position & MASK, position >> 32, 0)
            expected = reference(counter, (seed & MASK, seed >> 32))
            assert tuple(words[row, column].tolist()) == expected


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_noise_of_a_shard_is_its_part_of_the_whole(shards: int) -> None:
    seed, position = torch.tensor([3, 2**40 + 1]), torch.tensor([9, 10])
    whole = gumbel(seed, position, 0, 161)
    part = -(-161 // shards)
    pieces = [
        gumbel(seed, position, first, min(part, 161 - first)) for first in range(0, 161, part)
    ]
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    assert gumbel(seed, position, 80, 0).shape == (2, 0)


def test_noise_differs_between_seeds_positions_and_ids() -> None:
    seed, position = torch.tensor([1, 1, 2]), torch.tensor([5, 6, 5])
    noise = gumbel(seed, position, 0, 1000)
    assert noise.unique().numel() > 2990
    correlation = torch.corrcoef(noise) - torch.eye(3)
    assert float(correlation.abs().max()) < 0.15


def test_noise_follows_the_gumbel_law() -> None:
    noise = gumbel(torch.arange(50), torch.full((50,), 4), 0, 4000).flatten()
    assert bool(noise.isfinite().all())
    assert stats.kstest(noise.double().numpy(), stats.gumbel_r.cdf).pvalue > 1e-9


def test_noise_is_exact_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([0, 1, 2**31 - 1, 2**31, MASK - 1, MASK])
    monkeypatch.setattr(
        "dflash_serve.kernels.noise.philox", lambda *_: torch.cat([words, words[:2]]).view(1, 2, 4)
    )
    got = gumbel(torch.tensor([0]), torch.tensor([0]), 0, 6)[0].tolist()
    for word, value in zip(words.tolist(), got, strict=True):
        exact = -math.log(-math.log1p(-(MASK - word + 0.5) * 2.0**-32))
        assert value == pytest.approx(exact, rel=1e-6, abs=1e-6)
