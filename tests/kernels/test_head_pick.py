"""The head product that picks has the keys of a product with a pick after it.

Without a GPU the kernels run in Triton's interpreter, in float32. Hidden states and weights are
halves of small whole numbers, whose sums are exact: logits are the same however they are summed,
and many of them are equal.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.engine import drafters
from dflash_serve.errors import ConfigError
from dflash_serve.kernels.gpu import head_pick, head_tiles
from dflash_serve.kernels.gpu import linear as gpu_linear
from dflash_serve.kernels.gpu.head_tiles import HEAD_TILES, HeadTile, fuses, head_tile
from dflash_serve.kernels.linear import linear
from dflash_serve.kernels.pick import (
    EMPTY,
    FAULT,
    NOISY_ROWS,
    best_keys,
    head_keys,
    unpack,
    unpack_id,
)
from dflash_serve.models.layers import Head
from dflash_serve.parallel.group import Group, Single
from dflash_serve.parallel.pick import RowSampling, pick, pick_head, row_noise
from dflash_serve.parallel.shard import VocabShard
from tests.engine.rows import row_sampling
from tests.kernels.ranks import in_turns
from tests.kernels.test_pick import DEVICE, DTYPES, mixed_rows, moved, through_triton

TILES = [
    HeadTile(16, 32, 32, 4, 2, piece=8),
    HeadTile(16, 32, 32, 4, 2, copied=True, piece=16),
    HeadTile(32, 16, 32, 4, 2, copied=True, resident=1, group=2),
    HeadTile(16, 64, 32, 4, 2, copied=True, resident=1, group=1, piece=8),
]
# (rows, V, K, first id, valid): vocabularies that are no multiple of a tile or of 4, shards that
# start inside a block of 4 ids, added vocabulary, depths that are no whole steps.
SHAPES = [
    (1, 7, 32, 0, 7),
    (2, 130, 72, 5, 121),
    (16, 64, 64, 3, 61),
    (17, 101, 40, 0, 99),
    (129, 18, 32, 4098, 18),
    (257, 33, 32, 7, 1),
]


def exact(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-3, 4, shape, generator=generator) / 2).to(dtype)


def rows_of(count: int) -> RowSampling:
    """Requests of two rows, greedy and noisy ones, in a batch of which `count` rows are meant."""
    return mixed_rows(-(-(count + 1) // 12), 2).rows(1, count + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [None, *TILES], ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth", "first", "valid"), SHAPES, ids=str)
def test_greedy_keys_equal_the_torch_keys(
    rows: int, columns: int, depth: int, first: int, valid: int, tile: HeadTile, dtype: torch.dtype
) -> None:
    x, weight = exact(rows, depth, dtype=dtype), exact(columns, depth, dtype=dtype, seed=1)
    greedy = row_sampling(rows, temperature=0.0)
    expected = best_keys(x.float() @ weight.float().T, None, first, valid)
    with through_triton():
        for sampling in (None, moved(greedy)):
            x, weight = x.to(DEVICE), weight.to(DEVICE)
            keys = head_pick.head_keys(x, weight, sampling, first, valid, 1.0, tile)
            assert torch.equal(keys.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "first", "valid", "tile"),
    # All tiles at the small shapes: the interpreter takes its time to make noise.
    [(*shape, tile) for shape in SHAPES[:3] for tile in (None, *TILES)]
    + [(*shape, TILES[2]) for shape in SHAPES[3:5]],
    ids=str,
)
def test_noisy_keys_equal_those_of_the_pick(
    rows: int, columns: int, depth: int, first: int, valid: int, tile: HeadTile, dtype: torch.dtype
) -> None:
    """Greedy rows among them; and the ids of the torch pick."""
    x, weight = exact(rows, depth, dtype=dtype), exact(columns, depth, dtype=dtype, seed=1)
    sampling, shard = rows_of(rows), VocabShard(first, columns, valid)
    logits = x.float() @ weight.float().T
    scale = torch.tensor([1.5], device=DEVICE)
    noise = row_noise(sampling, shard)
    reference = best_keys(logits, sampling, first, valid, scale=1.5, noise=noise)
    with through_triton():
        on_device = moved(sampling)
        expected = best_keys(logits.to(DEVICE), on_device, first, valid, scale=scale)
        x, weight = x.to(DEVICE), weight.to(DEVICE)
        for factor in (1.5, scale):
            keys = head_pick.head_keys(x, weight, on_device, first, valid, factor, tile)
            assert torch.equal(keys, expected)
    assert torch.equal(unpack_id(keys).cpu(), unpack_id(reference))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_special_logits_give_the_keys_of_the_pick(tile: HeadTile) -> None:
    """Zeros of both signs, infinities, rows of nothing but -inf, and NaN."""
    x, weight = exact(9, 32), exact(70, 32, seed=1)
    weight[:, 0] = -1.0
    weight[67:] = math.nan  # not valid
    x[1:4] = 0.0
    x[1, 1] = 1e-30  # times the scale: zeros, of the sign of the weight
    x[2, 0] = math.inf
    x[3, 0] = -math.inf
    x[5, 7] = math.nan
    with through_triton():
        x, weight = x.to(DEVICE), weight.to(DEVICE)
        for scale in (1.0, 1e-30, -1.0):
            for sampling in (None, moved(row_sampling(9, temperature=0.8))):
                keys = head_pick.head_keys(x, weight, sampling, 6, 67, scale, tile)
                logits = linear(x, weight)
                assert torch.equal(keys, best_keys(logits, sampling, 6, 67, scale=scale))
                assert (keys == FAULT).nonzero()[:, 0].tolist() == [5]
        greedy = head_pick.head_keys(x, weight, None, 6, 67, 1e-30, tile)
    assert unpack_id(greedy)[1:4].tolist() == [6, 6, 6]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_row_of_minus_infinities_and_an_unlimited_one_name_the_lowest_id() -> None:
    x, weight = torch.zeros((2, 32)), torch.zeros((70, 32))
    x[:, 0], weight[:, 0] = torch.tensor([math.inf, 1.0]), -1.0
    with through_triton():
        for tile in TILES:
            keys = head_pick.head_keys(x.to(DEVICE), weight.to(DEVICE), None, 5, 66, 1.0, tile)
            assert unpack_id(keys).tolist() == [5, 5]


def test_a_shard_without_valid_ids_loses() -> None:
    with through_triton():
        x, weight = exact(3, 32).to(DEVICE), exact(8, 32).to(DEVICE)
        assert (head_keys(x, weight, None, 40, 0) == EMPTY).all()
        assert (head_keys(x, weight[:0], None, 40, 0) == EMPTY).all()
        assert head_keys(x[:0], weight, None, 0, 8).shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_ranks_agree_on_the_pick_of_one(temperature: float) -> None:
    x, weight = exact(6, 32), exact(101, 32, seed=1)
    rows = moved(dataclasses.replace(row_sampling(3, temperature=temperature), count=2))

    def work(group: Group) -> tuple[Tensor, Tensor]:
        shard = VocabShard.of(101, 98, group.rank, group.size)
        mine = weight[shard.first : shard.first + shard.rows].contiguous().to(DEVICE)
        return pick_head(x.to(DEVICE), mine, rows, shard, group, noise=None)

    with through_triton():
        results = in_turns(3, work)
        logits = (x @ weight.T).to(DEVICE)
        expected = pick(logits, rows, VocabShard(0, 101, 98), Single(), noise=None)
    for ids, faults in results:
        assert torch.equal(ids, expected[0])
        assert torch.equal(faults, expected[1])


class Biased(Head):
    """A head that does more than its weight."""

    def apply(self, hidden: Tensor) -> Tensor:
        logits = super().apply(hidden)
        logits[:, 13] += 1000.0
        return logits


def propose(
    monkeypatch: pytest.MonkeyPatch, head: Head, rows: RowSampling, **options: Any
) -> tuple[list[int], int]:
    """Ids that `head_rows` picks, and how often without logits."""
    fused = []

    def counted(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        fused.append(args)
        return pick_head(*args, **named)

    monkeypatch.setattr(drafters, "pick_head", counted)
    target: Any = SimpleNamespace(head=head)
    hidden = exact(len(rows), 32).to(DEVICE)
    ids, _ = drafters.head_rows(target, hidden, rows, Single(), noise=None, limit=2, **options)
    return ids.tolist(), len(fused)


def test_only_a_plain_head_without_truncation_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, shard = exact(40, 32, seed=1).to(DEVICE), VocabShard(0, 40, 40)
    plain, noisy = Head(weight, shard), moved(row_sampling(5))
    truncated = moved(row_sampling(5, top_k=2))
    recorded = Head(weight, shard)
    recorded.apply = lambda hidden: linear(hidden, weight)  # type: ignore[method-assign]
    with through_triton():
        ids, fused = propose(monkeypatch, plain, noisy)
        assert fused == 1
        assert propose(monkeypatch, recorded, noisy) == (ids, 0)
        assert propose(monkeypatch, plain, truncated)[1] == 0
        assert propose(monkeypatch, plain, truncated, truncate=False) == (ids, 1)
        assert propose(monkeypatch, Biased(weight, shard), noisy) == ([13] * 5, 0)


def test_the_table_can_leave_row_counts_to_the_product_and_the_pick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_tiles, "UNFUSED_ROWS", {(40, 32): (range(3, 6), range(300, 400))})
    counts = [1, 2, 3, 5, 6, 128, 129, 299, 300, 399, 400]
    found = [rows for rows in counts if fuses(40, 32, rows, torch.bfloat16)]
    assert found == [1, 2, 6, 128, 129, 299, 400]
    assert fuses(48, 32, 4, torch.bfloat16)


def test_many_rows_with_noise_are_left_to_the_product_and_the_pick() -> None:
    weight = exact(40, 32).to(DEVICE)
    with through_triton():
        for rows in (1, NOISY_ROWS, NOISY_ROWS + 1):
            x = exact(rows, 32).to(DEVICE)
            assert drafters.fuses(x, weight, noisy=False)
            assert drafters.fuses(x, weight, noisy=True) == (rows <= NOISY_ROWS)


def test_sums_in_parts_and_many_rows_of_float32_are_not_fused() -> None:
    assert not fuses(4096, 12288, 16, torch.bfloat16)
    assert fuses(4096, 12288, 129, torch.bfloat16)
    assert fuses(4096, 4096, 128, torch.float32)
    assert not fuses(4096, 4096, 129, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_head_has_a_tile_at_every_row_count(dtype: torch.dtype) -> None:
    heads = [*HEAD_TILES, (49152, 576), (32000, 1001), (75968, 4096), (7, 32)]
    for columns, depth in heads:
        for rows in (1, 16, 17, 33, 64, 65, 128, 129, 300, 2048, 100_000):
            tile = head_tile(columns, depth, rows, dtype)
            assert tile.copied or not tile.resident
            assert not tile.copied or depth * dtype.itemsize % 16 == 0
            assert rows > 128 or tile.rows >= min(rows, 16)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    x, weight = exact(2, 32).to(DEVICE), exact(8, 32).to(DEVICE)
    with through_triton():
        with pytest.raises(ConfigError, match="noise is a tensor"):
            head_keys(x, weight, None, 0, 8, noise=x)
        with pytest.raises(ConfigError, match="float64"):
            head_keys(x.double(), weight.double(), None, 0, 8)
        with pytest.raises(ConfigError, match="strides"):
            head_keys(x, weight.T.contiguous().T, None, 0, 8)
        with pytest.raises(ConfigError, match="9 ids"):
            head_keys(x, weight, None, 0, 9)


def test_without_triton_it_is_the_product_and_the_pick() -> None:
    x, weight = exact(3, 32), exact(20, 32, seed=1)
    assert not drafters.fuses(x, weight, noisy=False)
    expected = best_keys(x @ weight.T, None, 4, 18, scale=2.0)
    assert torch.equal(head_keys(x, weight, None, 4, 18, scale=2.0), expected)
    assert not bool(unpack(expected)[1].any())


# -- compiled ----------------------------------------------------------------------------------

QWEN_HEAD = (151_936, 4096)
COUNTS = (1, 2, 5, 16, 17, 32, 33, 64, 65, 100, 128)


def random_head(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn((rows, depth), generator=generator, device=DEVICE)
    weight = torch.randn((columns, depth), generator=generator, device=DEVICE)
    return x.to(dtype), weight.mul_(3 / depth**0.5).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0, None])
@pytest.mark.parametrize(
    ("columns", "depth", "first", "valid", "dtype"),
    [
        (*QWEN_HEAD, 0, 151_669, torch.bfloat16),
        (*QWEN_HEAD, 0, 151_936, torch.float32),
        (30_387, 4096, 2 * 30_387, 30_387, torch.bfloat16),
        (5003, 1001, 1, 5001, torch.bfloat16),
        (49_152, 576, 0, 49_152, torch.float32),
    ],
    ids=str,
)
def test_up_to_128_rows_have_the_keys_of_product_and_pick(
    columns: int, depth: int, first: int, valid: int, dtype: torch.dtype, temperature: float | None
) -> None:
    """Bit for bit; None mixes temperatures."""
    x, weight = random_head(128, columns, depth, dtype)
    mixed = temperature is None
    rows = mixed_rows(22, 1) if mixed else row_sampling(128, temperature=temperature or 0.0)
    rows = moved(rows)
    for count in COUNTS:
        some = rows.rows(0, count)
        assert fuses(columns, depth, count, dtype)
        expected = best_keys(gpu_linear.linear(x[:count], weight), some, first, valid)
        keys = head_keys(x[:count], weight, some, first, valid)
        assert torch.equal(keys, expected), count


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_many_has_the_key_of_few(temperature: float) -> None:
    x, weight = random_head(600, *QWEN_HEAD, torch.bfloat16)
    rows = moved(row_sampling(600, temperature=temperature))
    few = head_keys(x[:128], weight, rows.rows(0, 128), 0, QWEN_HEAD[0])
    for count in (129, 240, 257, 600):
        keys = head_keys(x[:count], weight, rows.rows(0, count), 0, QWEN_HEAD[0])
        assert torch.equal(keys[:128], few), count


@pytest.mark.gpu
@pytest.mark.parametrize("count", [48, 300])
def test_a_captured_head_pick_follows_its_inputs(count: int) -> None:
    x, weight = random_head(count, 5003, 512, torch.bfloat16)
    rows, shard = moved(row_sampling(count)), VocabShard(0, 5003, 5001)
    pick_head(x, weight, rows, shard, Single(), noise=None)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, faults = pick_head(x, weight, rows, shard, Single(), noise=None)
    for temperature in (0.9, 0.0):
        x.copy_(torch.randn_like(x))
        rows.position.add_(1)
        rows.temperature.fill_(temperature)
        graph.replay()
        expected = pick_head(x, weight, rows, shard, Single(), noise=None)
        assert torch.equal(ids, expected[0])
        assert torch.equal(faults, expected[1])
