"""Products through the copy engine, in one part or several, and which go to the library.

Without a GPU the kernels run in Triton's interpreter, in float32 and at small sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import linear as reference
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear as gpu
from dflash_serve.kernels.gpu import linear_large, linear_parts, linear_policy, tiles
from dflash_serve.kernels.gpu.tiles import Mode, Tile
from tests.kernels.linear_cases import (
    CUDA,
    DEVICE,
    EPS,
    QWEN,
    TYPES,
    Case,
    close,
    rand,
    through_triton,
)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with through_triton():
        yield


@pytest.fixture
def _policy() -> Iterator[None]:
    before = linear_policy.policy().row_invariant
    yield
    reference.set_row_invariant(before)


@pytest.mark.usefixtures("_policy")
def test_the_library_takes_65_to_128_rows_only_where_rows_may_differ() -> None:
    for shape in [*QWEN.values(), (576, 576)]:
        for kept in (True, False):
            reference.set_row_invariant(kept)
            found = [linear_policy.use_library(n, shape) for n in (1, 64, 65, 128)]
            expected = not kept and shape not in linear_policy.OWN_FASTER
            assert found == [False, False, expected, expected]


@pytest.mark.usefixtures("_policy")
def test_the_products_are_right_where_rows_may_differ() -> None:
    reference.set_row_invariant(False)
    for dtype in TYPES:
        case = Case(70, 48, 96, dtype)
        x, weight, norm, residual = case.x, case.weight, case.norm, case.residual
        assert close(reference.linear(x, weight, torch.float32), case.plain())
        assert close(reference.linear_add(x, weight, residual), case.plain() + residual.double())
        assert close(reference.norm_linear(x, norm, EPS, weight), case.normed())
        assert close(reference.norm_gated(x, norm, EPS, weight), case.gated(), scale=2)


def test_more_rows_than_are_invariant_go_to_whatever_was_measured_faster() -> None:
    measured = (129, 192, 256, 384, 512, 768, 1024, 1536, 2048, 8192)
    own = {
        name: {n for n in measured if not linear_policy.use_library(n, shape)}
        for name, shape in QWEN.items()
    }
    assert own == {
        "qkv": {2048, 8192},
        "o": {384, 512, 1024, 2048, 8192},
        "gate_up": set(),
        "down": {192, 1024},
        "head": set(),
        "fc": {1024, 2048},
        "draft_kv": {2048, 8192},
    }
    around = (336, 337, 384, 385, 448, 449, 512, 513)
    found = [n for n in around if not linear_policy.use_library(n, (4096, 4096))]
    assert found == [337, 384, 449, 512]
    assert linear_policy.use_library(512, (4096, 4096), torch.float32)


def test_a_measured_tile_of_many_rows_divides_its_product_and_fits_a_processor() -> None:
    for (_, depth, rows), tile in tiles.MANY_TILES.items():
        assert rows > tiles.INVARIANT_ROWS
        linear_parts.check_parts(depth, tile)
        assert tiles.shared_bytes(tile, torch.bfloat16) + 32 * 1024 <= tiles.SHARED_BYTES


def _tile(parts: int) -> Tile:
    mode: Mode = "spread" if parts > 1 else "copy"
    return Tile(64, 32, 32, 4, 3, parts, mode) if CUDA else Tile(16, 32, 16, 4, 3, parts, mode)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (21, 72), (35, 40)])
def test_the_copy_engine_gives_every_product(rows: int, columns: int, parts: int) -> None:
    for dtype in TYPES:
        case = Case(rows, columns, 192, dtype)
        x, weight = case.x, case.weight
        # Twice, since the counters must be back at zero.
        for _ in range(2):
            out = gpu.product(x, weight, _tile(parts), residual=case.residual)
            assert close(out, case.plain() + case.residual.double())
        out = gpu.product(x, weight, _tile(parts), out_dtype=torch.float32)
        assert out.dtype == torch.float32
        assert close(out, case.plain())
        out = gpu.product(x, weight, _tile(parts), gated=True)
        assert close(out, silu_mul(case.plain()), scale=2)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (21, 72), (35, 40), (35, 96)])
def test_more_columns_of_a_tile_give_the_bits_of_few(rows: int, columns: int) -> None:
    few = _tile(1)
    wider = dataclasses.replace(few, more=16)
    for dtype in TYPES:
        case = Case(rows, columns, 72, dtype)
        assert close(gpu.product(case.x, case.weight, wider), case.plain())
        for options in ({}, {"residual": case.residual}, {"gated": True}):
            out = gpu.product(case.x, case.weight, wider, **options)
            assert torch.equal(out, gpu.product(case.x, case.weight, few, **options))


@pytest.mark.parametrize(("mode", "parts"), [("", 1), ("spread", 2)])
def test_more_columns_without_a_kernel_for_them_are_refused(mode: Mode, parts: int) -> None:
    with pytest.raises(ConfigError, match="16 more columns"):
        gpu.product(rand(2, 64), rand(8, 64), Tile(16, 16, 32, 4, 2, parts, mode, more=16))


def test_k_need_not_be_whole_steps_in_one_part() -> None:
    for dtype in TYPES:
        case = Case(5, 40, 72, dtype)
        assert close(gpu.product(case.x, case.weight, _tile(1)), case.plain())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_are_summed_on_their_own_and_then_in_their_order(
    parts: int, dtype: torch.dtype
) -> None:
    case = Case(21, 72, 192, dtype)
    tile = _tile(parts)
    alone = dataclasses.replace(tile, parts=1, mode="copy")
    pieces = zip(case.x.chunk(parts, 1), case.weight.chunk(parts, 1), strict=True)
    expected = torch.zeros(21, 72, device=DEVICE)
    for x, weight in pieces:
        expected += gpu.product(x, weight.contiguous(), alone, out_dtype=torch.float32)
    out = gpu.product(case.x, case.weight, tile, out_dtype=torch.float32)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_that_the_copy_engine_cannot_address_are_copied(parts: int) -> None:
    case = Case(6, 40, 64, TYPES[-1])
    wide = rand(6, 65, seed=9, dtype=TYPES[-1])
    wide[:, 1:] = case.x
    out = gpu.product(wide[:, 1:], case.weight, _tile(parts))
    assert torch.equal(out, gpu.product(case.x, case.weight, _tile(parts)))


@pytest.mark.parametrize("product", [gpu.product, linear_large.product], ids=["few", "large"])
def test_a_k_that_the_copy_engine_cannot_address_is_refused(
    product: Callable[[Tensor, Tensor, Tile], Tensor],
) -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        product(rand(4, 63), rand(8, 63), _tile(1))


def test_parts_that_are_no_whole_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="K = 96 in 2 parts of steps of 32"):
        gpu.product(rand(2, 96), rand(8, 96), Tile(16, 16, 32, 4, 2, 2, "spread"))


@pytest.mark.parametrize("mode", ["", "copy"])
def test_parts_that_one_program_would_sum_are_refused(mode: Mode) -> None:
    with pytest.raises(ConfigError, match="spread"):
        gpu.product(rand(2, 64), rand(8, 64), Tile(16, 16, 32, 4, 2, 2, mode))


def test_counters_that_a_graph_would_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="before capturing"):
        linear_parts._counters.__wrapped__(torch.device("cuda"))


def test_a_shape_has_one_number_of_parts() -> None:
    for table in (tiles.TILES, tiles.GATED_TILES):
        for (columns, depth, _), tile in table.items():
            linear_parts.check_parts(depth, tile, gated=table is tiles.GATED_TILES)
            parts = {t.parts for (n, k, _), t in table.items() if (n, k) == (columns, depth)}
            assert len(parts) == 1
            # The rule for row counts above the largest entry knows one part.
            assert (columns, depth, tiles.INVARIANT_ROWS) in table or parts == {1}


def test_a_row_count_without_a_tile_takes_the_next_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {
        (40, 64, 16): Tile(16, 16, 32, 4, 2, 2, "spread"),
        (40, 64, 128): Tile(64, 16, 32, 4, 2, 2, "spread"),
    }
    monkeypatch.setattr(tiles, "TILES", entries)
    for rows, tile_rows in ((1, 16), (16, 16), (17, 64), (64, 64), (128, 64)):
        tile = tiles.tile_for(40, 64, rows, torch.bfloat16)
        assert (tile.rows, tile.parts) == (tile_rows, 2)
    assert tiles.tile_for(40, 64, 17, torch.float32).parts == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "parts"), [("qkv", 2), ("o", 4), ("gate_up", 2), ("down", 2), ("fc", 2)]
)
def test_the_bits_of_a_row_do_not_depend_on_the_tile_of_its_parts(name: str, parts: int) -> None:
    """At 1 to 128 rows in bfloat16; sixteen times, to give a race a chance."""
    case = Case(128, *QWEN[name], torch.bfloat16)
    shapes = [
        Tile(16, 32, 256, 4, 3, parts, "spread"),
        Tile(16, 64, 128, 4, 4, parts, "spread"),
        Tile(64, 64, 128, 4, 3, parts, "spread"),
        Tile(128, 64, 64, 4, 4, parts, "spread"),
        Tile(128, 128, 64, 8, 3, parts, "spread"),
    ]
    gated = name == "gate_up"

    def run(rows: int, tile: Tile) -> Tensor:
        residual = None if gated else case.residual[:rows]
        return gpu.product(case.x[:rows], case.weight, tile, residual=residual, gated=gated)

    most = run(128, shapes[0])
    for tile in shapes:
        for rows in (1, 16, 50, 128):
            for _ in range(16):
                assert torch.equal(run(rows, tile), most[:rows]), (tile, rows)
