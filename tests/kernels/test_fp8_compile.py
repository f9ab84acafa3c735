"""The 8-bit kernels as compiled for an H200, which needs no GPU."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch

from dflash_serve.bench.fp8_jobs import SHAPES, Shape
from dflash_serve.kernels.fp8 import FP8, Fp8Weight
from dflash_serve.kernels.gpu import fp8, fp8_head, fp8_rows
from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile, fp8_tile, head_tile
from dflash_serve.kernels.gpu.tiles import SHARED_BYTES
from dflash_serve.kernels.rows import RowSampling
from tests.kernels.compiling import Facts, assembled, compiling, run_as_program, waits_first

pytestmark = pytest.mark.slow
ROWS = (16, 64, 128, 512, 2048)
WIDTHS = (4096, 12288, 20480)


def compile_one(run: Any, kernel: str | None = None) -> Facts:
    """Facts about the one kernel that `run` launches, or about the one of a name."""
    facts: Facts = {}

    def keep(made: Any, _: str, built: Any) -> None:
        if kernel not in (None, made.__name__):
            return
        ptx = built.asm["ptx"]
        facts.update(
            assembled(ptx),
            shared=built.metadata.shared,
            tensor_cores=len(re.findall(r"wgmma\.mma_async\S*e4m3\.e4m3", ptx)),
            other_products=ptx.count("mma.sync"),
            copied=ptx.count("cp.async.bulk.tensor.2d.shared"),
            waits_first=waits_first(ptx),
        )

    with compiling(keep):
        run()
    return facts


def cases() -> dict[str, tuple[Shape, int, Fp8Tile]]:
    """Every tile that a draft of Qwen3-8B gets."""
    found = {}
    for shape in SHAPES:
        for rows in ROWS:
            summed, gated = shape.kind == "add", shape.kind == "gated"
            tile = fp8_tile(shape.columns, shape.depth, rows, gated=gated, summed=summed)
            found[f"{'gated ' * gated}{tile}"] = shape, rows, tile
    return found


def head_cases() -> dict[str, tuple[Shape, int, Fp8Tile]]:
    """The tiles of the head product that picks."""
    shape = next(shape for shape in SHAPES if shape.name == "head")
    return {
        f"head {tile}": (shape, rows, tile)
        for rows in ROWS
        for tile in [head_tile(shape.columns, shape.depth, rows)]
    }


def compile_all() -> dict[str, Facts]:
    """Facts about every kernel of this file."""
    found = {}
    for name, (shape, rows, tile) in cases().items():
        data, scale = torch.empty(rows, shape.depth, dtype=FP8), torch.empty(rows)
        size = shape.columns, shape.depth
        weight = Fp8Weight(torch.empty(size, dtype=FP8), torch.empty(shape.columns))
        call: Any = functools.partial(fp8.part_sums, data, scale, weight, tile)
        if tile.parts == 1:
            gated = shape.kind == "gated"
            call = functools.partial(
                fp8.product, data, scale, weight, tile, torch.bfloat16, gated=gated
            )
        found[name] = compile_one(call)
    for name, (shape, rows, tile) in head_cases().items():
        x = torch.empty(rows, shape.depth, dtype=torch.bfloat16)
        size = shape.columns, shape.depth
        weight = Fp8Weight(torch.empty(size, dtype=FP8), torch.empty(shape.columns))
        sampling = RowSampling(
            *(torch.ones(1),) * 4, *(torch.ones(1, dtype=torch.int64),) * 2, True, False, rows
        )
        call = functools.partial(
            fp8_head.head_keys, x, weight, sampling, 0, shape.columns, torch.ones(1), tile
        )
        found[name] = compile_one(call, "_scaled_keys")
    for width in WIDTHS:
        x = torch.empty(16, width, dtype=torch.bfloat16)
        found[f"quantize {width}"] = compile_one(functools.partial(fp8_rows.quantize_rows, x))
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    found: dict[str, Facts] = run_as_program(__file__, tmp_path_factory.mktemp("triton"))
    return found


def test_no_kernel_spills_or_takes_too_much_memory(compiled: dict[str, Facts]) -> None:
    widths = {f"quantize {width}" for width in WIDTHS}
    assert compiled.keys() == cases().keys() | head_cases().keys() | widths
    for name, found in compiled.items():
        assert found["spilled"] == 0, name
        assert found["shared"] <= SHARED_BYTES, name
        assert found["waits_first"], name


def test_products_run_on_the_tensor_cores_of_8_bit_numbers(
    compiled: dict[str, Facts],
) -> None:
    """Also those of few rows, whose weight takes the side that needs 64 of them."""
    for name in cases() | head_cases():
        assert compiled[name]["tensor_cores"] > 0, name
        assert compiled[name]["other_products"] == 0, name
        assert compiled[name]["copied"] > 0, name


if __name__ == "__main__":
    print(json.dumps(compile_all()))
