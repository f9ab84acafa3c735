"""The gated products as compiled for an H200, which needs no GPU.

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

from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu import linear, linear_large
from dflash_serve.kernels.gpu.tiles import GATED_TILES, MANY_GATED, SHARED_BYTES, Tile
from tests.kernels.test_small_compile import WAITS_FIRST, signature

ROOT = Path(__file__).parents[2]
FEW = {f"few {rows}": tile for (_, _, rows), tile in GATED_TILES.items()}
JOINT = {f"joint {name}": tile.joined() for name, tile in FEW.items()}
MANY = {f"many {tile}": tile for tile in MANY_GATED.values()}
PLAIN = {f"plain {tile}": tile for tile in MANY_GATED.values()}


def used(ptx: str) -> dict[str, int]:
    """What the assembler says about a kernel: registers of a thread, bytes that it spills."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source)]
        done = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=True
        )
    said = done.stdout + done.stderr
    registers, stored, loaded = (
        max(int(n) for n in re.findall(pattern, said))
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill st", r"(\d+) bytes spill lo")
    )
    return {"registers": registers, "spilled": stored + loaded}


def compile_one(run: Any) -> dict[str, int]:
    """Facts about the one kernel that `run` launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    facts: dict[str, int] = {}

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | named | {"PDL": True}
        options = {name: values.pop(name) for name in set(values) - set(self.arg_names)}
        boxes = {n: v for n, v in values.items() if isinstance(v, TensorDescriptor)}
        types, constants, aligned = signature(self, values | dict.fromkeys(boxes, 1))
        for name, box in boxes.items():
            types[name] = f"tensordesc<bf16{list(box.block_shape)}>"
            del constants[name]
        source = ASTSource(self, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = built.asm["ptx"]
        facts.update(
            used(ptx),
            shared=built.metadata.shared,
            barriers=ptx.count("bar.sync"),
            products=ptx.count("wgmma.mma_async"),
            box_loads=ptx.count("cp.async.bulk.tensor.2d.shared"),
            box_stores=ptx.count("cp.async.bulk.tensor.2d.global"),
            shuffles=ptx.count("shfl.sync"),
            waits_first=int(WAITS_FIRST.search(ptx) is not None),
        )

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_launch):
        run()
    return facts


def compile_all() -> dict[str, dict[str, int]]:
    """Facts about every product of this file."""
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (192, 24576))
    found: dict[str, dict[str, int]] = {}

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
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def test_no_gated_product_spills_or_takes_too_much_memory(
    compiled: dict[str, dict[str, int]],
) -> None:
    assert compiled.keys() == {*FEW, *JOINT, *MANY, *PLAIN, "silu_mul"}
    for name, found in compiled.items():
        assert found["spilled"] == 0, name
        assert found["shared"] <= SHARED_BYTES, name
        assert found["waits_first"], name


def test_many_rows_are_multiplied_as_without_the_activation(
    compiled: dict[str, dict[str, int]],
) -> None:
    """The same loop, and no more stores."""
    for name in MANY:
        found, plain = compiled[name], compiled[name.replace("many", "plain")]
        for fact in ("products", "box_loads"):
            assert found[fact] == plain[fact], (name, fact)
        for fact in ("shared", "shuffles", "box_stores"):
            assert found[fact] <= plain[fact], (name, fact)


def test_gate_and_up_are_told_apart_within_a_thread(compiled: dict[str, dict[str, int]]) -> None:
    for name in ("few 16", "few 32"):
        # No more waits than with two products: nothing goes through shared memory.
        assert compiled[f"joint {name}"]["barriers"] <= compiled[name]["barriers"]
        assert compiled[f"joint {name}"]["shared"] == compiled[name]["shared"]


if __name__ == "__main__":
    print(json.dumps(compile_all()))
