"""What the bits of a row of attention may not depend on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.attention import attend
from dflash_serve.kernels.gpu.attention import (
    FEW_ROWS,
    DecodeTiles,
    Merge,
    Mode,
    decode_attention,
    decode_tiles,
)
from tests.kernels.paging import DEVICE, kernels, paged
from tests.kernels.test_attention import (
    MODES,
    assert_equals_reference,
    decode,
    each_mode,
    each_type,
    run,
)

MERGES: list[Merge] = ["launch", "last"]


@each_type
@pytest.mark.parametrize("window", [None, 150])
def test_both_modes_and_any_number_of_programs_give_the_same_bits(
    window: int | None, dtype: torch.dtype
) -> None:
    case = paged([800, 300], 3, heads=2, kv_heads=1, window=window, dtype=dtype)
    expected = decode(case, "whole")
    for programs in (1, 3, 100):
        assert torch.equal(decode(case, "split", programs), expected)


@each_type
@pytest.mark.parametrize("window", [None, 150])
def test_splits_merged_by_the_last_program_have_the_same_bits(
    window: int | None, dtype: torch.dtype
) -> None:
    case = paged([300, 0, 130], 5, heads=8, kv_heads=2, window=window, dtype=dtype)
    expected = decode(case, "split", merge="launch")
    for programs in (1, 2, 100):  # again and again, since every call leaves its counters zero
        assert torch.equal(decode(case, "split", programs, merge="last"), expected)


def test_the_last_program_merges_values_in_slices() -> None:
    case = paged([140], 9, heads=8, kv_heads=1, head_dim=256)
    expected = decode(case, "split", merge="launch")
    assert torch.equal(decode(case, "split", merge="last"), expected)


def test_more_row_tiles_than_counters_are_refused() -> None:
    case = paged([0], 1, heads=2)
    view = dataclasses.replace(case.view, page_table=case.view.page_table.expand(40000, -1))
    query = case.query.expand(40000, -1, -1, -1)
    with kernels(), pytest.raises(ConfigError, match="merge 'last' with 80000 row tiles"):
        decode_attention(query, case.keys, case.values, view, mode="split", merge="last")


@each_mode
@pytest.mark.parametrize("size", [0, 1 << 30])
def test_prefetching_changes_no_bit(size: int, mode: Mode) -> None:
    case = paged([300, 40], 2)
    weight = torch.randn((96, 256), device=DEVICE).to(case.query.dtype)
    expected = decode(case, mode)
    for merge in MERGES:
        out = decode(case, mode, merge=merge, prefetch=weight, prefetch_bytes=size)
        assert torch.equal(out, expected)
    with kernels():
        out = attend(case.query, case.keys, case.values, case.view, weight)
    assert torch.equal(out, run(case))


def test_masks_on_every_tile_change_no_bit() -> None:
    for window in (None, 150):
        case = paged([300, 40], 3, window=window)
        tiles = decode_tiles(64, case.query.dtype, 6)
        expected = decode(case, "whole", tiles=tiles)
        tiles = dataclasses.replace(tiles, one_loop=True)
        assert torch.equal(decode(case, "whole", tiles=tiles), expected)


@each_mode
@pytest.mark.parametrize("fine", [64, 256])
def test_splits_of_other_sizes_equal_torch(fine: int, mode: Mode) -> None:
    case = paged([1100], 2, heads=2, kv_heads=1)
    tiles = dataclasses.replace(decode_tiles(64, case.query.dtype, 4), fine=fine, coarse=2048)
    assert_equals_reference(decode(case, mode, tiles=tiles), case)


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
@pytest.mark.parametrize("rows", [1, 16])
def test_replays_merged_by_the_last_program_never_differ(rows: int) -> None:
    case = paged([(517 * i) % 3000 for i in range(15)], rows, heads=32, kv_heads=8, head_dim=128)
    weight = torch.randn((4096, 4096), device=DEVICE).to(case.query.dtype)
    expected = decode(case, "whole")
    assert torch.equal(decode(case, "split", merge="last"), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [decode(case, "split", merge="last", prefetch=weight) for _ in range(20)]
    for _ in range(50):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


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


DOT_TILES = [
    DecodeTiles(16, 32, 128, 1, 3),
    DecodeTiles(16, 32, 128, 4, 3),
    DecodeTiles(32, 32, 128, 2, 3),
    DecodeTiles(64, 32, 128, 4, 5),
    DecodeTiles(128, 32, 128, 8, 3),
    DecodeTiles(16, 64, 128, 1, 3),
    DecodeTiles(16, 64, 128, 2, 3),
    DecodeTiles(16, 64, 128, 4, 3),
    DecodeTiles(32, 64, 128, 2, 3),
    DecodeTiles(64, 64, 128, 4, 2),
    DecodeTiles(128, 64, 128, 8, 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles", DOT_TILES, ids=lambda t: f"{t.row_tile}x{t.key_tile} {t.warps} warps {t.stages} stages"
)
def test_sums_through_the_dot_product_do_not_depend_on_the_row_tile(tiles: DecodeTiles) -> None:
    """Against 64 rows with the same key tile, which row bits do depend on."""
    case = paged([1500, 300], 16, heads=8, head_dim=128)
    usual = DecodeTiles(64, tiles.key_tile, 128, sum_by_dot=True)
    expected = decode(case, "whole", tiles=usual)
    for mode in MODES:
        out = decode(case, mode, tiles=dataclasses.replace(tiles, sum_by_dot=True))
        different = int((out != expected).sum())
        assert not different, f"{different} of {out.numel()} elements, mode {mode}"


@pytest.mark.gpu
@pytest.mark.parametrize("key_tile", [32, 64])
@pytest.mark.parametrize(("row_tile", "warps"), [(16, 1), (32, 2), (128, 8)])
def test_tiles_of_16_rows_a_warp_give_the_same_bits(
    row_tile: int, warps: int, key_tile: int
) -> None:
    """Plain sums too: every warp then holds 16 rows whole, in the layout of 64 rows."""
    case = paged([1500, 300], 16, heads=8, head_dim=128)
    expected = decode(case, "whole", tiles=DecodeTiles(64, key_tile, 128))
    tiles = DecodeTiles(row_tile, key_tile, 128, warps)
    for mode in MODES:
        out = decode(case, mode, tiles=tiles)
        different = int((out != expected).sum())
        assert not different, f"{different} of {out.numel()} elements, mode {mode}"


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
