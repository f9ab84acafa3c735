"""Norm, gated activation, rotary embedding and page writes: Triton against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.context_kv import store_context
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.qkv import rope_and_store
from dflash_serve.kernels.rope import rope_table
from dflash_serve.model_config import RopeConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-6
PAGE = 4
POSITIONS = 600
ROWS = [1, 2, 15, 16, 17, 64, 129, 257] if GPU else [1, 2, 9]
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
TYPES = [torch.float32, BF16]
# (head_dim, query heads, key heads): groups of 1…16, blocks of heads that straddle q, k and v.
SHAPES = [
    (64, 9, 3),
    (64, 5, 1),
    (96, 6, 6),
    (96, 14, 2),
    (128, 32, 8),
    (128, 6, 1),
    (128, 16, 1),
    (256, 4, 2),
    (256, 16, 2),
    (512, 7, 1),
]
COUNTS = [1, 2, 16, 64, 128, 129]
MANY = 512

torch.backends.cuda.matmul.allow_tf32 = False


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(value: Any) -> Any:
    """A copy on the device with the same strides."""
    if isinstance(value, tuple):
        return tuple(on_device(part) for part in value)
    if not isinstance(value, Tensor):
        return value
    # Strides and the offset into the storage are kept: they decide how wide loads may be.
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(DEVICE, copy=True)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def through_triton(function: Callable[..., Any], *args: Any) -> Any:
    """Result of an entry on the device, through its kernel."""
    with interpreted():
        return function(*args)


def close(out: Tensor, expected: Tensor, size: Tensor | None = None) -> None:
    """Equal up to rounding relative to `size`; in bf16 nearly everywhere bit for bit.

    Args:
        size: magnitude of what was added up, where it can exceed the result's own.
    """
    out = out.cpu()
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    size = (expected if size is None else size).float().abs()
    relative = 2**-6 if out.dtype == torch.bfloat16 else 1e-5
    assert ((out.float() - expected.float()).abs() <= relative * size + 1e-6).all()
    if out.dtype == torch.bfloat16 and out.numel() > 1000:
        assert (out == expected).float().mean() > 0.99


def pair_size(heads: Tensor) -> Tensor:
    """Length of the two-vectors that a rotation turns, for both of their components."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.hypot(first, second).repeat(1, 1, 2)


# -- norm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 64, 96, 576, 4096, 5120])
@pytest.mark.parametrize("rows", ROWS)
def test_norm_equals_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * rand(rows, width, dtype=dtype), 1 + 0.2 * rand(width, seed=1)
    weight = weight.to(dtype)
    out = through_triton(rms_norm, on_device(x), on_device(weight), EPS)
    close(out, rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 16 : 16 + 96],
        lambda x: x[:, 3 : 3 + 96],
        lambda x: x[::2, :96],
        lambda x: x.view(6, 4, 96)[:, 1:3],
        lambda x: x.view(6, 4, 96)[2:3, 1:],
        lambda x: x.view(6, 4, 96)[:, 2:3],
        lambda x: x.view(2, 3, 4, 96),
        lambda x: x.view(6, 4, 96).transpose(0, 1),
        lambda x: x[0, :96],
        lambda x: x.view(96, 24).t(),
    ],
)
def test_norm_takes_any_leading_shape_and_strides(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = view(rand(6, 384, dtype=dtype))
    weight = (1 + 0.2 * rand(96, seed=1)).to(dtype)
    out = through_triton(rms_norm, on_device(x), on_device(weight), EPS)
    assert out.is_contiguous()
    close(out, rms_norm(x, weight, EPS))


def test_norm_refuses_what_it_cannot_do_and_says_why() -> None:
    x = on_device(rand(2, 8))
    with pytest.raises(ConfigError, match=r"norm weight is torch\.bfloat16 and the activations"):
        through_triton(rms_norm, x, on_device(rand(8).bfloat16()), EPS)
    with pytest.raises(ConfigError, match="up to 65536"):
        through_triton(rms_norm, on_device(rand(1, 65537)), on_device(rand(65537)), EPS)


# -- gated activation ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [1, 576, 1024, 1536, 3072])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_activation_equals_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    x = 4 * rand(rows, 2 * width, dtype=dtype)
    close(through_triton(silu_mul, on_device(x)), silu_mul(x))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated_activation_of_strided_and_extreme_values(dtype: torch.dtype) -> None:
    x = rand(5, 200, dtype=dtype)[:, 3:163]
    x[:, :6] = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4])
    close(through_triton(silu_mul, on_device(x)), silu_mul(x))


# -- rotary embedding and pages -----------------------------------------------------------------


def token_places(tokens: int, pages: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Positions, and distinct slots outside the dummy page in shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    slots = torch.randperm((pages - 1) * PAGE, generator=generator)[:tokens] + PAGE
    return positions, slots


def table(head_dim: int) -> Tensor:
    return rope_table(RopeConfig(theta=1e6), head_dim, POSITIONS, torch.device("cpu"))


def qkv_case(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Any]:
    """Arguments of rope_and_store; the pages hold ones."""
    head_dim, heads, kv_heads = shape
    pages = 2 + -(-tokens // PAGE)
    store = tuple(torch.ones(pages, PAGE, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    norms = [(1 + 0.2 * rand(head_dim, seed=s)).to(dtype) for s in (1, 2)]
    qkv = 2 * rand(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    return [qkv, *norms, EPS, table(head_dim), *token_places(tokens, pages), store, heads]


def check_qkv(args: list[Any]) -> None:
    moved = [on_device(arg) for arg in args]
    query = through_triton(rope_and_store, *moved)
    expected = rope_and_store(*args)
    close(query, expected, pair_size(expected))
    (keys, values), (key_pages, value_pages) = moved[7], args[7]
    flat = key_pages.view(-1, *key_pages.shape[2:])
    close(keys.view_as(flat), flat, pair_size(flat))
    assert torch.equal(values.cpu(), value_pages)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", ROWS)
def test_rope_and_store_equals_torch(
    tokens: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check_qkv(qkv_case(tokens, shape, dtype))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 9, 3), (96, 3, 1), (128, 8, 2)], ids=str)
def test_a_rotation_has_the_bits_of_separate_torch_operations(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args = qkv_case(5, shape, dtype)
    args[1] = args[2] = None
    moved = [on_device(arg) for arg in args]
    assert torch.equal(through_triton(rope_and_store, *moved).cpu(), rope_and_store(*args))
    for mine, reference in zip(moved[7], args[7], strict=True):
        assert torch.equal(mine.cpu(), reference)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 16])
def test_rope_and_store_reads_strided_rows(offset: int, dtype: torch.dtype) -> None:
    args = qkv_case(5, (64, 4, 2), dtype)
    wide = rand(5, args[0].shape[1] + 40, dtype=dtype)
    args[0] = wide[:, offset : offset + args[0].shape[1]]
    check_qkv(args)


def test_rope_and_store_fills_first_and_last_slots_of_pages() -> None:
    args = qkv_case(4, (64, 2, 1), torch.float32)
    args[6] = torch.tensor([PAGE, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE - 1])
    check_qkv(args)


def test_rows_of_padding_may_share_a_slot_of_the_dummy_page() -> None:
    args = qkv_case(6, (64, 2, 1), torch.float32)
    args[6] = torch.tensor([0, PAGE, 0, 2 * PAGE + 1, 0, 1])
    moved = [on_device(arg) for arg in args]
    query, expected = through_triton(rope_and_store, *moved), rope_and_store(*args)
    close(query, expected, pair_size(expected))
    for mine, reference in zip(moved[7], args[7], strict=True):
        assert (mine[1:].cpu() - reference[1:]).abs().max() < 1e-5


def test_pages_of_another_type_take_rounded_rows() -> None:
    args = qkv_case(3, (64, 2, 1), torch.float32)
    args[7] = tuple(page.bfloat16() for page in args[7])
    moved = [on_device(arg) for arg in args]
    through_triton(rope_and_store, *moved)
    rope_and_store(*args)
    for mine, reference in zip(moved[7], args[7], strict=True):
        torch.testing.assert_close(mine.cpu(), reference, rtol=2**-7, atol=1e-6)


# -- context of the draft -----------------------------------------------------------------------


def context_case(tokens: int, layers: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Any]:
    """Arguments of store_context; every third row is not to be written."""
    head_dim, kv_heads = shape
    count = 2 + -(-tokens // PAGE)
    positions, slots = token_places(tokens, count)
    slots[2::3] = torch.arange(len(slots[2::3])) % PAGE
    pages = torch.ones(layers, 2, count, PAGE, kv_heads, head_dim, dtype=dtype)
    norms = (1 + 0.2 * rand(layers, head_dim, seed=1)).to(dtype)
    kv = 2 * rand(tokens, layers * 2 * kv_heads * head_dim, dtype=dtype)
    return [kv, norms, EPS, table(head_dim), positions, slots, pages]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("shape", [(64, 3), (96, 2), (128, 8), (256, 1), (512, 1)], ids=str)
@pytest.mark.parametrize("tokens", ROWS)
def test_context_of_all_layers_equals_torch(
    tokens: int, shape: tuple[int, int], layers: int, dtype: torch.dtype
) -> None:
    args = context_case(tokens, layers, shape, dtype)
    moved = [on_device(arg) for arg in args]
    through_triton(store_context, *moved)
    store_context(*args)
    mine, reference = moved[6], args[6]
    assert (mine[:, :, 0] == 1).all()  # rows without a place are skipped
    keys, expected = mine[:, 0, 1:].flatten(0, 2), reference[:, 0, 1:].flatten(0, 2)
    close(keys, expected, pair_size(expected))
    assert torch.equal(mine[:, 1, 1:].cpu(), reference[:, 1, 1:])


# -- row bits -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [576, 4096, 5120])
def test_norm_and_activation_give_a_row_the_same_bits_in_any_company(
    width: int, dtype: torch.dtype
) -> None:
    x, weight = on_device(rand(MANY, width, dtype=dtype)), on_device(rand(width, dtype=dtype))
    normal, active = rms_norm(x, weight, EPS), silu_mul(x)
    for count in COUNTS:
        for first in (0, MANY - count):
            some = slice(first, first + count)
            assert torch.equal(rms_norm(x[some], weight, EPS), normal[some])
            assert torch.equal(silu_mul(x[some]), active[some])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_and_store_gives_a_row_the_same_bits_in_any_company(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    args = [on_device(arg) for arg in qkv_case(MANY, shape, dtype)]
    query = rope_and_store(*args)
    pages = args[7]
    for count in COUNTS:
        some = slice(MANY - count, MANY)
        rest = [torch.ones_like(page) for page in pages]
        part = [args[0][some], *args[1:5], args[5][some], args[6][some], tuple(rest), args[8]]
        assert torch.equal(rope_and_store(*part), query[some])
        for mine, whole in zip(rest, pages, strict=True):
            assert torch.equal(
                mine.flatten(0, 1)[args[6][some]], whole.flatten(0, 1)[args[6][some]]
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 3), (96, 2), (128, 8)], ids=str)
def test_context_gives_a_row_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    args = [on_device(arg) for arg in context_case(MANY, 5, shape, dtype)]
    store_context(*args)
    whole = args[6].flatten(2, 3)
    for count in COUNTS:
        some = slice(MANY - count, MANY)
        pages = torch.ones_like(args[6])
        store_context(args[0][some], *args[1:4], args[4][some], args[5][some], pages)
        slots = args[5][some]
        slots = slots[slots >= PAGE]
        assert torch.equal(pages.flatten(2, 3)[:, :, slots], whole[:, :, slots])
