"""Engines without a checkpoint's tensors: what is random, what is the same, and who is told."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.api.info import server_info
from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import EngineInfo, EngineStats
from dflash_serve.engine.pair import prepare
from dflash_serve.errors import CheckpointError, ConfigError
from dflash_serve.model_config import DraftConfig, TargetConfig
from dflash_serve.models.dflash import DFlashDraft
from dflash_serve.models.loader import Checkpoint, load_dummy
from dflash_serve.models.registry import target_class
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.shard import VocabShard
from tests.api.fakes import engine_info
from tests.engines import Outcome, requests, start
from tests.tiny import TinyPair
from tests.unit.folders import REMOVED, edit_config
from tests.unit.loading import load

Copy = Callable[[str], TinyPair]
PROMPTS = [[5, 6, 7, 8], [9, 3]]


@pytest.fixture
def bare(private: Copy) -> TinyPair:
    """A pair of folders with their configs alone."""
    pair = private("qwen3")
    for folder in (pair.target, pair.draft):
        for path in Path(folder).glob("*.safetensors"):
            path.unlink()
    return pair


def outcome(pair: TinyPair, **fields: object) -> tuple[Outcome, EngineInfo]:
    """A few sampled tokens of a dummy engine, and what it says about itself."""
    settings = {"device": "cpu", "max_model_len": 64, "load_format": "dummy"} | fields
    engine = start(EngineConfig(target=pair.target, draft=pair.draft, **settings))  # type: ignore[arg-type]
    try:
        events = list(engine.collect(requests(PROMPTS, max_tokens=12, temperature=1.0)).values())
        ids = [[token for event in mine for token in event.token_ids] for mine in events]
        return Outcome(ids, events, engine.stats), engine.info
    finally:
        engine.shutdown()


def test_a_pair_without_tensors_runs_and_always_gives_the_same_ids(bare: TinyPair) -> None:
    first, info = outcome(bare)
    second, _ = outcome(bare)
    assert first.ids == second.ids
    assert all(len(ids) == 12 for ids in first.ids)
    assert sum(event.drafted for events in first.events for event in events) > 0
    assert info.dummy_weights


def test_speculation_with_dummy_weights_changes_no_id(bare: TinyPair) -> None:
    drafted, _ = outcome(bare)
    plain, _ = outcome(dataclasses.replace(bare, draft=None))  # type: ignore[arg-type]
    assert drafted.ids == plain.ids


def test_tensors_that_are_there_stay_unread(
    pristine: dict[str, TinyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(_self: Checkpoint, folder: str) -> None:
        raise AssertionError(f"{folder} was opened")

    monkeypatch.setattr(Checkpoint, "__init__", opened)
    for pair in pristine.values():
        assert load(pair, load_format="dummy").weight_bytes > 0


def test_a_folder_without_tensors_is_refused_unless_dummy_is_asked_for(bare: TinyPair) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(bare)


def test_a_start_with_random_weights_is_logged(
    bare: TinyPair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dflash_serve"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        load(bare, load_format="dummy")
    assert any("weights are random" in record.message for record in caplog.records)


@pytest.mark.parametrize("dummies", [[], [False], [True], [False, True]], ids=str)
def test_server_info_says_whether_any_replica_has_random_weights(dummies: list[bool]) -> None:
    statuses = [
        ReplicaStatus(
            model="m",
            replica=str(index),
            config={},
            info=engine_info(dummy_weights=dummy),
            stats=EngineStats(),
            outstanding=0,
            step_age_s=0.0,
        )
        for index, dummy in enumerate(dummies)
    ]
    shown = server_info(["m"], statuses)
    assert shown["dummy_weights"] is any(dummies)
    assert [replica["engine"]["dummy_weights"] for replica in shown["replicas"]] == dummies


# -- refusals -----------------------------------------------------------------------------------


def dummy_config(pair: TinyPair) -> EngineConfig:
    return EngineConfig(target=pair.target, draft=pair.draft, device="cpu", load_format="dummy")


def test_a_draft_that_lists_no_taps_is_refused(bare: TinyPair) -> None:
    edit_config(Path(bare.draft), {"dflash_config.target_layer_ids": REMOVED})
    with pytest.raises(ConfigError, match="target_layer_ids"):
        prepare(dummy_config(bare))


def test_taps_past_the_target_are_refused(bare: TinyPair) -> None:
    edit_config(Path(bare.draft), {"dflash_config.target_layer_ids": [0, 9]})
    with pytest.raises(ConfigError, match="9"):
        prepare(dummy_config(bare))


# -- values -------------------------------------------------------------------------------------


class Rank(Single):
    """A group that says it is one of several; its collectives are never called here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def fill(pair: TinyPair, rank: int = 0, size: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """One rank's slices by tensor name."""
    plan = WeightPlan(rank, size, torch.float32, torch.device("cpu"))
    config, group = TargetConfig.load(pair.target), Rank(rank, size)
    shard = VocabShard.of(config.vocab_size, config.vocab_size, rank, size)
    target_class(config.family)(config, plan, group, shard, (0, 2), 16)
    DFlashDraft(DraftConfig.load(pair.draft), plan, group, 2, config.model.hidden_size, 16)
    load_dummy(plan, seed)
    return {piece.name: parameter[piece.into] for parameter, piece in plan.pieces}


def test_matrices_are_small_and_norms_are_one(pristine: dict[str, TinyPair]) -> None:
    for name, values in fill(pristine["qwen3"]).items():
        if values.dim() == 1:
            assert bool((values == 1).all()), name
        else:
            assert float(values.std()) == pytest.approx(1e-3 / 3**0.5, rel=0.1), name
            assert float(values.abs().max()) <= 1e-3, name
            assert abs(float(values.mean())) < 1e-4, name


def test_matrices_differ_from_each_other_and_between_seeds(pristine: dict[str, TinyPair]) -> None:
    first, second = fill(pristine["qwen3"]), fill(pristine["qwen3"], seed=1)
    gate, up = first["layers.0.mlp.gate_proj.weight"], first["layers.0.mlp.up_proj.weight"]
    assert not torch.equal(gate, up)
    assert not torch.equal(gate, first["layers.1.mlp.gate_proj.weight"])
    assert not torch.equal(gate, second["layers.0.mlp.gate_proj.weight"])


def test_layers_of_target_and_draft_differ(bare: TinyPair) -> None:
    edit_config(Path(bare.draft), {"dflash_config.target_layer_ids": [0, 2]})
    pair = load(bare, load_format="dummy")
    assert pair.draft is not None
    mine, theirs = pair.target.layers[0].attention.qkv, pair.draft.layers[0].attention.qkv
    assert mine.shape == theirs.shape
    assert not torch.equal(mine, theirs)


def test_ranks_hold_the_same_values_exactly_where_they_hold_the_same_slice(
    pristine: dict[str, TinyPair],
) -> None:
    first, second = (fill(pristine["qwen3"], rank, 8) for rank in (0, 1))
    shared = ["fc.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"]
    for name in shared:  # 8 ranks share 4 key heads
        assert torch.equal(first[name], second[name]), name
    for name in ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight"):
        assert not torch.equal(first[name], second[name]), name
