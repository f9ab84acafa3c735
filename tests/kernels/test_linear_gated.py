"""Gate and up in one product: with many rows, with few, and what goes through which kernel.

Without a GPU the kernels run in Triton's interpreter, in float32 and at small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import linear as reference
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear as gpu
from dflash_serve.kernels.gpu import linear_large, tiles
from dflash_serve.kernels.gpu.tiles import Mode, Tile
from tests.kernels.linear_cases import (
    CUDA,
    QWEN,
    TYPES,
    Case,
    activated,
    close,
    rand,
    through_triton,
)

SMALL_TILES = [Tile(64, 32, 32, 4, 2), Tile(32, 64, 32, 4, 2, group=2)]
# The tiles of tensor cores are of two-byte operands: of float32 they fit in no processor.
LARGE = {torch.float32: SMALL_TILES, torch.bfloat16: SMALL_TILES}
# (rows, N, K): 129, 200 and 257 rows, I = 40, 17 and 52 (no multiple of a tile; 17 of no copy).
AWKWARD = [(129, 80, 72), (200, 34, 40), (257, 104, 64), (1, 2, 16)]
if CUDA:
    LARGE[torch.bfloat16] = [
        Tile(128, 256, 64, 8, 4),
        Tile(128, 256, 64, 8, 3, group=4),
        Tile(256, 128, 64, 8, 4),
        Tile(64, 256, 64, 4, 5),
        Tile(128, 128, 64, 4, 6),
    ]
    AWKWARD += [(257, 1000, 576), (1025, 776, 136), (513, 98, 64), (200, 24576, 4096)]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with through_triton():
        yield


@pytest.mark.parametrize(
    ("dtype", "tile"), [(dtype, tile) for dtype in TYPES for tile in LARGE[dtype]], ids=str
)
@pytest.mark.parametrize(("rows", "columns", "depth"), AWKWARD, ids=str)
def test_the_large_gated_product_covers_awkward_shapes(
    rows: int, columns: int, depth: int, dtype: torch.dtype, tile: Tile
) -> None:
    case = Case(rows, columns, depth, dtype)
    out = linear_large.product(case.x, case.weight, tile, gated=True)
    assert out.shape == (rows, columns // 2)
    assert out.dtype == dtype
    assert close(out, activated(case.plain()), scale=2)


def test_a_gated_row_of_many_rounds_as_the_kernel_after_a_product_does() -> None:
    """Values whose sums are exact, so that only the roundings after them can differ."""
    for dtype in TYPES:
        x = (rand(150, 64, seed=1).mul(4).round() / 4).to(dtype)
        weight = (rand(48, 64, seed=2).mul(4).round() / 4).to(dtype)
        for tile in LARGE[dtype]:
            expected = silu_mul(linear_large.product(x, weight, tile))
            out = linear_large.product(x, weight, tile, gated=True)
            assert torch.equal(out, expected), tile


def test_a_gated_row_of_many_does_not_depend_on_the_others() -> None:
    case = Case(200, 80, 64, TYPES[-1])
    for tile in LARGE[TYPES[-1]]:
        most = linear_large.product(case.x, case.weight, tile, gated=True)
        for rows in (1, 129, 199):
            out = linear_large.product(case.x[:rows], case.weight, tile, gated=True)
            assert torch.equal(out, most[:rows]), (tile, rows)


@pytest.mark.parametrize("columns", [72, 80])
@pytest.mark.parametrize(("mode", "parts"), [("", 1), ("copy", 1), ("spread", 2)])
def test_gate_and_up_in_one_product_of_few_rows_give_the_bits_of_two(
    mode: Mode, parts: int, columns: int
) -> None:
    apart = Tile(64, 32, 32, 4, 3, parts, mode) if CUDA else Tile(16, 16, 16, 4, 2, parts, mode)
    joint = apart.joined()
    for dtype in TYPES:
        case = Case(35, columns, 128, dtype)
        out = gpu.product(case.x, case.weight, joint, gated=True)
        assert close(out, activated(case.plain()), scale=2)
        assert torch.equal(out, gpu.product(case.x, case.weight, apart, gated=True))


def test_more_columns_may_be_joint_too() -> None:
    joint = Tile(64, 64, 32, 4, 3, 1, "copy", more=32, joint=True)
    for dtype in TYPES:
        case = Case(35, 136, 72, dtype)
        out = gpu.product(case.x, case.weight, joint, gated=True)
        assert close(out, activated(case.plain()), scale=2)


def test_a_joint_tile_without_gate_and_up_is_refused() -> None:
    with pytest.raises(ConfigError, match="joins gate and up"):
        gpu.product(rand(2, 64), rand(8, 64), Tile(16, 16, 32, 4, 2, joint=True))


@pytest.mark.parametrize("found", [True, False], ids=["entry", "no entry"])
def test_many_rows_are_activated_inside_where_an_entry_says_so(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    calls: list[bool] = []

    def table(columns: int, depth: int, rows: int, _: torch.dtype, *, gated: bool) -> Tile | None:
        asked.append((columns, depth, rows))
        assert gated
        return SMALL_TILES[0] if found else None

    def product(x: Tensor, weight: Tensor, tile: Tile, *, gated: bool) -> Tensor:
        calls.append(gated)
        return plain(x, weight, tile, gated=gated)

    plain = linear_large.product
    monkeypatch.setattr(gpu, "large_tile", table)
    monkeypatch.setattr(linear_large, "product", product)
    case = Case(150, 72, 136, TYPES[-1])
    out = reference.gated_linear(case.x, case.weight)
    assert close(out, activated(case.plain()), scale=2)
    assert asked == [(72, 136, 150)]
    assert calls == [True] * found


def test_an_entry_for_gate_and_up_is_of_the_table_with_the_activation_inside() -> None:
    columns, depth = QWEN["gate_up"]
    for (n, k, rows), tile in tiles.MANY_GATED.items():
        assert (n, k) == (columns, depth)
        assert rows > tiles.INVARIANT_ROWS
        assert (tile.mode, tile.parts) == ("", 1)
        assert tiles.large_tile(n, k, rows, torch.bfloat16, gated=True) == tile
        # What is stored at the end of a tile takes as much as without the activation.
        assert tiles.shared_bytes(tile, torch.bfloat16) + 32 * 1024 <= tiles.SHARED_BYTES
    assert tiles.large_tile(columns, depth, 2048, torch.float32, gated=True) is None
    assert tiles.large_tile(columns // 2, depth, 2048, torch.bfloat16, gated=True) is None


@pytest.mark.gpu
def test_the_large_gated_product_has_the_bits_of_the_small_one() -> None:
    """At 1, 128, 129, 257 and 512 rows in bfloat16."""
    case = Case(512, *QWEN["gate_up"], torch.bfloat16)
    few = gpu.product(case.x[:128], case.weight, Tile(64, 64, 128, 4, 3), gated=True)
    for tile in LARGE[torch.bfloat16]:
        for rows in (1, 128, 129, 257, 512):
            out = linear_large.product(case.x[:rows], case.weight, tile, gated=True)
            assert torch.equal(out[:128], few[:rows]), (tile, rows)


@pytest.mark.gpu
def test_gate_and_up_in_one_product_have_the_bits_of_two() -> None:
    """At 1 to 128 rows in bfloat16, with the tiles of the table."""
    columns, depth = QWEN["gate_up"]
    case = Case(128, columns, depth, torch.bfloat16)
    for rows in (1, 16, 32, 64, 128):
        apart = tiles.tile_for(columns, depth, rows, torch.bfloat16, gated=True)
        out = gpu.product(case.x[:rows], case.weight, apart.joined(), gated=True)
        assert torch.equal(out, gpu.product(case.x[:rows], case.weight, apart, gated=True)), rows
