"""Tiny checkpoints shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import TinyPair, make_pair


@pytest.fixture(scope="package")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    """One pair per target family."""
    folder: Path = tmp_path_factory.mktemp("pairs")
    return {name: make_pair(folder / name, name) for name in ("llama", "qwen3")}
