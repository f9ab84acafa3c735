"""The kernels as compiled for an H200, which needs no GPU, and the timing script at toy size."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dflash_serve.bench import small_kernels
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.gpu.embedding import embed_rows
from dflash_serve.kernels.gpu.linear import product
from dflash_serve.kernels.gpu.tiles import Tile
from tests.kernels.compiling import Facts, compiling, run_as_program, waits_first

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compile_all() -> dict[str, Facts]:
    """Compile what every case of the timing script launches; returns facts about each kernel."""
    facts: dict[str, Facts] = {}

    def keep(kernel: Any, key: str, built: Any) -> None:
        ptx = built.asm["ptx"]
        facts[key] = {
            "shared": built.metadata.shared,
            "barriers": ptx.count("bar.sync"),
            "fused": ptx.count("fma.rn.bf16"),
            "chained": int("PDL" in kernel.arg_names),
            "waits_first": waits_first(ptx),
        }

    sizes = small_kernels.Sizes((16,), layers=1, page_table=40)
    with interpreted(), compiling(keep):
        for dtype in (torch.float32, torch.bfloat16):
            for case in small_kernels.cases(sizes, torch.device("cpu"), dtype):
                for call in case.calls:
                    call()
            x, weight = (torch.zeros(n, 256, dtype=dtype) for n in (16, 512))
            embed_rows(torch.arange(16), weight, 0)
            for residual, gated in ((None, False), (x, False), (None, True)):
                product(x, weight, Tile(16, 64, 64, 4, 3), residual=residual, gated=gated)
    return facts


@pytest.fixture(scope="module")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    facts: dict[str, Facts] = run_as_program(__file__, tmp_path_factory.mktemp("triton"))
    return facts


def test_every_kernel_compiles_for_hopper(compiled_kernels: dict[str, Facts]) -> None:
    names = {key.split()[0] for key in compiled_kernels}
    assert names == {
        "_commit",
        "_embed",
        "_gather",
        "_product",
        "_rms_norm",
        "_rope_and_store",
        "_silu_mul",
        "_store_context",
    }


def test_the_sum_over_a_head_stays_within_a_warp(
    compiled_kernels: dict[str, Facts],
) -> None:
    heads = [f for key, f in compiled_kernels.items() if "_store" in key]
    assert len(heads) == 4
    assert all(f["shared"] == f["barriers"] == 0 for f in heads)


def test_a_chained_kernel_waits_before_it_touches_what_kernels_write(
    compiled_kernels: dict[str, Facts],
) -> None:
    chained = {key.split()[0] for key, f in compiled_kernels.items() if f["chained"]}
    waiting = {key.split()[0] for key, f in compiled_kernels.items() if f["waits_first"]}
    names = {"_embed", "_product", "_rms_norm", "_rope_and_store", "_silu_mul", "_store_context"}
    assert chained == waiting == names


def test_no_product_loses_its_rounding_to_bf16_in_a_fused_sum(
    compiled_kernels: dict[str, Facts],
) -> None:
    assert {key.split()[0] for key, f in compiled_kernels.items() if f["fused"]} == set()


def test_every_case_of_the_timing_script_runs() -> None:
    with interpreted():
        cases = small_kernels.cases(small_kernels.TOY, torch.device(DEVICE), torch.float32)
        for case in cases:
            for call in case.calls:
                call()
            assert case.bytes > 0


@pytest.mark.gpu
def test_every_kernel_can_be_captured() -> None:
    for case in small_kernels.cases(small_kernels.TOY, torch.device("cuda"), torch.bfloat16):
        for call in case.calls:
            call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in case.calls:
                call()
        graph.replay()
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(compile_all()))
