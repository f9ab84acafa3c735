"""Measured limits of the machine at hand, for shares of the roofline."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dflash_serve.bench.roofline import H200, Machine

__all__ = ["local_machine"]

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


def _best(work: Callable[[], object], rounds: int = 5) -> float:
    """Least seconds of a few runs."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
