"""How much memory steps need beside weights and pages, found by running the largest ones."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import torch

from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import Pair
from dflash_serve.engine.runner import Runner
from dflash_serve.log import get_logger

__all__ = ["step_bytes"]

logger = get_logger(__name__)

_SPARE = 256 << 20
"""Graphs themselves, library workspaces and fragmentation."""


def step_bytes(pair: Pair, config: EngineConfig) -> int:
    """Bytes for the largest prefill and the largest decode step, and for the captured steps.

    The steps run on a pool of the dummy page alone; nothing they compute is used. Captured steps
    keep memory of their own, so that the largest decode step counts twice. 0 on CPU.
    """
    if pair.device.type != "cuda":
        return 0
    runner = Runner(pair, dataclasses.replace(config, eager=True))
    gc.collect()
    torch.cuda.empty_cache()
    prefill = _peak(runner.rehearse_prefill)
    decode = _peak(runner.rehearse_decode)
    captured = 0 if config.eager or config.share_gpu else decode
    total = max(prefill, decode) + captured + _SPARE
    logger.info(
        "steps need %.2f GiB: prefill %.2f, decode %.2f, captured %.2f",
        *(size / 2**30 for size in (total, prefill, decode, captured)),
    )
    torch.cuda.empty_cache()
    return total


def _peak(run: Callable[[], None]) -> int:
    """Most memory allocated while `run` ran, above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
