"""The head product that picks as compiled for an H200, which needs no GPU.

Triton decides at import whether it interprets, hence the child process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_serve.kernels.gpu import head_pick
from dflash_serve.kernels.gpu.head_tiles import HEAD_TILES, head_tile
from tests.engine.rows import row_sampling
from tests.kernels.test_small_compile import WAITS_FIRST, signature

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
COLUMNS, DEPTH = 151936, 4096
COUNTS = (16, 32, 64, 128, 2048)


def assembled(ptx: str) -> dict[str, int]:
    """What the assembler says about a kernel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", "--fmad=false", "--gpu-name=sm_90a"]
        command += [str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.findall(r"(\d+) bytes spill", said)
    return {"spilled": max(int(n) for n in spilled), "serialized": said.count("are serialized")}


def compile_head(count: int, *, noisy: bool) -> dict[str, dict[str, int]]:
    """Facts about each kernel that the pick of `count` rows launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    facts: dict[str, dict[str, int]] = {}

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | named | {"PDL": True}
        options = {name: values.pop(name) for name in set(values) - set(self.arg_names)}
        boxes = {n: v for n, v in values.items() if isinstance(v, TensorDescriptor)}
        types, constants, aligned = signature(self, values | dict.fromkeys(boxes, 1))
        for name, box in boxes.items():
            types[name] = f"tensordesc<bf16{list(box.block_shape)}>"
            del constants[name]
        source = ASTSource(self, types, constants, aligned)
        options["launch_pdl"] = True
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = built.asm["ptx"]
        facts[self.__name__] = assembled(ptx) | {
            "shared": built.metadata.shared,
            "products": ptx.count("wgmma.mma_async"),
            "waits_first": int(WAITS_FIRST.search(ptx) is not None),
        }

    x = torch.empty((count, DEPTH), dtype=torch.bfloat16)
    tile = head_tile(COLUMNS, DEPTH, count, torch.bfloat16)
    weight = torch.empty((512, DEPTH), dtype=torch.bfloat16)
    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_launch),
        mock.patch.object(head_pick, "_processors", return_value=132),
    ):
        rows = row_sampling(count) if noisy else None
        head_pick.head_keys(x, weight, rows, 0, 512, 1.0, tile)
    return facts


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout)
    return found


def test_every_row_count_of_the_table_is_compiled() -> None:
    found = {head_tile(COLUMNS, DEPTH, count, torch.bfloat16) for count in COUNTS}
    assert found == set(HEAD_TILES[COLUMNS, DEPTH].values())


each_case = pytest.mark.parametrize(
    "case", [f"{count} {kind}" for count in COUNTS for kind in ("greedy", "noisy")]
)


@each_case
def test_a_program_fits_on_a_processor(
    case: str, compiled: dict[str, dict[str, dict[str, int]]]
) -> None:
    for kernel, facts in compiled[case].items():
        assert facts["shared"] <= 227 * 1024, kernel
        # The noise of a wide tile is made while the tile itself waits in registers.
        wide = kernel == "_copied" and case.endswith("noisy")
        assert facts["spilled"] <= (384 if wide else 0), kernel


@each_case
def test_the_steps_of_a_product_follow_each_other_without_a_wait(
    case: str, compiled: dict[str, dict[str, dict[str, int]]]
) -> None:
    count = int(case.split()[0])
    (product,) = [facts for kernel, facts in compiled[case].items() if kernel != "_largest"]
    assert (product["products"] > 0) == (count >= 64)
    assert product["serialized"] == 0


@each_case
def test_every_kernel_waits_before_it_touches_what_kernels_write(
    case: str, compiled: dict[str, dict[str, dict[str, int]]]
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
