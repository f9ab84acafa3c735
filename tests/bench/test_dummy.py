"""Presets are the public models' shapes, and write one small file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.bench.dummy import DUMMY_DRAFTS, DUMMY_TARGETS, is_dummy, resolve_dummy
from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import prepare
from dflash_serve.errors import ConfigError
from dflash_serve.model_config import DraftConfig, TargetConfig
from dflash_serve.models.dflash import DFlashDraft
from dflash_serve.models.registry import target_class
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.shard import VocabShard

PAIRS = {
    "qwen3-4b": ("qwen3-4b-b16", 16, (1, 9, 17, 25, 33)),
    "qwen3-8b": ("qwen3-8b-b16", 16, (1, 9, 17, 25, 33)),
    "llama-3.1-8b": ("llama-3.1-8b-b10", 10, (1, 8, 15, 22, 29)),
}
LAYERS_GB = {"qwen3-4b": 7.27, "qwen3-8b": 13.89, "qwen3-32b": 62.41, "llama-3.1-8b": 13.96}
HEAD_GB = {"qwen3-4b": 0.78, "qwen3-8b": 1.24, "qwen3-32b": 1.56, "llama-3.1-8b": 1.05}
DRAFT_GB = {"qwen3-4b-b16": 1.07, "qwen3-8b-b16": 2.10, "llama-3.1-8b-b10": 2.35}


def gigabytes(plan: WeightPlan, start: str = "") -> float:
    """Weights whose names begin so, norms included."""
    names = {id(parameter): piece.name for parameter, piece in plan.pieces}
    sizes = {id(p): p.numel() * p.element_size() for p, _ in plan.pieces}
    return sum(sizes[key] for key, name in names.items() if name.startswith(start)) / 1e9


@pytest.fixture
def plan() -> WeightPlan:
    """Collects parameters that take no memory."""
    return WeightPlan(0, 1, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("name", DUMMY_TARGETS)
def test_targets_have_the_published_size(name: str, plan: WeightPlan, tmp_path: Path) -> None:
    config = TargetConfig.load(resolve_dummy(f"dummy:{name}", tmp_path))
    shard = VocabShard.of(config.vocab_size, config.vocab_size, 0, 1)
    target_class(config.family)(config, plan, Single(), shard, (), 16)
    assert gigabytes(plan, "layers.") == pytest.approx(LAYERS_GB[name], abs=0.01)
    assert gigabytes(plan, "embed_tokens.") == pytest.approx(HEAD_GB[name], abs=0.01)
    assert config.tied_head is (name == "qwen3-4b")


@pytest.mark.parametrize("name", DUMMY_DRAFTS)
def test_drafts_have_the_published_size(name: str, plan: WeightPlan, tmp_path: Path) -> None:
    config = DraftConfig.load(resolve_dummy(f"dummy:{name}", tmp_path))
    assert config.taps is not None
    DFlashDraft(config, plan, Single(), len(config.taps), config.model.hidden_size, 16)
    assert gigabytes(plan) == pytest.approx(DRAFT_GB[name], abs=0.01)


@pytest.mark.parametrize("target", PAIRS)
def test_pairs_fit_each_other_with_the_published_block_and_taps(
    target: str, tmp_path: Path
) -> None:
    draft, block, taps = PAIRS[target]
    config = EngineConfig(
        target=str(resolve_dummy(f"dummy:{target}", tmp_path)),
        draft=str(resolve_dummy(f"dummy:{draft}", tmp_path)),
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
    )
    settings, _, _ = prepare(config)
    assert settings.geometry.block == block
    assert settings.taps == taps
    assert settings.draft is not None
    assert len(settings.taps) == settings.draft.model.num_layers == 5


def test_a_preset_writes_its_config_and_nothing_else(tmp_path: Path) -> None:
    names = ["dummy:qwen3-8b", "dummy:qwen3-8b-b16", "dummy:qwen3-8b"]
    folders = [resolve_dummy(name, tmp_path / "new") for name in names]
    assert folders[0] == folders[2]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(written) == sorted({folder / "config.json" for folder in folders})


def test_a_real_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "qwen3-8b" / "config.json"
    path.parent.mkdir()
    path.write_text("{}")
    with pytest.raises(ConfigError, match="another folder"):
        resolve_dummy("dummy:qwen3-8b", tmp_path)
    assert path.read_text() == "{}"


@pytest.mark.parametrize("name", ["dummy:gpt-2", "dummy:", "qwen3-8b"])
def test_an_unknown_name_is_refused_with_those_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_dummy(name, tmp_path)
    assert repr(name) in str(caught.value)
    assert all(f"dummy:{known}" in str(caught.value) for known in (*DUMMY_TARGETS, *DUMMY_DRAFTS))
    assert list(tmp_path.iterdir()) == []


def test_a_preset_is_told_from_a_folder_by_its_start() -> None:
    assert is_dummy("dummy:qwen3-8b")
    assert not is_dummy("/models/dummy:qwen3-8b")
