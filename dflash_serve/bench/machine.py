"""Measured limits of the machine at hand, for shares of the roofline."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

import torch

from dflash_serve import __version__
from dflash_serve.bench.roofline import H200, Machine

__all__ = ["describe_machine", "local_machine"]

_READ_BYTES = 1 << 29
_PRODUCT = 1536


def local_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Read bandwidth and product rate of a CPU, measured; of a GPU, the H200's figures."""
    if device.type == "cuda":
        return H200
    data = torch.ones(_READ_BYTES // 4)
    bandwidth = _READ_BYTES / _best(lambda: data.sum())
    a = torch.randn(_PRODUCT, _PRODUCT)
    flops = 2 * _PRODUCT**3 / _best(lambda: a @ a)
    return Machine(bandwidth, flops, bandwidth, torch.empty(0, dtype=dtype).element_size())


def describe_machine(device: torch.device) -> dict[str, str]:
    """What a report says about where it was measured."""
    found = {"version": __version__, "torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
            found["driver"] = done.stdout.split()[0]
    return found


def _best(work: Callable[[], object], rounds: int = 5) -> float:
    """Least seconds of a few runs."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
