"""A gang of rank actors driven directly, without Serve: for measurements."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import ray

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.processes import await_exit, descendants, kill

__all__ = ["gang_alone"]

_OBJECT_STORE_BYTES = 100_000_000
_STOP_TIMEOUT_S = 15.0


@contextlib.contextmanager
def gang_alone(config: EngineConfig) -> Iterator[EngineClient]:
    """An engine whose ranks are actors of a Ray started for it, and ended with it.

    Raises:
        ConfigError, EngineDeadError: see `start_engine`.
    """
    before = descendants(os.getpid())
    ray.init(
        num_cpus=max(os.cpu_count() or 1, config.tensor_parallel_size),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        engine = start_engine(config, RayExecutor(config))
        try:
            yield engine
        finally:
            engine.shutdown()
    finally:
        started = descendants(os.getpid()) - before
        ray.shutdown()
        kill(await_exit(started, _STOP_TIMEOUT_S))
