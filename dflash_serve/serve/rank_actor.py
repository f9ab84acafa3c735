"""One rank's process under Ray, and what it says about itself before it loads anything."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import ray

from dflash_serve import log
from dflash_serve.config import EngineConfig

__all__ = ["RUNNER", "RankActor", "RankPlace"]

RUNNER = "dflash_serve.engine.rank"


class RankPlace(NamedTuple):
    """Where a rank landed and what it sees there.

    Attributes:
        node_id: Ray's name of the host.
        pid: the rank's process.
        devices: GPUs that Ray assigned.
        gpus: kind and memory of every GPU the process sees.
        shm_bytes: free in /dev/shm.
        checkpoints: digest of both checkpoints' headers and sizes.
    """

    node_id: str
    pid: int
    devices: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    shm_bytes: int = 0
    checkpoints: str = ""


class RankActor:
    """One rank's process. Made a Ray actor by `RayExecutor`, once its resources are known.

    Args:
        rank: tensor-parallel rank.
        runner: module that holds `RankSpec` and `run_rank`.
    """

    def __init__(self, rank: int, runner: str = RUNNER) -> None:
        log.configure(rank=rank)
        self._rank = rank
        self._runner = runner
        self._store: Any = None

    def place(self, config: EngineConfig) -> RankPlace:
        """Report node, process, devices and files."""
        from dflash_serve.serve.gang_checks import digest_checkpoints, free_shm_bytes

        context = ray.get_runtime_context()
        return RankPlace(
            node_id=context.get_node_id(),
            pid=os.getpid(),
            devices=tuple(context.get_accelerator_ids().get("GPU", ())),
            gpus=_visible_gpus() if config.device == "cuda" else (),
            shm_bytes=free_shm_bytes(),
            checkpoints=digest_checkpoints(config),
        )

    def prepare(self) -> None:
        """Import what `run` needs: seconds that all ranks can spend at the same time."""
        importlib.import_module(self._runner)

    def bind_store(self) -> int:
        """Open the rendezvous on a port the system picks, and keep it open; rank 0 only."""
        from dflash_serve.parallel.group import bind_store

        self._store = bind_store()
        return int(self._store.port)

    def run(self, run_dir: str, config: EngineConfig, world_size: int, store_port: int) -> None:
        """Load and serve until told to stop; blocks. Returning or raising ends the gang."""
        module = importlib.import_module(self._runner)
        spec = module.RankSpec(
            config=config,
            rank=self._rank,
            world_size=world_size,
            run_dir=run_dir,
            store_host="127.0.0.1",
            store_port=store_port,
        )
        module.run_rank(spec, store=self._store)


def _visible_gpus() -> tuple[str, ...]:
    import torch

    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(f"{gpu.name}, {gpu.total_memory >> 20} MiB" for gpu in found)
