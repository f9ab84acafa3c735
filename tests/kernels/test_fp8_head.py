"""The head product of 8-bit numbers that picks, against the same product with a pick after it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.engine import drafters
from dflash_serve.errors import ConfigError
from dflash_serve.kernels.fp8 import Fp8Weight, quantize_weight
from dflash_serve.kernels.gpu import fp8, fp8_head, fp8_rows
from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile
from dflash_serve.kernels.pick import EMPTY, best_keys, head_keys
from dflash_serve.kernels.rows import RowSampling
from dflash_serve.models.layers import Head
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.shard import VocabShard
from tests.kernels.linear_cases import CUDA, DEVICE, TYPES, rand, through_triton

pytestmark = [
    pytest.mark.skipif(
        CUDA and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit products"
    ),
    *([pytest.mark.gpu] if CUDA else []),
]

FEW = Fp8Tile(16, 64, 64, 4, 2)
TILES = [
    FEW,
    dataclasses.replace(FEW, swapped=True),
    Fp8Tile(64, 128, 64, 4, 2),
    Fp8Tile(64, 256, 64, 8, 2, walks=True, group=2),
]


def head(columns: int, depth: int) -> Fp8Weight:
    return quantize_weight(rand(columns, depth, seed=2) / depth**0.5)


def sampling(requests: int, count: int, temperature: float) -> RowSampling:
    """Parameters of `count` rows of each request; every third is greedy."""
    heat = torch.full((requests,), temperature, device=DEVICE)
    heat[::3] = 0.0
    whole = torch.arange(requests, device=DEVICE)
    zeros, ones = torch.zeros_like(heat), torch.ones_like(heat)
    return RowSampling(
        temperature=heat,
        top_k=torch.zeros_like(whole),
        top_p=ones,
        min_p=zeros,
        seed=whole + 7,
        position=whole * 5 + 3,
        count=count,
        noisy=True,
        truncates=False,
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("first_id", "valid"), [(0, 300), (6, 291)])
def test_keys_are_those_of_the_product_and_the_pick(
    tile: Fp8Tile, first_id: int, valid: int, dtype: torch.dtype
) -> None:
    x, weight = rand(10, 96, seed=1, dtype=dtype), head(300, 96)
    rows = sampling(5, 2, 0.8)
    with through_triton():
        data, scale = fp8_rows.quantize_rows(x)
        logits = fp8.product(data, scale, weight, tile, dtype)
        for some in (None, rows):
            for factor in (1.0, torch.full((1,), 0.7, device=DEVICE)):
                keys = fp8_head.head_keys(x, weight, some, first_id, valid, factor, tile)
                expected = best_keys(logits, some, first_id, valid, scale=factor)
                assert torch.equal(keys, expected)


@pytest.mark.parametrize("rows", [1, 15, 70, 140])
def test_the_dispatch_gives_the_keys_of_the_plain_functions(rows: int) -> None:
    x, weight = rand(rows, 96, seed=1), head(200, 96)
    plain = head_keys(x, weight, None, 0, 190) if not CUDA else None
    with through_triton():
        keys = head_keys(x, weight, None, 0, 190)
        logits = fp8.linear(x, weight)
    assert torch.equal(keys, best_keys(logits, None, 0, 190))
    if plain is not None:
        assert torch.equal(keys & 0xFFFFFFFF, plain & 0xFFFFFFFF)  # the ids


def test_a_shard_without_valid_ids_loses() -> None:
    weight = head(64, 64)
    with through_triton():
        assert (head_keys(rand(3, 64), weight, None, 40, 0) == EMPTY).all()
        assert head_keys(rand(0, 64), weight, None, 0, 8).shape == (0,)


def test_wrong_sizes_are_refused() -> None:
    with through_triton():
        with pytest.raises(ConfigError, match=r"65 ids .* 64 rows"):
            fp8_head.head_keys(rand(3, 64), head(64, 64), None, 0, 65, 1.0)
        with pytest.raises(ConfigError, match="K = 40"):
            fp8_head.head_keys(rand(3, 40), head(64, 40), None, 0, 64, 1.0)


def test_a_quantised_head_is_fused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    honest = drafters.pick_head

    def watched(hidden: Tensor, weight: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        seen.append(weight)
        return honest(hidden, weight, *args, **named)

    monkeypatch.setattr(drafters, "pick_head", watched)
    weight, shard = head(80, 64), VocabShard(0, 80, 78)
    target: Any = SimpleNamespace(head=Head(torch.zeros(80, 64, device=DEVICE), shard))
    hidden = rand(4, 64)
    rows = sampling(2, 2, 0.9)
    with through_triton():
        ids, _ = drafters.head_rows(
            target,
            hidden,
            rows,
            Single(),
            noise=None,
            limit=2,
            truncate=False,
            head=Head(weight, shard),
        )
        logits = fp8.linear(hidden, weight)
        keys = best_keys(logits, rows, 0, 78)
    assert seen == [weight]
    assert ids.tolist() == (0xFFFFFFFF - (keys & 0xFFFFFFFF)).tolist()
