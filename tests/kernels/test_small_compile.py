"""The kernels as compiled for an H200, which needs no GPU, and the timing script at toy size.

Triton decides at import whether it interprets, hence the child process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_serve.bench import small_kernels
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.gpu.embedding import embed_rows
from dflash_serve.kernels.gpu.linear import product
from dflash_serve.kernels.gpu.tiles import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[2]
# No access to global memory before the wait.
WAITS_FIRST = re.compile(
    r"\A(?:(?!ld\.global|st\.global|cp\.async|atom\.).)*griddepcontrol\.wait", re.DOTALL
)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def signature(kernel: Any, values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], Any]:
    """Types, constants and alignments that a launch with these arguments is compiled for."""
    types, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        whole = 1
        if isinstance(value, torch.Tensor):
            types[name], whole = POINTERS[value.dtype], value.data_ptr()
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name], whole = "i32" if abs(value) < 2**31 else "i64", value
        if whole % 16 == 0:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def compile_all() -> dict[str, dict[str, int]]:
    """Compile what every case of the timing script launches; returns facts about each kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    facts: dict[str, dict[str, int]] = {}

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | named
        options = {name: values.pop(name) for name in set(values) - set(self.arg_names)}
        if "PDL" in values:  # as on a GPU that has dependent launch
            values["PDL"] = True
            options["launch_pdl"] = True
        types, constants, aligned = signature(self, values)
        key = f"{self.__name__} {types} {constants}"
        if key in facts:
            return
        source = ASTSource(self, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = built.asm["ptx"]
        facts[key] = {
            "shared": built.metadata.shared,
            "barriers": ptx.count("bar.sync"),
            "fused": ptx.count("fma.rn.bf16"),
            "chained": int("PDL" in values),
            "waits_first": int(WAITS_FIRST.search(ptx) is not None),
        }

    sizes = small_kernels.Sizes((16,), layers=1, page_table=40)
    run = mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_launch)
    with interpreted(), run:
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
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    facts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return facts


def test_every_kernel_compiles_for_hopper(compiled_kernels: dict[str, dict[str, int]]) -> None:
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
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    heads = [f for key, f in compiled_kernels.items() if "_store" in key]
    assert len(heads) == 4
    assert all(f["shared"] == f["barriers"] == 0 for f in heads)


def test_a_chained_kernel_waits_before_it_touches_what_kernels_write(
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    chained = {key.split()[0] for key, f in compiled_kernels.items() if f["chained"]}
    waiting = {key.split()[0] for key, f in compiled_kernels.items() if f["waits_first"]}
    names = {"_embed", "_product", "_rms_norm", "_rope_and_store", "_silu_mul", "_store_context"}
    assert chained == waiting == names


def test_no_product_loses_its_rounding_to_bf16_in_a_fused_sum(
    compiled_kernels: dict[str, dict[str, int]],
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
