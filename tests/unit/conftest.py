"""Tiny checkpoints shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import TinyPair, make_pair
from tests.unit.folders import copy_of


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    """One pair per target family; never changed."""
    folder = tmp_path_factory.mktemp("pristine")
    return {name: make_pair(folder / name, name) for name in ("llama", "qwen3")}


@pytest.fixture
def private(tmp_path: Path, pristine: dict[str, TinyPair]) -> Callable[[str], TinyPair]:
    """A copy of a family's pair that a test may change."""

    def copy(family: str = "qwen3") -> TinyPair:
        pair = pristine[family]
        target = copy_of(pair.target, tmp_path / family / "target")
        draft = copy_of(pair.draft, tmp_path / family / "draft")
        return TinyPair(str(target), str(draft))

    return copy
