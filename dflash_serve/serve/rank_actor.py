"""One rank's process under Ray, and what it says about itself before it loads anything."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import psutil
import ray

from dflash_serve import log
from dflash_serve.config import EngineConfig
from dflash_serve.engine.lines import Inbox, Lines
from dflash_serve.engine.sockets import Key
from dflash_serve.errors import EngineDeadError

__all__ = ["RUNNER", "RankActor", "RankPlace"]

RUNNER = "dflash_serve.engine.rank"


class RankPlace(NamedTuple):
    """Where a rank landed and what it sees there.

    Attributes:
        node_id: Ray's name of the host.
        address: where other hosts reach it.
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
    address: str = ""


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
        self._inbox: Inbox | None = None

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
            address=ray.util.get_node_ip_address(),
        )

    def prepare(self) -> None:
        """Import what `run` needs: seconds that all ranks can spend at the same time."""
        importlib.import_module(self._runner)

    def bind_store(self) -> int:
        """Open the rendezvous on a port the system picks, and keep it open; rank 0 only."""
        from dflash_serve.parallel.group import bind_store

        self._store = bind_store()
        return int(self._store.port)

    def open_inbox(self, key: Key) -> str:
        """Listen for the other hosts' ranks; returns the address."""
        self._inbox = Inbox(ray.util.get_node_ip_address(), key)
        return self._inbox.endpoint

    def run(
        self,
        run_dir: str,
        config: EngineConfig,
        world_size: int,
        store_host: str,
        store_port: int,
        lines: Lines | None,
    ) -> None:
        """Load and serve until told to stop; blocks. Returning or raising ends the gang."""
        if lines is not None:
            _use_interface(ray.util.get_node_ip_address())
        module = importlib.import_module(self._runner)
        spec = module.RankSpec(
            config=config,
            rank=self._rank,
            world_size=world_size,
            run_dir=run_dir,
            store_host=store_host,
            store_port=store_port,
            lines=lines,
        )
        module.run_rank(spec, store=self._store, inbox=self._inbox)


def _use_interface(address: str) -> None:
    """Have the collectives' own connections made where Ray reaches this host.

    Raises:
        EngineDeadError: no interface has the address.
    """
    found = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in entries)
    ]
    if not found:
        raise EngineDeadError(
            f"no network interface of this host has the address {address} that Ray knows it by; "
            "give `ray start` its --node-ip-address"
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, found[0])


def _visible_gpus() -> tuple[str, ...]:
    import torch

    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(f"{gpu.name}, {gpu.total_memory >> 20} MiB" for gpu in found)
