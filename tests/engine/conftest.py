"""Tiny pairs shared by the engine tests."""

from __future__ import annotations

import pytest
import torch

from tests.engine.harness import Harness
from tests.tiny import TinyPair, make_pair


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products lose time in more threads than one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    """One random pair per target family."""
    folder = tmp_path_factory.mktemp("pairs")
    return {family: make_pair(folder / family, family) for family in ("qwen3", "llama")}


@pytest.fixture(scope="session")
def pair(pairs: dict[str, TinyPair]) -> TinyPair:
    """The Qwen3 pair, block 8."""
    return pairs["qwen3"]


@pytest.fixture(scope="session")
def harness(pairs: dict[str, TinyPair], tmp_path_factory: pytest.TempPathFactory) -> Harness:
    """Plain decoding of both pairs, computed once."""
    return Harness(pairs, tmp_path_factory.mktemp("harness"))
