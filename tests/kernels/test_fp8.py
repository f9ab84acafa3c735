"""8-bit products: the plain functions against their definition, the Triton kernels against them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import fp8, linear
from dflash_serve.kernels.fp8 import FP8, FP8_MAX, Fp8Weight, quantize_rows, quantize_weight
from dflash_serve.kernels.gpu import fp8 as gpu
from dflash_serve.kernels.gpu.fp8_tiles import GATED_TILES, TILES, Fp8Tile, fp8_tile
from dflash_serve.kernels.norm import add_norm
from tests.kernels.linear_cases import (
    CUDA,
    DEVICE,
    EPS,
    QWEN,
    TYPES,
    activated,
    close,
    rand,
    through_triton,
)

MARKED = [pytest.mark.gpu] if CUDA else []
pytestmark = [
    pytest.mark.skipif(
        CUDA and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit products"
    ),
    *MARKED,
]

BOUND = 100.0 if CUDA else 1.0
"""A Hopper tensor core keeps 14 bits of a sum, between two steps of K and within one."""
FEW = Fp8Tile(16, 64, 64, 4, 2)
TILED = [
    FEW,
    dataclasses.replace(FEW, swapped=True),
    dataclasses.replace(FEW, exact=True),
    dataclasses.replace(FEW, swapped=True, exact=True, stages=3),
    Fp8Tile(64, 64, 64, 4, 2, walks=True),
    Fp8Tile(64, 256, 64, 8, 2, walks=True, group=2),
]


def weight_of(columns: int, depth: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (rand(columns, depth, seed=2) / depth**0.5).to(dtype)


def dequantized(x: Tensor) -> Tensor:
    """What rows are after rounding to 8 bits, in float64."""
    data, scale = quantize_rows(x)
    value: Tensor = data.double() * scale.double()[:, None]
    return value


def exact(x: Tensor, weight: Fp8Weight) -> Tensor:
    """The product of the rounded rows with the rounded weight, in float64."""
    return dequantized(x) @ weight.dequantized().double().T


def test_rows_take_the_whole_range_and_err_by_half_a_step() -> None:
    x = rand(5, 96) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6], device=DEVICE)[:, None]
    data, scale = quantize_rows(x)
    assert data.dtype == FP8
    assert torch.equal(data.float().abs().amax(1), torch.full((5,), FP8_MAX, device=DEVICE))
    assert torch.allclose(scale * FP8_MAX, x.abs().amax(1))
    # Three mantissa bits; numbers below 2^-6 have a fixed step of 2^-9.
    bound = torch.maximum(x.abs() * 2.0**-4, scale[:, None] * 2.0**-10) * 1.001
    assert bool(((data.float() * scale[:, None] - x).abs() <= bound).all())


def test_zero_rows_stay_zero() -> None:
    data, scale = quantize_rows(torch.zeros(2, 32, device=DEVICE))
    assert not bool(data.float().any())
    assert bool((scale > 0).all())


def test_a_weight_is_quantised_row_by_row_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = weight_of(70, 48)
    whole = quantize_weight(weight)
    monkeypatch.setattr(fp8, "_CHUNK", 48 * 16)
    parts = quantize_weight(weight)
    assert torch.equal(whole.data.float(), parts.data.float())
    assert torch.equal(whole.scale, parts.scale)
    expected = dequantized(weight).float()
    assert torch.allclose(whole.dequantized(), expected, rtol=1e-6, atol=0)
    assert fp8.weight_nbytes(whole) == 70 * 48 + 70 * 4
    assert fp8.weight_nbytes(weight) == 70 * 48 * 4


def test_a_broken_weight_is_refused() -> None:
    weight = weight_of(8, 32)
    weight[3, 5] = float("nan")
    with pytest.raises(ConfigError, match=r"\[8, 32\].*NaN"):
        quantize_weight(weight)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 64), (15, 96, 160), (40, 80, 48)])
def test_dispatched_products_equal_their_definition(
    rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    """On CPU the plain functions; on a GPU the kernels."""
    x, weight = rand(rows, depth, seed=1, dtype=dtype), quantize_weight(weight_of(columns, depth))
    expected = exact(x, weight)
    assert close(linear.linear(x, weight), expected, BOUND)
    assert close(linear.gated_linear(x, weight), activated(expected), BOUND)
    residual, norm = rand(rows, columns, seed=4, dtype=dtype), rand(columns, seed=5, dtype=dtype)
    stream, normal = linear.linear_add_norm(x, weight, residual, norm, EPS)
    assert close(stream, residual.double() + expected, BOUND)
    zero = torch.zeros_like(stream)
    assert torch.equal(normal, add_norm(zero, stream, norm, EPS)[1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 96, 1024, 1040])
def test_quantised_rows_equal_the_plain_function_bit_for_bit(
    width: int, dtype: torch.dtype
) -> None:
    wide = rand(9, width + 32, dtype=dtype)
    x = wide[:, :width]  # rows that lie apart
    expected = fp8._quantize(x)
    with through_triton():
        data, scale = quantize_rows(x)
    assert torch.equal(data.float(), expected[0].float())
    assert torch.equal(scale, expected[1])


@pytest.mark.parametrize("tile", TILED)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 128, 64), (17, 96, 144), (130, 320, 80)]
)
def test_every_tile_gives_the_product(tile: Fp8Tile, rows: int, columns: int, depth: int) -> None:
    x, weight = rand(rows, depth, seed=1), quantize_weight(weight_of(columns, depth))
    expected = exact(x, weight)
    bound = 1.0 if tile.exact and not tile.swapped else BOUND
    with through_triton():
        data, scale = quantize_rows(x)
        out = gpu.product(data, scale, weight, tile, torch.float32)
        gated = gpu.product(data, scale, weight, tile, torch.float32, gated=True)
    assert out.shape == (rows, columns)
    assert gated.shape == (rows, columns // 2)
    assert close(out, expected, bound)
    assert close(gated, activated(expected), bound)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_add_up_to_the_product(parts: int, swapped: bool) -> None:
    x, weight = rand(18, 256, seed=1), quantize_weight(weight_of(96, 256))
    tile = dataclasses.replace(FEW, parts=parts, swapped=swapped)
    with through_triton():
        sums = gpu.part_sums(*quantize_rows(x), weight, tile)
    assert sums.shape == (parts, 18, 96)
    assert close(sums.sum(0), exact(x, weight), BOUND)
    assert float(sums[0].abs().mean()) > 0.1


@pytest.mark.parametrize("walks", [False, True])
def test_a_row_does_not_depend_on_its_company(walks: bool) -> None:
    x, weight = rand(33, 128, seed=1), quantize_weight(weight_of(128, 128))
    tile = dataclasses.replace(FEW, rows=64, walks=walks)
    with through_triton():
        together = gpu.product(*quantize_rows(x), weight, tile, torch.float32)
        alone = gpu.product(*quantize_rows(x[20:21]), weight, tile, torch.float32)
    assert torch.equal(together[20:21], alone)


def test_the_dispatch_takes_parts_where_the_rule_says_so() -> None:
    """A narrow weight with a long K is summed in parts behind the same entry point."""
    rows, columns, depth = 7, 64, 512
    assert fp8_tile(columns, depth, rows, summed=True).parts == 2
    x, weight = rand(rows, depth, seed=1), quantize_weight(weight_of(columns, depth))
    residual, norm = rand(rows, columns, seed=4), rand(columns, seed=5)
    plain = add_norm(exact(x, weight).float(), residual, norm, EPS)
    with through_triton():
        for consume in (False, True):
            given = residual.clone()
            stream, normal = linear.linear_add_norm(x, weight, given, norm, EPS, consume=consume)
            assert close(stream, plain[0].double(), 100.0 if CUDA else 1.0)
            assert close(normal, plain[1].double(), 100.0 if CUDA else 1.0)
            assert (stream.data_ptr() == given.data_ptr()) == consume


def test_no_rows_give_no_result() -> None:
    weight = quantize_weight(weight_of(64, 64))
    with through_triton():
        assert linear.linear(rand(0, 64), weight).shape == (0, 64)


def test_what_the_copy_engine_cannot_address_is_refused() -> None:
    x, weight = rand(4, 40), quantize_weight(weight_of(64, 40))
    with through_triton(), pytest.raises(ConfigError, match=r"K = 40.*multiple of 16"):
        linear.linear(x, weight)


def test_parts_without_anyone_to_add_them_are_refused() -> None:
    data, scale = quantize_rows(rand(4, 128))
    weight = quantize_weight(weight_of(64, 128))
    tile = dataclasses.replace(FEW, parts=2)
    with pytest.raises(ConfigError, match="2 parts"):
        gpu.product(data, scale, weight, tile, torch.float32)
    with pytest.raises(ConfigError, match="K = 128 in 4 parts of steps of 64"):
        gpu.part_sums(data, scale, weight, dataclasses.replace(FEW, parts=4))


@pytest.mark.parametrize(("columns", "depth"), [*QWEN.values(), (576, 576), (576, 1536), (64, 48)])
def test_parts_of_a_shape_are_the_same_for_all_few_rows(columns: int, depth: int) -> None:
    for gated in (False, True):
        tiles = [fp8_tile(columns, depth, rows, gated=gated, summed=True) for rows in range(1, 129)]
        assert len({tile.parts for tile in tiles}) == 1
        assert all(depth % (tile.parts * tile.depth) == 0 for tile in tiles if tile.parts > 1)


def test_tables_ascend_and_end_without_a_gap() -> None:
    for table in (TILES, GATED_TILES):
        for entries in table.values():
            assert list(entries) == sorted(entries)
            assert all(tile.walks or tile.rows <= 128 for tile in entries.values())
