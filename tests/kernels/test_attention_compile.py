"""The decode kernels as compiled for an H200, which needs no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_serve.bench.attention_cases import FEW
from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu import attention
from dflash_serve.kernels.gpu.attention import DecodeTiles, Sharing, decode_attention
from tests.kernels.compiling import Facts, compiling, run_as_program, waits_first

pytestmark = pytest.mark.slow
PAGE = 64
WHOLE, SPLIT = Sharing("whole", 1), Sharing("split", 4)
TALL = DecodeTiles(64, 64, 128)
PRODUCTS = dataclasses.replace(TALL, sums="products")
CASES = {
    "whole": (TALL, WHOLE),
    "split": (TALL, SPLIT),
    "short": (TALL, Sharing("split", 4, 2048, 2)),
    "whole products": (PRODUCTS, WHOLE),
    "split products": (PRODUCTS, SPLIT),
}
FEW_CASES = {"few whole": (FEW, WHOLE), "few split": (FEW, SPLIT)}


def needs(cubin: bytes) -> Facts:
    """Registers of a thread, and bytes of its stack, where registers are spilled."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack": int(found[2])}


def compile_decode(tiles: DecodeTiles, sharing: Sharing, *, boxes: bool) -> dict[str, Facts]:
    """Facts about each kernel that attention of 16 rows over pages of 64 keys launches."""
    from triton.tools.disasm import get_sass

    facts: dict[str, Facts] = {}

    def keep(kernel: Any, _: str, built: Any) -> None:
        sass = get_sass(built.asm["cubin"])
        facts[kernel.__name__] = {
            **needs(built.asm["cubin"]),
            "products": sass.count("HGMMA"),
            "small_products": len(re.findall(r"\bHMMA", sass)),
            "waits": sass.count("WARPGROUP.DEPBAR"),
            "boxes": sass.count("UTMALDG"),
            "waits_first": waits_first(built.asm["ptx"]),
            "shared": built.metadata.shared,
        }

    query = torch.zeros(8, 16, 32, 128, dtype=torch.bfloat16)
    pages = torch.zeros(2, 4, PAGE, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(8, 17, dtype=torch.int64)
    view = AttentionView(table, torch.zeros(8, dtype=torch.int64), 16, 1040, PAGE, True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling(keep))
        if not boxes:
            none = (None, None, None)
            stack.enter_context(mock.patch.object(attention, "_boxes", return_value=none))
        decode_attention(query, pages[0], pages[1], view, tiles=tiles, sharing=sharing)
    return facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Facts]]:
    found: dict[str, dict[str, Facts]] = run_as_program(__file__, tmp_path_factory.mktemp("triton"))
    return found


NAMES, FEW_NAMES = (
    [case + boxes for case in cases for boxes in ("", " boxes")] for cases in (CASES, FEW_CASES)
)
each_kernel = pytest.mark.parametrize("name", NAMES + FEW_NAMES)
each_tall_kernel = pytest.mark.parametrize("name", NAMES)
each_few_kernel = pytest.mark.parametrize("name", FEW_NAMES)


@each_tall_kernel
def test_the_steps_of_a_product_follow_each_other_without_a_wait(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    found = compiled[name]["decode"]
    # Per loop 128 / 16 of the scores, 64 / 16 of the values, and a wait for each of the two. (The
    # disassembly of a long kernel leaves loops out.)
    assert found["products"] >= 24
    assert found["products"] >= 6 * found["waits"]


@each_kernel
def test_as_many_programs_fit_on_a_processor_as_the_tiles_say(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    tiles, _ = (CASES | FEW_CASES)[name.removesuffix(" boxes")]
    found = compiled[name]["decode"]
    assert tiles.residents * (found["shared"] + 1024) <= 228 * 1024
    registers = -(-found["registers"] // 8) * 8
    assert tiles.residents * registers * 32 * tiles.warps <= 65536


@each_kernel
def test_next_to_nothing_is_spilled(name: str, compiled: dict[str, dict[str, Facts]]) -> None:
    assert compiled[name]["decode"]["stack"] <= 64


@each_few_kernel
def test_tiles_of_few_rows_use_the_small_products(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    found = compiled[name]["decode"]
    assert found["products"] == 0
    # Per loop and warp 2 · 128 / 16 of the scores, 4 · 64 / 16 of the values, 64 / 16 of the sums.
    assert found["small_products"] >= 36


@pytest.mark.parametrize("name", [name for name in NAMES if "products" in name])
def test_sums_are_products_of_the_same_kind_in_tall_tiles(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    assert compiled[name]["decode"]["small_products"] >= 4
    assert compiled[name.replace(" products", "")]["decode"]["small_products"] == 0


@each_kernel
def test_only_boxes_go_through_the_memory_accelerator(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    assert (compiled[name]["decode"]["boxes"] > 0) == name.endswith("boxes")


@each_kernel
def test_every_kernel_waits_for_the_one_before_it(
    name: str, compiled: dict[str, dict[str, Facts]]
) -> None:
    assert all(found["waits_first"] for found in compiled[name].values())


if __name__ == "__main__":
    found = {
        name + " boxes" * boxes: compile_decode(tiles, sharing, boxes=boxes)
        for name, (tiles, sharing) in (CASES | FEW_CASES).items()
        for boxes in (False, True)
    }
    print(json.dumps(found))
