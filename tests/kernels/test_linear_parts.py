"""K in parts on programs of their own, and which products go to the library.

Without a GPU the kernels run in Triton's interpreter, in float32 and at small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import linear as reference
from dflash_serve.kernels.gpu import linear as gpu
from dflash_serve.kernels.gpu import linear_parts, linear_policy, tiles
from dflash_serve.kernels.gpu.tiles import Mode, Tile
from tests.kernels.linear_cases import CUDA, EPS, QWEN, TYPES, Case, close, rand, through_triton


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
    assert linear_policy.use_library(129, (4096, 4096))
    assert not linear_policy.use_library(512, (4096, 4096))
    assert not linear_policy.use_library(449, (4096, 4096))
    assert linear_policy.use_library(448, (4096, 4096))
    assert linear_policy.use_library(513, (4096, 4096))
    assert linear_policy.use_library(512, (4096, 4096), torch.float32)
    assert linear_policy.use_library(512, (4096, 4096), gated=True)
    assert linear_policy.use_library(512, (6144, 4096))


PARTS: list[tuple[int, Mode]] = [(1, "copy"), (2, ""), (3, "copy"), (1, "spread"), (3, "spread")]


@pytest.mark.parametrize(("parts", "mode"), PARTS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (21, 72), (35, 40)])
def test_k_in_parts_gives_every_product(rows: int, columns: int, parts: int, mode: Mode) -> None:
    tile = Tile(16, 32, 16, 4, 3, parts, mode)
    if CUDA:
        tile = Tile(64, 32, 32, 4, 3, parts, mode)
    for dtype in TYPES:
        case = Case(rows, columns, 192, dtype)
        x, weight = case.x, case.weight
        # Twice, since the counters must be back at zero.
        for _ in range(2):
            out = gpu.product(x, weight, tile, residual=case.residual)
            assert close(out, case.plain() + case.residual.double())
        out = gpu.product(x, weight, tile, out_dtype=torch.float32)
        assert out.dtype == torch.float32
        assert close(out, case.plain())
        out = gpu.product(x, weight, tile, norm=case.norm, eps=EPS, gated=True)
        assert close(out, case.gated(), scale=2)


def test_the_bits_of_a_part_do_not_depend_on_which_program_sums_it() -> None:
    case = Case(21, 72, 192, torch.float32)
    for gated in (False, True):
        outs = [
            gpu.product(
                case.x, case.weight, Tile(16, 32, 32, 4, 3, 3, mode), norm=case.norm, gated=gated
            )
            for mode in ("", "copy", "spread")
        ]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


def test_parts_that_are_no_whole_steps_are_refused() -> None:
    for mode in ("", "copy", "spread"):
        with pytest.raises(ConfigError, match="K = 96 in 2 parts of steps of 32"):
            gpu.product(rand(2, 96), rand(8, 96), Tile(16, 16, 32, 4, 2, 2, mode))


def test_a_norm_that_rounds_differently_is_refused_by_tiles_with_a_mode() -> None:
    tile = Tile(16, 16, 32, 4, 2, 1, "copy")
    with pytest.raises(ConfigError, match="loop"):
        gpu.product(rand(2, 64), rand(8, 64), tile, norm=rand(64), fold="loop")


def test_a_shape_has_one_number_of_parts() -> None:
    for table in (tiles.TILES, tiles.GATED_TILES):
        for (columns, depth, _), tile in table.items():
            linear_parts.check_parts(depth, tile)
            parts = {t.parts for (n, k, _), t in table.items() if (n, k) == (columns, depth)}
            assert len(parts) == 1
            # The rule for row counts above the largest entry knows one part.
            assert (columns, depth, tiles.INVARIANT_ROWS) in table or parts == {1}


def test_a_row_count_without_a_tile_takes_the_next_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {(40, 64, 16): Tile(16, 16, 32, 4, 2, 2), (40, 64, 128): Tile(64, 16, 32, 4, 2, 2)}
    monkeypatch.setattr(tiles, "TILES", entries)
    for rows, tile_rows in ((1, 16), (16, 16), (17, 64), (64, 64), (128, 64)):
        tile = tiles.tile_for(40, 64, rows, torch.bfloat16)
        assert (tile.rows, tile.parts) == (tile_rows, 2)
    assert tiles.tile_for(40, 64, 17, torch.float32).parts == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "parts"), [("qkv", 2), ("o", 4), ("gate_up", 2), ("down", 4), ("fc", 4)]
)
def test_the_bits_of_a_row_do_not_depend_on_where_the_parts_are_summed(
    name: str, parts: int
) -> None:
    """At 1 to 128 rows in bfloat16; sixteen times, to give a race a chance."""
    case = Case(128, *QWEN[name], torch.bfloat16)
    shapes = [
        Tile(16, 32, 128, 4, 4, parts),
        Tile(16, 32, 256, 4, 3, parts, "copy"),
        Tile(16, 64, 128, 4, 4, parts, "spread"),
        Tile(64, 32, 128, 4, 4, parts),
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
            for _ in range(16 if tile.mode == "spread" else 1):
                assert torch.equal(run(rows, tile), most[:rows]), (tile, rows)
