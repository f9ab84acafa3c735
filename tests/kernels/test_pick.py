"""The Triton pick chooses what the torch pick chooses, with the same noise."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import backend, noise
from dflash_serve.kernels.gpu.noise import gumbel, philox_ids
from dflash_serve.kernels.pick import FAULT, best_keys, score_of, unpack_id
from dflash_serve.parallel.group import Group, Single
from dflash_serve.parallel.pick import RowSampling, pick, row_noise
from dflash_serve.parallel.shard import VocabShard
from tests.engine.rows import row_sampling
from tests.kernels.ranks import in_turns

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
LIMITS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


def through_triton() -> contextlib.AbstractContextManager[None]:
    """What sends DEVICE's tensors to the Triton kernels."""
    return contextlib.nullcontext() if GPU else backend.interpreted()


def moved(rows: RowSampling) -> RowSampling:
    """The same on DEVICE, as strided views of a table of 64-bit values."""
    tables = {}
    for name in LIMITS:
        value: Tensor = getattr(rows, name)
        table = torch.zeros((value.shape[0], 3), dtype=value.dtype, device=DEVICE)
        table[:, 1] = value.to(DEVICE)
        tables[name] = table[:, 1]
    return dataclasses.replace(rows, **tables)


def mixed_rows(repeats: int, count: int) -> RowSampling:
    """Requests of every kind, `count` rows each."""
    parts = [
        row_sampling(1, temperature=0.0, top_k=2),
        row_sampling(1, temperature=1.1, first_seed=2**40 + 1),
        row_sampling(1, temperature=0.7, top_k=3, first_seed=2, position=2**33),
        row_sampling(1, temperature=1.5, top_p=0.8, first_seed=3),
        row_sampling(1, temperature=0.9, min_p=0.2, first_seed=4),
        row_sampling(1, temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, first_seed=5),
    ] * repeats
    values = {name: torch.cat([getattr(p, name) for p in parts]) for name in LIMITS}
    return RowSampling(**values, noisy=True, truncates=True, count=count)


def random_logits(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn((rows, columns), generator=generator)).to(dtype)


def triton_pick(
    logits: Tensor, rows: RowSampling, valid: int, size: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The pick on `size` ranks that take turns, which must agree; on CPU."""
    logits, rows = logits.to(DEVICE), moved(rows)

    def work(group: Group) -> tuple[Tensor, Tensor]:
        shard = VocabShard.of(logits.shape[1], valid, group.rank, group.size)
        mine = logits[:, shard.first : shard.first + shard.rows]
        return pick(mine, rows, shard, group, noise=row_noise(rows, shard), scale=scale)

    with through_triton():
        results = [work(Single())] if size == 1 else in_turns(size, work)
    for ids, faults in results:
        assert torch.equal(ids, results[0][0])
        assert torch.equal(faults, results[0][1])
    return results[0][0].cpu(), results[0][1].cpu()


def torch_pick(
    logits: Tensor, rows: RowSampling, valid: int, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    shard = VocabShard(0, logits.shape[1], valid)
    return pick(logits, rows, shard, Single(), noise=row_noise(rows, shard), scale=scale)


@triton.jit
def write_words(seeds, positions, out, first_block, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    words = philox_ids(tl.load(seeds + row), tl.load(positions + row), first_block, COUNT)
    tl.store(out + row * COUNT + tl.arange(0, COUNT), words.to(tl.int64))


@triton.jit
def write_noise(words, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(out + at, gumbel(tl.load(words + at).to(tl.uint32)))


def test_philox_words_equal_the_torch_ones() -> None:
    seeds = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x1234_5678_9ABC_DEF])
    positions = torch.tensor([0, 2**32 - 1, 2**40 + 7, 3, 1, 4095])
    for first in (0, 37_000):
        out = torch.empty((6, 512), dtype=torch.int64, device=DEVICE)
        write_words[(6,)](seeds.to(DEVICE), positions.to(DEVICE), out, first, COUNT=512)
        expected = noise.philox(seeds, positions, torch.arange(first, first + 128))
        assert torch.equal(out.cpu(), expected.flatten(1))


def test_noise_equals_the_torch_noise_over_the_whole_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last, half = 2**32 - 1, 2**31
    edges = [0, 1, 2, half - 1, half, half + 1, last - 300, last - 2, last - 1, last]
    ends = [last - 2**i for i in range(31)] + [2**i for i in range(31)]
    words = torch.randint(0, 2**32, (4096,), generator=torch.Generator().manual_seed(1))
    words[: len(edges) + len(ends)] = torch.tensor(edges + ends)
    out = torch.empty(4096, device=DEVICE)
    write_noise[(1,)](words.to(DEVICE), out, COUNT=4096, enable_fp_fusion=False)
    monkeypatch.setattr(noise, "philox", lambda *_: words.view(1, -1, 4))
    zero = torch.zeros(1, dtype=torch.int64)
    expected = noise.gumbel(zero, zero, 0, 4096)[0]
    torch.testing.assert_close(out.cpu(), expected, rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "valid", "first"),
    [(1, 7, 7, 0), (3, 2048, 2047, 0), (2, 4099, 4090, 5), (1, 100, 0, 6), (40, 33, 32, 3)],
)
def test_greedy_keys_equal_the_torch_keys(
    rows: int, columns: int, valid: int, first: int, dtype: torch.dtype
) -> None:
    logits = random_logits(rows, columns + 3, dtype)[:, :columns]
    logits[0, : columns // 2] = 0.0
    logits[0, 0] = -0.0
    logits[-1, columns // 3] = math.inf
    with through_triton():
        keys = best_keys(logits.to(DEVICE), None, first, valid)
    assert torch.equal(keys.cpu(), best_keys(logits, None, first, valid))


def test_a_nan_faults_its_row_unless_it_is_padding() -> None:
    logits = random_logits(3, 50, torch.float32)
    logits[0, 17] = math.nan
    logits[1, 48] = math.nan
    with through_triton():
        keys = best_keys(logits.to(DEVICE), None, 0, 48).cpu()
    assert (keys == FAULT).tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "valid", "scale"), [(0, 2500, 1.0), (4099, 2300, 2.5)])
def test_noisy_scores_and_ids_equal_the_torch_ones(
    first: int, valid: int, scale: float, dtype: torch.dtype
) -> None:
    logits, rows = random_logits(12, 2500, dtype), mixed_rows(1, 2)
    shard = VocabShard(first, 2500, valid)
    expected = best_keys(logits, rows, first, valid, scale=scale, noise=row_noise(rows, shard))
    on_device = torch.tensor([scale], device=DEVICE)
    with through_triton():
        keys = best_keys(logits.to(DEVICE), moved(rows), first, valid, scale=scale).cpu()
        again = best_keys(logits.to(DEVICE), moved(rows), first, valid, scale=on_device).cpu()
    assert torch.equal(again, keys)
    assert torch.equal(unpack_id(keys), unpack_id(expected))
    torch.testing.assert_close(score_of(keys), score_of(expected), rtol=1e-6, atol=2e-6)


def test_a_row_is_the_same_in_any_part_of_a_batch() -> None:
    logits, rows = random_logits(12, 300, torch.float32).to(DEVICE), moved(mixed_rows(1, 2))
    with through_triton():
        whole = best_keys(logits, rows, 0, 300)
        for start, stop in ((0, 1), (3, 8), (11, 12)):
            part = best_keys(logits[start:stop], rows.rows(start, stop), 0, 300)
            assert torch.equal(part, whole[start:stop])


def test_proposals_get_the_noise_of_the_rows_that_verify_them() -> None:
    logits = torch.zeros((6, 500), device=DEVICE)
    verify = moved(row_sampling(2, temperature=1.0))
    with through_triton():
        verified = best_keys(logits, dataclasses.replace(verify, count=3), 0, 500).view(2, 3)
        drafted = best_keys(logits[:4], dataclasses.replace(verify, count=2), 0, 500).view(2, 2)
    assert torch.equal(drafted, verified[:, :2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "columns"), [(1, 2300), (3, 700)])
@pytest.mark.parametrize("tied", [False, True])
def test_truncated_picks_equal_the_torch_ones(
    tied: bool, size: int, columns: int, dtype: torch.dtype
) -> None:
    logits, rows = random_logits(6, columns, dtype), mixed_rows(1, 1)
    if tied:
        logits = (logits * 0.5).round() * 2
    ids, faults = triton_pick(logits, rows, columns - 2, size)
    assert not bool(faults.any())
    assert torch.equal(ids, torch_pick(logits, rows, columns - 2)[0])


def test_infinite_and_undefined_maxima_fault_the_rows_that_truncate() -> None:
    logits, rows = random_logits(6, 90, torch.float32), mixed_rows(1, 1)
    logits[:4, 5] = math.inf
    logits[4, 60] = math.nan
    expected = torch_pick(logits, rows, 90)
    assert expected[1].tolist() == [False, False, True, True, True, False]
    ids, faults = triton_pick(logits, rows, 90)
    assert torch.equal(faults, expected[1])
    assert torch.equal(ids, expected[0])


def test_what_the_kernels_do_not_take_is_refused() -> None:
    logits = torch.zeros((2, 8), device=DEVICE)
    with through_triton():
        with pytest.raises(ConfigError, match="noise is a tensor"):
            best_keys(logits, None, 0, 8, noise=logits)
        with pytest.raises(ConfigError, match="strides"):
            best_keys(logits.T, None, 0, 2)


def test_row_noise_is_left_to_the_kernels() -> None:
    with through_triton():
        assert row_noise(moved(row_sampling(1)), VocabShard(0, 8, 8)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("valid", [151_669, 151_936])
def test_wide_picks_equal_the_torch_ones(valid: int, dtype: torch.dtype) -> None:
    logits, rows = random_logits(24, 151_936, dtype), mixed_rows(4, 1)
    for size in (1, 2, 5):
        ids, faults = triton_pick(logits, rows, valid, size)
        assert not bool(faults.any())
        assert torch.equal(ids, torch_pick(logits, rows, valid)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_a_row_are_equal_for_any_number_of_rows(dtype: torch.dtype, truncate: bool) -> None:
    logits, rows = random_logits(516, 9001, dtype).to(DEVICE), moved(mixed_rows(86, 1))
    shard = VocabShard(0, 9001, 9000)
    whole = best_keys(logits, rows, 0, 9000)
    picked, _ = pick(logits, rows, shard, Single(), noise=None, truncate=truncate)
    for count in (1, 2, 16, 64, 128, 129, 512):
        some = rows.rows(0, count)
        assert torch.equal(best_keys(logits[:count], some, 0, 9000), whole[:count])
        ids, _ = pick(logits[:count], some, shard, Single(), noise=None, truncate=truncate)
        assert torch.equal(ids, picked[:count])


@pytest.mark.gpu
def test_a_captured_pick_follows_its_inputs() -> None:
    logits, rows = random_logits(48, 5003, torch.bfloat16).to(DEVICE), moved(mixed_rows(8, 1))
    shard = VocabShard(0, 5003, 5001)
    pick(logits, rows, shard, Single(), noise=None)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, faults = pick(logits, rows, shard, Single(), noise=None)
    for seed in (1, 2):
        logits.copy_(random_logits(48, 5003, torch.bfloat16, seed))
        rows.position.add_(1)
        rows.temperature.mul_(0.9)
        graph.replay()
        expected = pick(logits, rows, shard, Single(), noise=None)
        assert torch.equal(ids, expected[0])
        assert torch.equal(faults, expected[1])
