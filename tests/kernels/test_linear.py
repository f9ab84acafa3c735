"""The Triton products against the torch functions, and the promise about a row's bits.

Without a GPU the kernels run in Triton's interpreter, in float32 and at small sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels import linear as reference
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear as gpu
from dflash_serve.kernels.gpu import linear_large, linear_policy, tiles
from dflash_serve.kernels.gpu.tiles import Tile
from tests.kernels.linear_cases import CUDA, EPS, QWEN, TYPES, Case, close, rand, through_triton

# (rows, N, K): one row, rows short of a tile, widths and depths that are no multiple of a tile,
# more rows than the fused products take.
SHAPES = [(1, 48, 64), (5, 130, 576), (16, 64, 96), (33, 70, 40), (129, 34, 64)]
if CUDA:
    SHAPES += [(1, 6144, 4096), (16, 4096, 12288), (100, 151936 // 8, 4096), (257, 1000, 576)]

COUNTS = (1, 2, 5, 16, 17, 32, 64, 100, 128)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with through_triton():
        yield


def _columns_first(x: Tensor) -> Tensor:
    """The same values in Fortran order."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES, ids=str)
def test_every_product_equals_its_definition(
    rows: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    case = Case(rows, columns, depth, dtype)
    x, weight, norm, residual = case.x, case.weight, case.norm, case.residual
    assert close(reference.linear(x, weight), case.plain())
    assert close(reference.linear_add(x, weight, residual), case.plain() + residual.double())
    assert close(reference.norm_linear(x, norm, EPS, weight), case.normed())
    assert close(reference.norm_gated(x, norm, EPS, weight), case.gated(), scale=2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tile", [Tile(16, 32, 32, 4, 2), Tile(32, 16, 64, 4, 3)], ids=str)
def test_every_tile_gives_the_same_products(tile: Tile, dtype: torch.dtype) -> None:
    case = Case(21, 72, 80, dtype)
    assert close(gpu.product(case.x, case.weight, tile), case.plain())
    out = gpu.product(case.x, case.weight, tile, residual=case.residual)
    assert close(out, case.plain() + case.residual.double())
    out = gpu.product(case.x, case.weight, tile, gated=True)
    assert close(out, silu_mul(case.plain()), scale=2)


@pytest.mark.parametrize("rows", [3, 130])
def test_float32_can_be_asked_for(rows: int) -> None:
    for dtype in TYPES:
        case = Case(rows, 48, 64, dtype)
        out = reference.linear(case.x, case.weight, torch.float32)
        assert out.dtype == torch.float32
        assert close(out, case.plain())


def test_a_measured_product_of_many_rows_is_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The table holds for types of two bytes, which the interpreter does not multiply.
    for module in (linear_policy, gpu):
        monkeypatch.setattr(module, "large_tile", lambda *_, **__: Tile(64, 32, 32, 4, 2))
    monkeypatch.setattr(torch, "addmm", None)
    monkeypatch.setattr(gpu, "F", None)
    for dtype in TYPES:
        case = Case(150, 72, 136, dtype)
        x, weight, residual = case.x, case.weight, case.residual
        assert close(reference.linear(x, weight), case.plain())
        assert close(reference.linear(x, weight, torch.float32), case.plain())
        assert close(reference.linear_add(x, weight, residual), case.plain() + residual.double())
        assert close(reference.norm_linear(x, case.norm, EPS, weight), case.normed())
        assert close(reference.norm_gated(x, case.norm, EPS, weight), case.gated(), scale=2)


@pytest.mark.parametrize("rows", [3, 130])
def test_only_a_residual_that_is_given_away_may_change(rows: int) -> None:
    for dtype in TYPES:
        case = Case(rows, 48, 64, dtype)
        x, weight = case.x, case.weight
        residual = case.residual.clone()
        kept = reference.linear_add(x, weight, residual)
        assert torch.equal(residual, case.residual)
        out = reference.linear_add(x, weight, residual, consume=True)
        assert torch.equal(out, kept)
        # The library adds to it in place; a product of our own leaves it.
        assert (out.data_ptr() == residual.data_ptr()) == (rows > tiles.INVARIANT_ROWS)


def test_a_measured_product_of_many_rows_may_be_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(64, 32, 32, 4, 2, 2, "spread")
    for module in (linear_policy, gpu):
        monkeypatch.setattr(module, "large_tile", lambda *_, **__: tile)
    monkeypatch.setattr(torch, "addmm", None)
    for dtype in TYPES:
        case = Case(150, 72, 128, dtype)
        out = reference.linear_add(case.x, case.weight, case.residual)
        assert close(out, case.plain() + case.residual.double())


SMALL_TILES = [Tile(16, 32, 32, 4, 2), Tile(32, 16, 32, 4, 2, group=2)]
# The tiles of tensor cores are of two-byte operands: of float32 they fit in no processor.
LARGE = {torch.float32: SMALL_TILES, torch.bfloat16: SMALL_TILES}
if CUDA:
    LARGE[torch.bfloat16] = [
        Tile(64, 32, 32, 4, 2),
        Tile(128, 256, 64, 8, 3),
        Tile(128, 128, 64, 8, 4),
        Tile(256, 128, 64, 8, 3),
        Tile(256, 64, 64, 8, 4, group=2),
    ]

AWKWARD = [(1, 40, 72), (37, 130, 64), (80, 32, 96), (33, 104, 40)]
if CUDA:
    AWKWARD += [(300, 1000, 576), (1025, 776, 136), (513, 98, 64)]


@pytest.mark.parametrize(
    ("dtype", "tile"), [(dtype, tile) for dtype in TYPES for tile in LARGE[dtype]], ids=str
)
@pytest.mark.parametrize(("rows", "columns", "depth"), AWKWARD, ids=str)
def test_the_large_product_covers_awkward_shapes(
    rows: int, columns: int, depth: int, dtype: torch.dtype, tile: Tile
) -> None:
    case = Case(rows, columns, depth, dtype)
    x, weight = case.x, case.weight
    assert close(linear_large.product(x, weight, tile), case.plain())
    out = linear_large.product(x, weight, tile, residual=case.residual)
    assert close(out, case.plain() + case.residual.double())
    out = linear_large.product(x, weight, tile, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert close(out, case.plain())


def test_a_residual_of_a_wider_tensor_is_read_in_place() -> None:
    for dtype in TYPES:
        case = Case(37, 40, 64, dtype)
        wide = rand(37, 56, seed=10, dtype=dtype)
        wide[:, :40] = case.residual
        for tile in LARGE[dtype]:
            out = linear_large.product(case.x, case.weight, tile, residual=wide[:, :40])
            assert torch.equal(
                out, linear_large.product(case.x, case.weight, tile, residual=case.residual)
            )


def test_a_row_of_the_large_product_is_that_of_the_small_one() -> None:
    """Values whose sums are exact, so that only the roundings after them can differ."""
    for dtype in TYPES:
        x = (rand(40, 64, seed=1).mul(4).round() / 4).to(dtype)
        weight = (rand(48, 64, seed=2).mul(4).round() / 4).to(dtype)
        few = gpu.product(x, weight, Tile(16, 16, 32, 4, 2))
        for tile in LARGE[dtype]:
            out = linear_large.product(x, weight, tile)
            assert torch.equal(out, few), tile


def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    case = Case(6, 40, 64, torch.float32)
    wide = rand(6, 96, seed=9)
    wide[:, :64] = case.x
    assert torch.equal(
        reference.linear(wide[:, :64], case.weight), reference.linear(case.x, case.weight)
    )
    residual = rand(6, 56, seed=10)
    residual[:, :40] = case.residual
    assert torch.equal(
        reference.linear_add(case.x, case.weight, residual[:, :40]),
        reference.linear_add(case.x, case.weight, case.residual),
    )


@pytest.mark.parametrize(("rows", "columns"), [(0, 32), (3, 0)])
def test_nothing_to_compute_is_allowed(rows: int, columns: int) -> None:
    out = reference.linear(rand(rows, 64), rand(columns, 64))
    assert out.shape == (rows, columns)


def test_a_nan_stays_in_its_row() -> None:
    case = Case(5, 32, 64, torch.float32)
    clean = reference.norm_gated(case.x, case.norm, EPS, case.weight)
    case.x[2, 7] = float("nan")
    out = reference.norm_gated(case.x, case.norm, EPS, case.weight)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("change_x", "change_weight", "text"),
    [
        (Tensor.double, Tensor.double, "float64"),
        (Tensor.float, Tensor.bfloat16, "bfloat16"),
        (_columns_first, Tensor.float, "strides"),
        (Tensor.float, _columns_first, "strides"),
    ],
    ids=["float64", "mixed", "rows", "weight"],
)
def test_what_cannot_be_multiplied_is_refused(
    change_x: Callable[[Tensor], Tensor], change_weight: Callable[[Tensor], Tensor], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        reference.linear(change_x(rand(2, 64)), change_weight(rand(8, 64)))


def test_every_tile_fits_a_processor() -> None:
    shapes = [*QWEN.values(), (576, 576), (1536, 576), (49152, 576), (100, 60), (64, 5120)]
    for columns, depth in shapes:
        for rows in tiles.ROW_BUCKETS:
            for dtype in (torch.bfloat16, torch.float32):
                for gated in (False, True):
                    tile = tiles.tile_for(columns, depth, rows, dtype, gated=gated)
                    assert tiles.shared_bytes(tile, dtype, gated=gated) <= 227 * 1024
                    assert tile.depth >= 32


def test_the_rule_takes_the_copy_engine_from_64_rows_on_where_it_can_address_the_rows() -> None:
    for gated in (False, True):
        for depth, mode in ((576, "copy"), (1000, "copy"), (60, ""), (1001, "")):
            found = [
                tiles.tile_for(1536, depth, rows, torch.bfloat16, gated=gated) for rows in COUNTS
            ]
            assert {tile.mode for tile in found if tile.rows <= 32} == {""}
            assert {tile.mode for tile in found if tile.rows > 32} == {mode}
            assert {tile.parts for tile in found} == {1}


# -- bits of a row, on the GPU ------------------------------------------------------------------


def same_bits(product: Callable[[int], Tensor], counts: tuple[int, ...]) -> None:
    """A row is the same in every call that has it."""
    most = product(max(counts))
    for count in counts:
        out = product(count)
        different = (out != most[:count]).sum().item()
        assert different == 0, f"{different} of {out.numel()} numbers differ at {count} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("name", QWEN)
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(name: str) -> None:
    """At 1 to 128 rows in bfloat16, with the tiles of the table."""
    case = Case(128, *QWEN[name], torch.bfloat16)
    x, weight, norm, residual = case.x, case.weight, case.norm, case.residual
    if name == "gate_up":
        same_bits(lambda n: reference.norm_gated(x[:n], norm, EPS, weight), COUNTS)
        return
    same_bits(lambda n: reference.linear(x[:n], weight), COUNTS)
    same_bits(lambda n: reference.linear(x[:n], weight, torch.float32), COUNTS)
    same_bits(lambda n: reference.linear_add(x[:n], weight, residual[:n]), COUNTS)
    same_bits(lambda n: reference.norm_linear(x[:n], norm, EPS, weight), COUNTS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "depth", "dtype"),
    [
        (576, 576, torch.bfloat16),
        (1000, 1000, torch.bfloat16),
        (1000, 1000, torch.float32),
        (2048, 1001, torch.bfloat16),
    ],
    ids=str,
)
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows_without_a_table(
    columns: int, depth: int, dtype: torch.dtype
) -> None:
    """At 1 to 128 rows."""
    case = Case(128, columns, depth, dtype)
    x, weight, norm, residual = case.x, case.weight, case.norm, case.residual
    same_bits(lambda n: reference.linear(x[:n], weight), COUNTS)
    same_bits(lambda n: reference.linear_add(x[:n], weight, residual[:n]), COUNTS)
    same_bits(lambda n: reference.norm_gated(x[:n], norm, EPS, weight), COUNTS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv", "gate_up"])
def test_the_bits_of_a_row_do_not_depend_on_the_tile(name: str) -> None:
    """At 1 to 128 rows in bfloat16, with tiles of every height and both ways to load them."""
    case = Case(128, *QWEN[name], torch.bfloat16)
    shapes = [
        Tile(16, 32, 256, 4, 3),
        Tile(16, 64, 128, 4, 3),
        Tile(16, 64, 128, 4, 3, 1, "copy"),
        Tile(32, 32, 128, 4, 3),
        Tile(64, 64, 64, 4, 3),
        Tile(64, 32, 128, 4, 4, 1, "copy"),
        Tile(128, 64, 64, 8, 3),
        Tile(128, 128, 64, 8, 3, 1, "copy"),
    ]
    for gated in (False, True):
        most = gpu.product(case.x, case.weight, shapes[0], gated=gated)
        for tile in shapes:
            for rows in (1, 16, 50, 128):
                out = gpu.product(case.x[:rows], case.weight, tile, gated=gated)
                assert torch.equal(out, most[:rows]), (tile, rows, gated)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_the_large_product_has_the_bits_of_the_small_one_in_one_part(name: str) -> None:
    """At 1, 128, 129, 257 and 512 rows in bfloat16."""
    case = Case(512, *QWEN[name], torch.bfloat16)
    few = gpu.product(case.x[:128], case.weight, Tile(64, 64, 128, 4, 4))
    for tile in (
        Tile(128, 128, 64, 8, 3),
        Tile(256, 64, 64, 8, 3),
        Tile(128, 256, 64, 8, 3),
        Tile(256, 128, 64, 8, 3),
    ):
        for rows in (1, 128, 129, 257, 512):
            out = linear_large.product(case.x[:rows], case.weight, tile)
            assert torch.equal(out[:128], few[:rows]), (tile, rows)


@pytest.mark.gpu
def test_products_can_be_captured_in_a_graph() -> None:
    case = Case(16, 4096, 4096, torch.bfloat16)
    x, weight, norm = case.x, case.weight, case.norm

    tile = Tile(16, 64, 128, 4, 4, 4, "spread")

    def work() -> tuple[Tensor, ...]:
        return (
            reference.norm_linear(x, norm, EPS, weight),
            linear_large.product(x, weight, Tile(128, 128, 64, 8, 4)),
            gpu.product(x, weight, tile),
        )

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    x.copy_(rand(16, 4096, seed=50))
    graph.replay()
    for out, expected in zip(captured, work(), strict=True):
        assert torch.equal(out, expected)
