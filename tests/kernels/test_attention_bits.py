"""What the bits of a row of attention may not depend on."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.kernels.gpu import attention
from dflash_serve.kernels.gpu.attention import (
    FEW_ROWS,
    DecodeTiles,
    Mode,
    Sharing,
    decode_tiles,
    share,
)
from dflash_serve.kernels.gpu.attention_splits import split_count
from tests.kernels.paging import paged
from tests.kernels.test_attention import decode, each_mode, each_type, run


@each_type
@pytest.mark.parametrize("window", [None, 150])
def test_both_modes_and_any_number_of_programs_give_the_same_bits(
    window: int | None, dtype: torch.dtype
) -> None:
    case = paged([800, 300], 3, heads=2, kv_heads=1, window=window, dtype=dtype)
    expected = decode(case, "whole")
    for programs in (1, 2, 3, 5, 100):
        assert torch.equal(decode(case, "split", programs), expected), programs


@pytest.mark.parametrize("start", [0, 126, 127, 255, 256, 384])
def test_both_modes_give_the_same_bits_at_the_edges_of_splits(start: int) -> None:
    case = paged([start], 2, heads=2, kv_heads=1)
    expected = decode(case, "whole")
    for programs in (1, 2, 100):
        assert torch.equal(decode(case, "split", programs), expected), programs


@each_type
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("window", [None, 150])
def test_requests_of_few_keys_taken_whole_have_the_same_bits(
    window: int | None, slices: int, dtype: torch.dtype
) -> None:
    case = paged([800, 300, 509], 3, page=64, heads=2, kv_heads=1, window=window, dtype=dtype)
    expected = decode(case, "whole")
    for keys in (1, 512, 1024):
        sharing = Sharing("split", 3, keys, slices)
        assert torch.equal(decode(case, "split", sharing=sharing), expected), keys


def test_a_request_of_few_keys_leaves_no_partial_results() -> None:
    case = paged([300, 100], 2)
    scratch = attention._scratch(case.query, 2 * 2 * split_count(320), 2 * 2)
    for part in scratch:
        part.fill_(math.nan)
    with mock.patch.object(attention, "_scratch", return_value=scratch):
        out = decode(case, "split", sharing=Sharing("split", 2, 256))
    parts = scratch[0].view(2, -1)
    assert out.isfinite().all()
    assert parts[1].isnan().all()
    assert not parts[0].isnan().all()


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (1, Sharing("split", 26)),
        (8, Sharing("split", 26)),
        (47, Sharing("split", 5)),
        (64, Sharing("split", 4, 2048, 2)),
        (96, Sharing("split", 2, 2048)),
        (127, Sharing("split", 2, 2048)),
        (128, Sharing("whole", 1)),
    ],
)
def test_the_fewer_pairs_the_more_programs_share_each(pairs: int, expected: Sharing) -> None:
    assert share(pairs, 26, decode_tiles(128, torch.bfloat16, 64)) == expected


def test_more_programs_share_where_more_fit_on_a_processor() -> None:
    tiles = decode_tiles(128, torch.bfloat16, 16)
    assert share(64, 26, tiles) == Sharing("split", 6)
    assert share(64, 5, tiles) == Sharing("split", 5)


@each_mode
@each_type
@pytest.mark.parametrize("value_tile", [32, 64])
@pytest.mark.parametrize("window", [None, 100])
def test_tiles_read_as_boxes_of_a_page_give_the_same_bits(
    window: int | None, value_tile: int, dtype: torch.dtype, mode: Mode
) -> None:
    case = paged([530, 70], 3, page=64, window=window, dtype=dtype)
    tiles = dataclasses.replace(decode_tiles(64, dtype, 6), value_tile=value_tile)
    with mock.patch.object(attention, "TensorDescriptor", wraps=TensorDescriptor) as made:
        with mock.patch.object(attention, "_boxes", return_value=(None, None, None)):
            expected = decode(case, mode, tiles=tiles)
        assert made.call_count == 0
        assert torch.equal(decode(case, mode, tiles=tiles), expected)
        assert made.call_count == 3


@pytest.mark.parametrize(("page", "head_dim"), [(16, 64), (64, 96), (64, 256)])
def test_tiles_that_are_no_box_of_a_page_are_read_as_before(page: int, head_dim: int) -> None:
    case = paged([200], 2, page=page, head_dim=head_dim, heads=2, kv_heads=1)
    with mock.patch.object(attention, "TensorDescriptor", wraps=TensorDescriptor) as made:
        assert torch.equal(decode(case, "split"), decode(case, "whole"))
    assert made.call_count == 0


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("rows", [1, 16, FEW_ROWS])
def test_both_modes_give_the_same_bits_in_every_tier_of_split_sizes(
    rows: int, window: int | None
) -> None:
    starts = [0, 1000, 2040, 5000, 8190, 12300, 16380, 20000, 35000]
    case = paged(starts, rows, heads=8, kv_heads=2, head_dim=128, window=window)
    expected = decode(case, "whole")
    for programs in (1, 4, 33, 200):
        assert torch.equal(decode(case, "split", programs), expected), programs


BIT_SHAPES = [
    (32, 8, 128, None),
    (32, 8, 128, 200),
    (64, 8, 128, None),
    (9, 3, 64, None),
    (12, 2, 96, None),
    (8, 4, 256, None),
    (4, 2, 512, None),
]


@pytest.mark.gpu
@each_mode
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), BIT_SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_a_block(
    heads: int, kv_heads: int, head_dim: int, window: int | None, mode: Mode
) -> None:
    for start in (0, 57, 250, 1015, 2040, 2999):
        case = paged(
            [start],
            FEW_ROWS,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
        )
        block = decode(case, mode)
        for first, count in ((0, 1), (1, 1), (9, 1), (31, 1), (0, 16), (3, 7), (5, 2)):
            part = decode(case.with_rows(first, count), mode)
            assert torch.equal(part[0], block[0, first : first + count]), (start, first, count)


@pytest.mark.gpu
@each_mode
@pytest.mark.parametrize(("page", "window"), [(64, None), (16, None), (64, 200)])
@pytest.mark.parametrize(("row_tile", "warps"), [(16, 1), (16, 2), (16, 4), (32, 4), (128, 8)])
def test_a_row_has_the_same_bits_in_tiles_of_any_height(
    row_tile: int, warps: int, page: int, window: int | None, mode: Mode
) -> None:
    tall = DecodeTiles(64, 64, 128, sums="products")
    tiles = dataclasses.replace(tall, row_tile=row_tile, warps=warps)
    for start in (0, 57, 250, 1015, 1100, 2999):
        case = paged([start], 16, heads=32, kv_heads=8, head_dim=128, page=page, window=window)
        expected = decode(case, "whole", tiles=tall)
        for count in (1, 2, 3, 4, 8, 16):
            for first in {0, 16 - count}:
                part = decode(case.with_rows(first, count), mode, tiles=tiles)
                assert torch.equal(part[0], expected[0, first : first + count]), (start, count)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_a_request_has_the_same_bits_in_any_batch(rows: int) -> None:
    starts = [(37 * i) % 3000 for i in range(512)]
    whole = paged(starts, rows, heads=8, kv_heads=2, head_dim=128)
    expected = run(whole)
    for count in (1, 2, 16, 64, 65, 66, 128, 129):
        view = dataclasses.replace(
            whole.view, page_table=whole.view.page_table[:count], start=whole.view.start[:count]
        )
        some = dataclasses.replace(whole, query=whole.query[:count], view=view)
        assert torch.equal(run(some), expected[:count]), count


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_and_pages_on_the_device() -> None:
    cases = [paged([s, 5], 4, heads=8, head_dim=128) for s in (700, 690)]
    case = cases[0]
    run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case)
    for other in cases:
        case.view.start.copy_(other.view.start)
        case.view.page_table.copy_(other.view.page_table)
        case.keys.copy_(other.keys)
        case.values.copy_(other.values)
        graph.replay()
        assert torch.equal(out, run(other))


@pytest.mark.gpu
def test_a_prompt_has_the_same_bits_alone_in_chunks_and_among_others() -> None:
    case = paged([300, 11, 0], [512, 40, 129], heads=8, head_dim=128)
    together = run(case)[:512]
    view = dataclasses.replace(
        case.view,
        page_table=case.view.page_table[:1],
        start=case.view.start[:1],
        row_starts=None,
        rows=512,
    )
    alone = dataclasses.replace(case, query=case.query[None, :512], view=view)
    assert torch.equal(run(alone)[0], together)
    for first, count in ((0, 64), (64, 129), (193, 319)):
        part = run(alone.with_rows(first, count))
        assert torch.equal(part[0], together[first : first + count])
