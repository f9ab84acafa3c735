"""One Ray for all tests of this folder, and helpers that look at what is left on the host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fake_rank import VOCABULARY
from .waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def ray_cluster():
    """A local Ray with eight logical CPUs, without the dashboard; ends with the session."""
    import ray

    # A temporary folder of its own, with a short name: Ray puts sockets deep into it. What
    # other engines of this user leave elsewhere is then none of these tests' business.
    folder = tempfile.mkdtemp(prefix="dfs-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        # Workers import the stand-ins of this folder; they inherit the variable from the raylet.
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield ray
        ray.shutdown()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def fake_target(tmp_path_factory) -> str:
    """What a replica over stand-in ranks needs of a checkpoint: a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "fake"
    folder.mkdir()
    write_tokenizer(folder, VOCABULARY)
    return str(folder)


def write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of words "t0", "t1", …, with a chat template that writes the contents only."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def node(ray, cpus: int) -> Iterator[subprocess.Popen]:
    """A node beside the head, at the same address, run by `ray start --block`."""
    address = ray.get_runtime_context().gcs_address
    before = len(alive(ray))
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    command += [f"--address={address}", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(alive(ray)) > before, "the node is there", 60)
        yield process
    finally:
        process.terminate()
        process.wait(60)
        until(lambda: len(alive(ray)) <= before, "the node is gone", 90)


def alive(ray) -> list[dict]:
    """Nodes that Ray takes for alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def placement_groups(ray) -> int:
    """Placement groups that exist now."""
    table = ray.util.placement_group_table()
    return sum(group["state"] != "REMOVED" for group in table.values())


def run_dirs() -> set[str]:
    """Socket folders of this user's engines."""
    parent = Path(tempfile.gettempdir()) / f"dflash-serve-{os.getuid()}"
    return {path.name for path in parent.iterdir()} if parent.exists() else set()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
