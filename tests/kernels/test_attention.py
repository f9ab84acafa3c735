"""The attention kernels against torch, and the bits of their rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.attention import attend, check_heads, check_page_size
from dflash_serve.kernels.gpu.attention import (
    FEW_ROWS,
    DecodeTiles,
    Mode,
    Sharing,
    decode_attention,
)
from dflash_serve.kernels.gpu.attention_splits import split_count
from dflash_serve.kernels.gpu.attention_tiles import Sums
from dflash_serve.kernels.gpu.prefill import prefill_attention, prefill_tiles
from tests.kernels.paging import DEVICE, DTYPES, HALF, TOLERANCE, Case, kernels, paged

torch.backends.cuda.matmul.allow_tf32 = False
MODES: list[Mode] = ["whole", "split"]
each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_mode = pytest.mark.parametrize("mode", MODES)


def decode(case: Case, mode: Mode, programs: int = 3, **options: Any) -> Tensor:
    sharing = options.pop("sharing", Sharing(mode, programs if mode == "split" else 1))
    with kernels():
        return decode_attention(
            case.query, case.keys, case.values, case.view, sharing=sharing, **options
        )


def run(case: Case) -> Tensor:
    with kernels():
        return attend(case.query, case.keys, case.values, case.view)


def assert_equals_reference(out: Tensor, case: Case) -> None:
    assert out.dtype == case.query.dtype
    assert out.shape == case.query.shape
    error = (out.float().cpu() - case.reference()).abs().max()
    assert error < TOLERANCE[case.query.dtype], float(error)


# -- a few rows per request ---------------------------------------------------------------------


@each_type
@each_mode
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("starts", "rows"),
    [([0], 1), ([15, 16, 17], 1), ([0, 63], 16), ([256], 5)],
    ids=str,
)
def test_ragged_lengths_at_the_edges_of_pages_tiles_and_splits_equal_torch(
    starts: list[int], rows: int, causal: bool, mode: Mode, dtype: torch.dtype
) -> None:
    case = paged(starts, rows, causal=causal, dtype=dtype)
    assert_equals_reference(decode(case, mode), case)


@each_mode
def test_lengths_in_every_tier_of_split_sizes_equal_torch(mode: Mode) -> None:
    case = paged([4350], 3, heads=2, kv_heads=1)
    assert_equals_reference(decode(case, mode), case)


@pytest.mark.gpu
@each_mode
@pytest.mark.parametrize("window", [None, 3000])
def test_long_contexts_equal_torch(mode: Mode, window: int | None) -> None:
    case = paged([8191, 20000, 100, 12288], 16, window=window)
    assert_equals_reference(decode(case, mode), case)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_groups_of_query_heads_share_a_key_head(group: int) -> None:
    case = paged([70], 3, heads=2 * group, kv_heads=2)
    assert_equals_reference(run(case), case)


@each_mode
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256, 512])
def test_heads_of_any_width_equal_torch(head_dim: int, mode: Mode) -> None:
    case = paged([90], 4, heads=2, kv_heads=1, head_dim=head_dim)
    assert_equals_reference(decode(case, mode), case)


@pytest.mark.parametrize("page", [8, 32, 128])
def test_pages_of_any_power_of_two_equal_torch(page: int) -> None:
    case = paged([130, 7], 2, page=page)
    assert_equals_reference(run(case), case)


@each_mode
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows_hide_keys_far_behind_a_row(window: int, causal: bool, mode: Mode) -> None:
    case = paged([200, 2], 5, window=window, causal=causal)
    assert_equals_reference(decode(case, mode), case)


def test_keys_that_no_window_shows_are_not_read() -> None:
    case = paged([330], 2, window=16)
    expected = run(case)
    case.keys[case.view.page_table[0, :15]] = math.nan
    case.values[case.view.page_table[0, :15]] = math.nan
    assert torch.equal(run(case), expected)


def test_more_packed_rows_than_a_tile_equal_torch() -> None:
    case = paged([40], FEW_ROWS, heads=4, kv_heads=1)
    assert_equals_reference(run(case), case)


def test_a_row_that_holds_nan_spoils_only_its_own_request() -> None:
    case = paged([100, 50], 2)
    clean = run(case)
    case.query[0, 1] = math.nan
    out = run(case)
    assert out[0, 1].isnan().all()
    assert torch.equal(out[0, 0], clean[0, 0])
    assert torch.equal(out[1], clean[1])


def test_pages_are_read_in_place_from_one_layer_of_the_pool() -> None:
    case = paged([33], 2)
    assert case.keys._base is case.values._base  # views; the pool holds NaN everywhere else
    assert run(case).isfinite().all()


@each_mode
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("row_tile", [16, 32, 64])
def test_weights_added_by_products_with_ones_equal_torch(
    row_tile: int, window: int | None, mode: Mode
) -> None:
    case = paged([300, 62], 3, page=64, window=window, dtype=HALF)
    tiles = DecodeTiles(row_tile, 64, 64, sums="products")
    assert_equals_reference(decode(case, mode, tiles=tiles), case)


@pytest.mark.parametrize("sums", ["lanes", "products"])
def test_prompts_may_add_weights_in_either_way(sums: Sums) -> None:
    case = paged([20, 3], 35, dtype=HALF)
    tiles = dataclasses.replace(prefill_tiles(64, HALF), row_tile=64, warps=4, sums=sums)
    with kernels():
        out = prefill_attention(case.query, case.keys, case.values, case.view, tiles=tiles)
    assert_equals_reference(out, case)


# -- many rows ----------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_prompts_over_a_paged_prefix_equal_torch(
    causal: bool, window: int | None, dtype: torch.dtype
) -> None:
    case = paged([0, 71], 37, causal=causal, window=window, dtype=dtype)
    assert_equals_reference(run(case), case)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 1, 96), (5, 1, 64), (2, 2, 256), (2, 1, 512)]
)
def test_prompts_with_heads_of_any_shape_equal_torch(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    case = paged([20], 35, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    assert_equals_reference(run(case), case)


@each_type
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [[3], [40, 1, 17], [0, 33, 0, 64, 2]], ids=str)
def test_prompts_of_unequal_length_share_a_call(
    rows: list[int], window: int | None, dtype: torch.dtype
) -> None:
    case = paged([19, 0, 5, 16, 90][: len(rows)], rows, window=window, dtype=dtype)
    assert_equals_reference(run(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[1024] * 8, [1, 700, 129, 2048, 64], [8192]], ids=str)
def test_long_prompts_equal_torch(rows: list[int]) -> None:
    starts = [100 * i for i in range(len(rows))]
    case = paged(starts, rows, heads=8, head_dim=128)
    assert_equals_reference(run(case), case)


# -- reference and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_the_reference_shows_exactly_the_keys_of_the_window(causal: bool) -> None:
    case = paged([40], 4, heads=2, window=7, causal=causal, dtype=torch.float32)
    out = case.reference()
    slots = [case.view.page_table[0, k // 16].item() * 16 + k % 16 for k in range(44)]
    keys, values = (p.cpu().flatten(0, 1)[slots] for p in (case.keys, case.values))
    for row in range(4):
        seen = slice(40 + row - 6, 40 + row + 1 if causal else 44)
        for head in range(2):
            score = keys[seen, head] @ case.query[0, row, head].cpu() / math.sqrt(64)
            expected = torch.softmax(score, 0) @ values[seen, head]
            assert (out[0, row, head] - expected).abs().max() < 1e-5


def test_the_reference_takes_each_request_of_a_ragged_view_on_its_own() -> None:
    case = paged([5, 0, 33], [4, 0, 7], window=12)
    out = case.reference()
    for request, (first, count) in enumerate(((0, 4), (4, 0), (4, 7))):
        if not count:
            continue
        view = dataclasses.replace(
            case.view,
            page_table=case.view.page_table[request : request + 1],
            start=case.view.start[request : request + 1],
            rows=count,
            row_starts=None,
        )
        query = case.query[None, first : first + count]
        alone = dataclasses.replace(case, query=query, view=view).reference()
        assert (out[first : first + count] - alone[0]).abs().max() < 1e-6


def test_split_counts_follow_the_tiers_of_split_sizes() -> None:
    lengths = [1, 256, 257, 1024, 1025, 4096, 4097, 8192, 8193, 10240, 10241, 32768]
    assert [split_count(n) for n in lengths] == [1, 1, 2, 4, 5, 10, 11, 14, 15, 15, 16, 26]


@pytest.mark.parametrize("page_size", [0, 1, 4, 12, 24, 48])
def test_pages_the_kernels_cannot_read_are_refused(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size is {page_size}; .* power of two"):
        check_page_size(page_size)


def test_pages_and_heads_the_kernels_can_read_pass() -> None:
    for page_size in (8, 16, 64, 1024):
        check_page_size(page_size)
    for head_dim in (64, 96, 128, 256, 512):
        check_heads(16, 2, head_dim)


@pytest.mark.parametrize(("heads", "head_dim"), [(9, 64), (8, 12), (8, 576), (8, 8)])
def test_heads_the_kernels_cannot_serve_are_refused(heads: int, head_dim: int) -> None:
    with pytest.raises(ConfigError):
        check_heads(heads, 2, head_dim)


def test_the_tests_run_where_they_say() -> None:
    assert DEVICE.type == ("cuda" if torch.cuda.is_available() else "cpu")
