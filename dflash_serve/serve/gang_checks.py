"""What must be true of a gang's ranks before they load: told apart here, by name, in seconds.

Each of these shows otherwise as a hang, as an error of a library far away, or as wrong tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from dflash_serve.config import EngineConfig
from dflash_serve.errors import EngineDeadError
from dflash_serve.serve.rank_actor import RankPlace
from dflash_serve.serve.settings import placement_strategy

__all__ = ["check_places", "digest_checkpoints", "free_shm_bytes"]

_SHM = "/dev/shm"
_SHM_BYTES_PER_RANK = 64 << 20
"""What NCCL may map for a rank's neighbours; more than the 64 MiB a container has by default
is needed from two ranks on."""
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit


def free_shm_bytes() -> int:
    """Bytes free in /dev/shm; 0 where there is none."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def digest_checkpoints(config: EngineConfig) -> str:
    """Digest of what the checkpoints hold, without their data: configs, headers, file sizes.

    Copies that differ in a tensor's name, type, shape or place, or that are cut short, differ in
    it; others are taken for equal.
    """
    digest = hashlib.blake2b(digest_size=16)
    for folder in filter(None, (config.target, config.draft)):
        for path in sorted(Path(folder).glob("*")):
            if path.name == "config.json":
                digest.update(path.read_bytes())
            elif path.suffix == ".safetensors":
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                digest.update(_header(path))
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        # A length that is nonsense is the loader's to report.
        return length + file.read(min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES))


def check_places(config: EngineConfig, places: Sequence[RankPlace], hosts: int = 1) -> None:
    """Whether ranks that landed so can work together.

    Args:
        hosts: over how many hosts they should be spread.

    Raises:
        EngineDeadError: they cannot; the text says which differ and what to do.
    """
    _check_nodes(places, hosts)
    _check_checkpoints(places)
    if config.device != "cuda":
        return
    _check_gpus(places)
    if not config.share_gpu:
        _check_distinct(places)
        _check_shm(places)


def _check_nodes(places: Sequence[RankPlace], hosts: int) -> None:
    nodes = [place.node_id for place in places]
    # Equally many on each, neighbours together.
    firsts = nodes[:: len(nodes) // hosts]
    wanted = [firsts[rank * hosts // len(nodes)] for rank in range(len(nodes))]
    if len(set(firsts)) != hosts or nodes != wanted:
        raise EngineDeadError(
            f"the ranks landed on {len(set(nodes))} nodes ({', '.join(n[:8] for n in nodes)}); "
            f"hosts is {hosts}: leave placement_group_strategy out, or use "
            f"{placement_strategy(hosts)}"
        )


def _check_checkpoints(places: Sequence[RankPlace]) -> None:
    digests = [place.checkpoints for place in places]
    if len(set(digests)) > 1:
        raise EngineDeadError(
            f"the ranks read different checkpoints (digests by rank: {', '.join(digests)}); "
            "give every rank the same files and let nothing write to them"
        )


def _check_gpus(places: Sequence[RankPlace]) -> None:
    for rank, place in enumerate(places):
        if not place.gpus:
            raise EngineDeadError(
                f"rank {rank} sees no GPU, although Ray assigned {place.devices}; check the "
                "driver and that nothing else sets CUDA_VISIBLE_DEVICES"
            )
    kinds = [place.gpus for place in places]
    if len(set(kinds)) > 1:
        seen = "; ".join(f"rank {rank}: {' + '.join(gpus)}" for rank, gpus in enumerate(kinds))
        raise EngineDeadError(
            f"the ranks see different GPUs ({seen}); they must be alike: set accelerator_type, "
            "and keep other programs from changing CUDA_VISIBLE_DEVICES"
        )


def _check_distinct(places: Sequence[RankPlace]) -> None:
    flat = [(place.node_id, device) for place in places for device in place.devices]
    if len(flat) != len(places) or len(set(flat)) != len(flat):
        raise EngineDeadError(
            f"each rank needs one GPU of its own, but Ray assigned {[p.devices for p in places]}; "
            "reserve one GPU per rank, or set share_gpu for a test"
        )


def _check_shm(places: Sequence[RankPlace]) -> None:
    need = _SHM_BYTES_PER_RANK * len(places)  # of several hosts, more than each needs
    free = min(place.shm_bytes for place in places)
    if len(places) > 1 and free < need:
        raise EngineDeadError(
            f"{_SHM} has {free >> 20} MiB free, and NCCL between {len(places)} ranks may need "
            f"{need >> 20} MiB; give the container more (docker run --shm-size, or an emptyDir "
            "with medium Memory mounted there)"
        )
