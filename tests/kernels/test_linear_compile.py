"""The gated products as compiled for an H200, which needs no GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear, linear_large
from dflash_serve.kernels.gpu.tiles import GATED_TILES, MANY_GATED, SHARED_BYTES, Tile
from tests.kernels.compiling import Facts, assembled, compiling, run_as_program, waits_first

FEW = {f"few {rows}": tile for (_, _, rows), tile in GATED_TILES.items()}
JOINT = {f"joint {name}": tile.joined() for name, tile in FEW.items()}
MANY = {f"many {tile}": tile for tile in MANY_GATED.values()}
PLAIN = {f"plain {tile}": tile for tile in MANY_GATED.values()}


def compile_one(run: Any) -> Facts:
    """Facts about the one kernel that `run` launches."""
    facts: Facts = {}

    def keep(_kernel: Any, _: str, built: Any) -> None:
        ptx = built.asm["ptx"]
        facts.update(
            assembled(ptx),
            shared=built.metadata.shared,
            barriers=ptx.count("bar.sync"),
            products=ptx.count("wgmma.mma_async"),
            box_loads=ptx.count("cp.async.bulk.tensor.2d.shared"),
            box_stores=ptx.count("cp.async.bulk.tensor.2d.global"),
            shuffles=ptx.count("shfl.sync"),
            waits_first=waits_first(ptx),
        )

    with compiling(keep):
        run()
    return facts


def compile_all() -> dict[str, Facts]:
    """Facts about every product of this file."""
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (192, 24576))
    found: dict[str, Facts] = {}

    def few(tile: Tile) -> None:
        linear.product(x, weight, tile, gated=True)

    def many(tile: Tile, gated: bool) -> None:
        linear_large.product(x, weight, tile, gated=gated)

    for name, tile in (FEW | JOINT).items():
        found[name] = compile_one(lambda tile=tile: few(tile))
    for name, tile in MANY.items():
        found[name] = compile_one(lambda tile=tile: many(tile, True))
    for name, tile in PLAIN.items():
        found[name] = compile_one(lambda tile=tile: many(tile, False))
    with interpreted():  # or it is torch's
        found["silu_mul"] = compile_one(lambda: silu_mul(weight))
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    found: dict[str, Facts] = run_as_program(__file__, tmp_path_factory.mktemp("triton"))
    return found


def test_no_gated_product_spills_or_takes_too_much_memory(
    compiled: dict[str, Facts],
) -> None:
    assert compiled.keys() == {*FEW, *JOINT, *MANY, *PLAIN, "silu_mul"}
    for name, found in compiled.items():
        assert found["spilled"] == 0, name
        assert found["shared"] <= SHARED_BYTES, name
        assert found["waits_first"], name


def test_many_rows_are_multiplied_as_without_the_activation(
    compiled: dict[str, Facts],
) -> None:
    """The same loop, and no more stores."""
    for name in MANY:
        found, plain = compiled[name], compiled[name.replace("many", "plain")]
        for fact in ("products", "box_loads"):
            assert found[fact] == plain[fact], (name, fact)
        for fact in ("shared", "shuffles", "box_stores"):
            assert found[fact] <= plain[fact], (name, fact)


def test_gate_and_up_are_told_apart_within_a_thread(compiled: dict[str, Facts]) -> None:
    for name in ("few 16", "few 32"):
        # No more waits than with two products: nothing goes through shared memory.
        assert compiled[f"joint {name}"]["barriers"] <= compiled[name]["barriers"]
        assert compiled[f"joint {name}"]["shared"] == compiled[name]["shared"]


if __name__ == "__main__":
    print(json.dumps(compile_all()))
