import json

import pytest
import torch
from safetensors.torch import save_file

from dflash_serve.config import EngineConfig
from dflash_serve.errors import EngineDeadError
from dflash_serve.serve.gang_checks import check_places, digest_checkpoints, free_shm_bytes
from dflash_serve.serve.rank_actor import RankPlace

H200 = ("NVIDIA H200, 143771 MiB",)
PLENTY = 1 << 30


def config(tp=2, **changes):
    fields = {"target": "/m/t", "tensor_parallel_size": tp, "device": "cuda", "executor": "ray"}
    return EngineConfig(**fields | changes)


def places(*changes):
    """One rank per set of changes, each with a GPU of its own but for those."""
    return [
        RankPlace("n", rank, (str(rank),), H200, PLENTY, "digest")._replace(**change)
        for rank, change in enumerate(changes)
    ]


def test_alike_ranks_pass():
    check_places(config(), places({}, {}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"node_id": "other"}, "2 nodes.*STRICT_PACK"),
        ({"devices": ("0",)}, "one GPU of its own"),
        ({"devices": ()}, "one GPU of its own"),
        ({"gpus": ()}, "rank 1 sees no GPU"),
        ({"gpus": ("NVIDIA H100, 81559 MiB",)}, r"rank 1: NVIDIA H100.*accelerator_type"),
        ({"gpus": H200 * 2}, "different GPUs"),
        ({"checkpoints": "other"}, "different checkpoints.*digest, other"),
        ({"shm_bytes": 64 << 20}, r"64 MiB free.*2 ranks may need 128 MiB.*--shm-size"),
    ],
)
def test_each_difference_is_named(change, text):
    with pytest.raises(EngineDeadError, match=text):
        check_places(config(), places({}, change))


@pytest.mark.parametrize("nodes", ["aabb", "bbaa"])
def test_ranks_of_several_hosts_stand_side_by_side(nodes):
    spread = [{"node_id": node, "devices": (str(rank % 2),)} for rank, node in enumerate(nodes)]
    check_places(config(4), places(*spread), hosts=2)


@pytest.mark.parametrize("nodes", ["aaaa", "abab", "aaab", "abcd"])
def test_ranks_spread_otherwise_than_said_are_refused(nodes):
    spread = [{"node_id": node} for node in nodes]
    with pytest.raises(EngineDeadError, match=r"hosts is 2: .*STRICT_SPREAD"):
        check_places(config(4), places(*spread), hosts=2)


def test_what_does_not_matter_is_not_asked_for():
    check_places(config(1), places({"shm_bytes": 0}))
    cpu = {"devices": (), "gpus": (), "shm_bytes": 0}
    check_places(config(device="cpu"), places(cpu, cpu))
    check_places(config(share_gpu=True), places({}, {"devices": ("0",), "shm_bytes": 0}))


def checkpoint(folder, name="w", width=4, seed=0):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": width}))
    torch.manual_seed(seed)
    save_file({name: torch.randn(width, 4)}, folder / "model.safetensors")
    (folder / "notes.txt").write_text(str(folder))
    return str(folder)


def test_digest_tells_checkpoints_apart_without_reading_their_data(tmp_path):
    def digest(target, draft=None):
        return digest_checkpoints(config(1, target=target, draft=draft))

    first = checkpoint(tmp_path / "a")
    assert digest(first) == digest(checkpoint(tmp_path / "b", seed=1))
    others = [
        digest(checkpoint(tmp_path / "c", name="v")),
        digest(checkpoint(tmp_path / "d", width=8)),
        digest(first, draft=first),
        digest(str(tmp_path / "nothing")),
    ]
    short = checkpoint(tmp_path / "e")
    file = tmp_path / "e" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    others.append(digest(short))
    assert len({digest(first), *others}) == 1 + len(others)


def test_free_shared_memory_is_what_the_system_says(monkeypatch):
    assert free_shm_bytes() >= 0
    monkeypatch.setattr("dflash_serve.serve.gang_checks._SHM", "/nowhere")
    assert free_shm_bytes() == 0
