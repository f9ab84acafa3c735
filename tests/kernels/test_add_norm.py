"""The residual add and the norm behind it, and the products that leave their parts to them.

Without a GPU the kernels run in Triton's interpreter, in float32 and at small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import compiled
from dflash_serve.kernels.gpu import linear as gpu
from dflash_serve.kernels.gpu.linear_sum import part_sums
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, Mode, Tile
from dflash_serve.kernels.norm import add_norm, rms_norm
from tests.kernels.linear_cases import CUDA, EPS, QWEN, TYPES, Case, close, rand, through_triton


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with through_triton():
        yield


def _tile(parts: int, mode: Mode = "spread") -> Tile:
    return Tile(64, 32, 32, 4, 3, parts, mode) if CUDA else Tile(16, 32, 16, 4, 3, parts, mode)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, 96, 576, 4096])
@pytest.mark.parametrize("rows", [1, 2, 17, 129])
def test_the_norm_of_a_sum_is_the_sum_and_its_norm(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    stream, delta = rand(rows, width, dtype=dtype), rand(rows, width, seed=1, dtype=dtype)
    weight = (1 + 0.2 * rand(width, seed=2)).to(dtype)
    assert compiled(stream)
    total, normal = add_norm(delta, stream, weight, EPS)
    assert torch.equal(total, stream + delta)
    assert torch.equal(normal, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_are_added_in_their_order_and_rounded_before_the_stream(
    parts: int, dtype: torch.dtype
) -> None:
    stream, sums = rand(5, 96, dtype=dtype), rand(parts, 5, 96, seed=1)
    weight = (1 + 0.2 * rand(96, seed=2)).to(dtype)
    added = torch.zeros_like(sums[0])
    for part in sums:
        added += part
    total, normal = add_norm(sums, stream, weight, EPS)
    assert torch.equal(total, stream + added.to(dtype))
    assert torch.equal(normal, rms_norm(total, weight, EPS))


def test_only_a_stream_given_away_is_overwritten() -> None:
    stream, delta, weight = rand(3, 64), rand(3, 64, seed=1), rand(64, seed=2)
    before = stream.clone()
    kept, _ = add_norm(delta, stream, weight, EPS)
    assert torch.equal(stream, before)
    taken, _ = add_norm(delta, stream, weight, EPS, consume=True)
    assert taken.data_ptr() == stream.data_ptr()
    assert torch.equal(taken, kept)


def test_an_empty_batch_has_an_empty_norm() -> None:
    total, normal = add_norm(rand(2, 0, 64), rand(0, 64), rand(64), EPS)
    assert total.shape == normal.shape == (0, 64)


def test_what_the_norm_of_a_sum_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"norm weight is torch\.bfloat16"):
        add_norm(rand(2, 8), rand(2, 8), rand(8).bfloat16(), EPS)
    with pytest.raises(ConfigError, match="up to 65536"):
        add_norm(rand(1, 65537), rand(1, 65537), rand(65537), EPS)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (21, 72), (35, 40)])
def test_the_parts_of_a_product_are_those_a_spread_product_adds(
    rows: int, columns: int, parts: int, dtype: torch.dtype
) -> None:
    case = Case(rows, columns, 192, dtype)
    tile = _tile(parts)
    sums = part_sums(case.x, case.weight, tile)
    assert sums.shape == (parts, rows, columns)
    assert close(sums.sum(0), case.plain())
    norm = (1 + 0.2 * rand(columns, seed=5)).to(dtype)
    total, normal = add_norm(sums, case.residual, norm, EPS)
    whole = gpu.product(case.x, case.weight, tile, residual=case.residual)
    assert torch.equal(total, whole)
    assert torch.equal(normal, rms_norm(whole, norm, EPS))


def test_parts_that_are_no_whole_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="K = 96 in 2 parts of steps of 32"):
        part_sums(rand(2, 96), rand(8, 96), Tile(16, 16, 32, 4, 2, 2, "spread"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["o", "down", "fc"])
def test_row_bits_of_a_product_with_the_norm_behind_it_do_not_depend_on_the_rows(
    name: str,
) -> None:
    from dflash_serve.kernels.linear import linear_add_norm

    case = Case(INVARIANT_ROWS, *QWEN[name], torch.bfloat16)
    norm = (1 + 0.2 * rand(QWEN[name][0], seed=5)).bfloat16()
    most = linear_add_norm(case.x, case.weight, case.residual, norm, EPS)
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, 127):
        some = slice(0, rows)
        found = linear_add_norm(case.x[some], case.weight, case.residual[some], norm, EPS)
        assert all(torch.equal(a, b[some]) for a, b in zip(found, most, strict=True))
