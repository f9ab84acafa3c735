"""The head product that picks as compiled for an H200, which needs no GPU."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_serve.kernels.gpu import head_pick
from dflash_serve.kernels.gpu.head_tiles import HEAD_TILES, head_tile
from tests.engine.rows import row_sampling
from tests.kernels.compiling import Facts, assembled, compiling, run_as_program, waits_first

pytestmark = pytest.mark.slow
COLUMNS, DEPTH = 151936, 4096
COUNTS = (16, 32, 64, 128, 2048)


def compile_head(count: int, *, noisy: bool) -> dict[str, Facts]:
    """Facts about each kernel that the pick of `count` rows launches."""
    facts: dict[str, Facts] = {}

    def keep(kernel: Any, _: str, built: Any) -> None:
        ptx = built.asm["ptx"]
        facts[kernel.__name__] = assembled(ptx, "--fmad=false") | {
            "shared": built.metadata.shared,
            "products": ptx.count("wgmma.mma_async"),
            "waits_first": waits_first(ptx),
        }

    x = torch.empty((count, DEPTH), dtype=torch.bfloat16)
    tile = head_tile(COLUMNS, DEPTH, count, torch.bfloat16)
    weight = torch.empty((512, DEPTH), dtype=torch.bfloat16)
    with (
        compiling(keep),
        mock.patch.object(head_pick, "_processors", return_value=132),
    ):
        rows = row_sampling(count) if noisy else None
        head_pick.head_keys(x, weight, rows, 0, 512, 1.0, tile)
    return facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Facts]]:
    found: dict[str, dict[str, Facts]] = run_as_program(__file__, tmp_path_factory.mktemp("triton"))
    return found


def test_every_row_count_of_the_table_is_compiled() -> None:
    found = {head_tile(COLUMNS, DEPTH, count, torch.bfloat16) for count in COUNTS}
    assert found == set(HEAD_TILES[COLUMNS, DEPTH].values())


each_case = pytest.mark.parametrize(
    "case", [f"{count} {kind}" for count in COUNTS for kind in ("greedy", "noisy")]
)


@each_case
def test_a_program_fits_on_a_processor(case: str, compiled: dict[str, dict[str, Facts]]) -> None:
    for kernel, facts in compiled[case].items():
        assert facts["shared"] <= 227 * 1024, kernel
        # The noise of a wide tile is made while the tile itself waits in registers.
        wide = kernel == "_copied" and case.endswith("noisy")
        assert facts["spilled"] <= (384 if wide else 0), kernel


@each_case
def test_the_steps_of_a_product_follow_each_other_without_a_wait(
    case: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    count = int(case.split()[0])
    (product,) = [facts for kernel, facts in compiled[case].items() if kernel != "_largest"]
    assert (product["products"] > 0) == (count >= 64)
    assert product["serialized"] == 0


@each_case
def test_every_kernel_waits_before_it_touches_what_kernels_write(
    case: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    assert all(facts["waits_first"] for facts in compiled[case].values())


if __name__ == "__main__":
    kinds = {"greedy": False, "noisy": True}
    print(
        json.dumps(
            {
                f"{count} {kind}": compile_head(count, noisy=noisy)
                for count in COUNTS
                for kind, noisy in kinds.items()
            }
        )
    )
