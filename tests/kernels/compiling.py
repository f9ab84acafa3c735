"""Compiling kernels for an H200, which needs no GPU: what the tests of compiled kernels share.

Triton decides at import whether it interprets, hence the child process: a test file prints, as
JSON, the facts that its tests look at when it is run as a program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

__all__ = ["Facts", "assembled", "compiling", "run_as_program", "waits_first"]

ROOT = Path(__file__).parents[2]
Facts = dict[str, int]
"""What is known of a compiled kernel, by name."""

# No access to global memory before the wait.
_WAITS_FIRST = re.compile(
    r"\A(?:(?!ld\.global|st\.global|cp\.async|atom\.).)*griddepcontrol\.wait", re.DOTALL
)
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


def waits_first(ptx: str) -> int:
    """1 if a kernel waits for the one before it before it touches memory, else 0."""
    return int(_WAITS_FIRST.search(ptx) is not None)


def assembled(ptx: str, *flags: str) -> Facts:
    """What the assembler says.

    Registers of a thread, bytes spilled (stored or loaded, the larger), products made serial.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", *flags, "--gpu-name=sm_90a", str(source)]
        done = subprocess.run(
            [*command, "-o", os.devnull], capture_output=True, text=True, check=True
        )
    said = done.stdout + done.stderr
    registers, stored, loaded = (
        max(int(n) for n in re.findall(pattern, said))
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill st", r"(\d+) bytes spill lo")
    )
    return {
        "registers": registers,
        "spilled": max(stored, loaded),
        "serialized": said.count("are serialized"),
    }


@contextlib.contextmanager
def compiling(keep: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Within the block launches compile their kernel as on a GPU with dependent launch.

    Args:
        keep: called once per kernel and signature with the kernel, a text that tells its
            signature from others and begins with its name, and what Triton compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen: set[str] = set()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | named
        options = {name: values.pop(name) for name in set(values) - set(self.arg_names)}
        if "PDL" in self.arg_names:
            values["PDL"] = True
            options["launch_pdl"] = True
        types, constants, aligned = _signature(self, values)
        key = f"{self.__name__} {types} {constants}"
        if key not in seen:
            seen.add(key)
            source = ASTSource(self, types, constants, aligned)
            target = GPUTarget("cuda", 90, 32)
            keep(self, key, triton.compile(source, target=target, options=options))

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", launch):
        yield


def _signature(kernel: Any, values: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], Any]:
    """Types, constants and alignments that a launch with these arguments is compiled for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    types, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        fixed = value is None or (isinstance(value, int) and value == 1)
        if parameter.is_constexpr or fixed:
            types[name], constants[name] = "constexpr", value
            continue
        whole = 1
        if isinstance(value, TensorDescriptor):
            types[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            types[name], whole = f"*{_TYPES[value.dtype]}", value.data_ptr()
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            types[name], whole = "i32" if abs(value) < 2**31 else "i64", value
        if whole % 16 == 0:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def run_as_program(file: str, cache: Path) -> Any:
    """What a test file prints as JSON when it is run with the compiler in place.

    Args:
        cache: an empty folder for Triton.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
