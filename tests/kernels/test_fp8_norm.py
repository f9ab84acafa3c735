"""Norms that give their rows in 8 bits: the bits of a norm, then of the rounding, in one kernel."""

from __future__ import annotations

import pytest
import torch

from dflash_serve.kernels import fp8, linear
from dflash_serve.kernels.fp8 import Fp8Rows, quantize_rows, quantize_weight
from dflash_serve.kernels.norm import add_norm, rms_norm
from tests.kernels.linear_cases import CUDA, EPS, TYPES, rand, through_triton

pytestmark = [
    pytest.mark.skipif(
        CUDA and torch.cuda.get_device_capability() < (8, 9), reason="no 8-bit products"
    ),
    *([pytest.mark.gpu] if CUDA else []),
]
WIDTHS = [16, 576, 1040] + [4096] * CUDA


def assert_rounded(found: Fp8Rows, normal: torch.Tensor) -> None:
    expected = Fp8Rows(*quantize_rows(normal), normal.dtype)
    assert found.dtype == expected.dtype
    if not CUDA or normal.dtype == torch.bfloat16:
        assert torch.equal(found.data.float(), expected.data.float())
        assert torch.equal(found.scale, expected.scale)
        return
    # A compiler may sum the squares of a float32 row in another order in each of two kernels.
    assert torch.allclose(found.scale, expected.scale, rtol=1e-5)
    off = found.dequantized() - expected.dequantized()
    assert float((off.abs() > 1e-4 * normal.abs().max()).float().mean()) < 1e-2
    assert bool((off.abs() <= 0.13 * expected.dequantized().abs() + 1e-3).all())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_norm_rows_are_the_rounded_rows_of_the_norm(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = rand(rows, width, dtype=dtype), rand(width, seed=2, dtype=dtype)
    with through_triton():
        assert_rounded(fp8.norm_rows(x, weight, EPS), rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("parts", [None, 2, 4])
def test_add_norm_rows_are_the_rounded_rows_of_add_norm(
    parts: int | None, width: int, dtype: torch.dtype
) -> None:
    stream, weight = rand(5, width, seed=1, dtype=dtype), rand(width, seed=2, dtype=dtype)
    delta = rand(5, width, seed=3, dtype=dtype) if parts is None else rand(parts, 5, width, seed=3)
    with through_triton():
        expected, normal = add_norm(delta, stream, weight, EPS)
        for consume in (False, True):
            given = stream.clone()
            total, rows = fp8.add_norm_rows(delta, given, weight, EPS, consume=consume)
            assert torch.equal(total, expected)
            assert (total.data_ptr() == given.data_ptr()) == consume
            assert_rounded(rows, normal)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_chain_of_products_has_the_bits_of_its_parts(dtype: torch.dtype) -> None:
    """A product, the norm behind it, and what reads the norm: with one rounding or with two."""
    x, residual = rand(7, 256, seed=1, dtype=dtype), rand(7, 64, seed=2, dtype=dtype)
    weight, norm = quantize_weight(rand(64, 256, seed=3)), rand(64, seed=4, dtype=dtype)
    reader = quantize_weight(rand(96, 64, seed=5))
    with through_triton():
        stream, normal = linear.linear_add_norm(x, weight, residual, norm, EPS)
        total, rows = linear.linear_add_norm(x, weight, residual, norm, EPS, reader=reader)
        assert isinstance(rows, Fp8Rows)
        assert torch.equal(total, stream)
        assert torch.equal(linear.linear(rows, reader), linear.linear(normal, reader))
        assert torch.equal(linear.gated_linear(rows, reader), linear.gated_linear(normal, reader))
        again = linear.norm_linear(stream, norm, EPS, reader)
        assert torch.equal(again, linear.linear(rms_norm(stream, norm, EPS), reader))


def test_a_norm_read_by_a_plain_product_stays_as_it_is() -> None:
    x, residual = rand(3, 32, seed=1), rand(3, 32, seed=2)
    weight, norm = quantize_weight(rand(32, 32, seed=3)), rand(32, seed=4)
    for reader in (None, rand(32, 32, seed=5)):
        _, normal = linear.linear_add_norm(x, weight, residual, norm, EPS, reader=reader)
        assert isinstance(normal, torch.Tensor)
