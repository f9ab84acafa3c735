"""Pairs for comparison with public implementations."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import TinyPair, make_pair

VOCAB = 12  # few ids, so that a random draft is right often enough for blocks of all lengths


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products lose time in more threads than one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    """Pairs by name: two families with few ids, one with many."""
    folder = tmp_path_factory.mktemp("parity")
    return {
        "qwen3": make_pair(folder / "qwen3", "qwen3", vocab=VOCAB, seed=2),
        "llama": make_pair(folder / "llama", "llama", vocab=VOCAB, seed=6, block=5),
        "wide": make_pair(folder / "wide", "qwen3"),
    }
