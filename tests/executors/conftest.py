"""Tiny checkpoints and helpers shared by the tests of this folder."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_serve.config import EngineConfig
from tests.tiny import TinyPair, make_pair


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A Qwen3 pair; never changed."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def config(pair: TinyPair, tmp_path: Path) -> EngineConfig:
    """One rank in this process."""
    return EngineConfig(
        target=pair.target,
        draft=pair.draft,
        device="cpu",
        max_model_len=256,
        max_running=4,
        record_dir=str(tmp_path / "records"),
    )


@pytest.fixture
def two_ranks(config: EngineConfig) -> EngineConfig:
    """Two ranks as child processes."""
    return dataclasses.replace(config, executor="mp", tensor_parallel_size=2)


@pytest.fixture
def run_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that engines make their run folders in; socket paths must stay short."""
    folder = tempfile.mkdtemp(prefix="t-")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder)
    monkeypatch.undo()
    shutil.rmtree(folder)
