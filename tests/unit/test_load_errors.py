"""What cannot be served is refused before any weight is read, with both values in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import load_pair
from dflash_serve.errors import CapacityError, CheckpointError, ConfigError, PairError
from dflash_serve.parallel.group import Single
from tests.engines import requests, run
from tests.tiny import TinyPair, make_draft
from tests.unit.folders import REMOVED, edit_config
from tests.unit.loading import load, refusal

Copy = Callable[[str], TinyPair]
NESTED = "dflash_config"

SETTINGS = {
    "tp does not divide": ({"tensor_parallel_size": 3, "executor": "mp"}, ["3", "8", "4"]),
    "context too long": ({"max_model_len": 4096}, ["4096", "512"]),
    "verify past block": ({"verify_length": 9}, ["9", "8"]),
    "verify past override": ({"block_size": 4, "verify_length": 5}, ["5", "4"]),
    "vocabulary past head": ({"valid_vocab_size": 321}, ["321", "320"]),
}


@pytest.mark.parametrize(("fields", "shown"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_the_checkpoints_are_refused(
    fields: dict[str, object],
    shown: list[str],
    pristine: dict[str, TinyPair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = refusal(pristine["qwen3"], monkeypatch, **fields)
    assert all(value in text for value in shown), text


def test_cuda_without_a_device_is_refused(
    pristine: dict[str, TinyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no CUDA device" in refusal(pristine["qwen3"], monkeypatch, device="cuda")


def test_fewer_devices_than_ranks_is_refused_with_both_counts(
    pristine: dict[str, TinyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fields = {"device": "cuda", "executor": "mp", "tensor_parallel_size": 4}
    text = refusal(pristine["qwen3"], monkeypatch, **fields)
    assert "4" in text
    assert "2 GPUs" in text


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp8", ""])
def test_unsupported_dtype_is_refused_with_those_allowed(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"float32, bfloat16") as caught:
        EngineConfig(target="t", dtype=dtype)  # type: ignore[arg-type]
    assert repr(dtype) in str(caught.value)


TARGET = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausal"]),
    "no architecture": ({"architectures": None}, ["LlamaForCausalLM"]),
    "quantised": ({"quantization_config": {"bits": 4}}, ["quantization_config", "4"]),
    "biased": ({"attention_bias": True}, ["attention_bias"]),
    "activation": ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    "window": ({"use_sliding_window": True}, ["use_sliding_window"]),
    "window layers": ({"layer_types": ["sliding_attention"] * 4}, ["sliding_attention"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["0.5", "1.0"]),
    "rope kind": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        ["yarn", "llama3"],
    ),
    "no width": ({"hidden_size": REMOVED}, ["hidden_size", "None"]),
    "negative width": ({"hidden_size": -64}, ["hidden_size", "-64"]),
    "heads": ({"num_key_value_heads": 3}, ["8", "3"]),
}


@pytest.mark.parametrize(("fields", "shown"), TARGET.values(), ids=TARGET)
def test_target_options_that_no_path_honours_are_refused_by_name(
    fields: Mapping[str, object], shown: list[str], private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.target), fields)
    text = refusal(pair, monkeypatch)
    assert all(value in text for value in shown), text


DRAFT = {
    "architecture": ({"architectures": ["EagleModel"]}, ["EagleModel", "DFlashDraftModel"]),
    "second generation": ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel"]),
    "speculators": ({"speculators_model_type": "dflash"}, ["speculators", "z-lab"]),
    "convolution": ({f"{NESTED}.conv_kernel_size": 2}, ["conv_kernel_size", "2"]),
    "selector": ({f"{NESTED}.selector_rank": 256}, ["selector_rank", "256"]),
    "anchor first": ({f"{NESTED}.sample_from_anchor": True}, ["sample_from_anchor", "fill-in"]),
    "anchor first, other name": (
        {f"{NESTED}.query_zero_predicts_next": True},
        ["query_zero_predicts_next"],
    ),
    "window": ({f"{NESTED}.use_swa": True}, ["use_swa"]),
    "window layers": ({"layer_types": ["sliding_attention"] * 2}, ["sliding_attention"]),
    "causal": ({"is_causal": True}, ["is_causal"]),
    "sinks": ({f"{NESTED}.attention_sink_bias": True}, ["attention_sink_bias"]),
    "value scale": ({f"{NESTED}.attention_value_scale": 0.5}, ["attention_value_scale", "0.5"]),
    "embedding scale": ({f"{NESTED}.input_embedding_scale": 8.0}, ["input_embedding_scale"]),
    "projector": ({f"{NESTED}.projector_type": "domino"}, ["projector_type", "domino"]),
    "own head": ({"has_lm_head": True}, ["has_lm_head"]),
    "small vocabulary": ({"draft_vocab_size": 100}, ["draft_vocab_size", "100"]),
    "rotation layout": ({"rope_is_neox_style": False}, ["rope_is_neox_style"]),
    "block nowhere": ({"block_size": REMOVED}, ["block_size", "--block-size"]),
    "block zero": ({"block_size": 0}, ["block_size", "0"]),
    "block no integer": ({"block_size": "8"}, ["block_size", "'8'"]),
    "block true": ({"block_size": True}, ["block_size", "True"]),
    "hidden size": ({"hidden_size": 32}, ["hidden_size", "32", "64"]),
    "vocabulary": ({"vocab_size": 384}, ["vocab_size", "384", "320"]),
    "depth": ({"num_target_layers": 6}, ["num_target_layers", "6", "4"]),
}


@pytest.mark.parametrize(("fields", "shown"), DRAFT.values(), ids=DRAFT)
def test_draft_that_cannot_be_served_is_refused_by_name(
    fields: Mapping[str, object], shown: list[str], private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), fields)
    text = refusal(pair, monkeypatch)
    assert all(value in text for value in shown), text


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_mismatched_pair_is_a_pair_error(
    field: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("llama")
    edit_config(Path(pair.draft), {field: 48})
    text = refusal(pair, monkeypatch, PairError)
    assert "48" in text


def test_draft_may_leave_vocabulary_and_depth_to_the_target(private: Copy) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {"vocab_size": REMOVED, "num_target_layers": REMOVED})
    assert load(pair).settings.taps == (0, 2)


@pytest.mark.parametrize("stored", [4, 16, REMOVED], ids=["smaller", "larger", "absent"])
def test_explicit_block_size_wins_over_the_checkpoint(stored: object, private: Copy) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {"block_size": stored})
    geometry = load(pair, block_size=6).settings.geometry
    assert (geometry.block, geometry.rows) == (6, 6)


def test_nested_field_wins_over_the_top_level_one(private: Copy) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {f"{NESTED}.block_size": 5, "mask_token_id": 7})
    settings = load(pair).settings
    assert settings.geometry.block == 5
    assert settings.mask_id == 299


TAPS = {
    "empty": ([], ["[]", "non-empty"]),
    "past the last layer": ([0, 4], ["4", "allowed: 0 to 3"]),
    "negative": ([-1, 2], ["-1", "allowed: 0 to 3"]),
    "twice": ([2, 2], ["[2, 2]", "once"]),
    "descending": ([2, 0], ["[2, 0]", "ascending"]),
    "no integers": ([0, 2.0], ["[0, 2.0]"]),
    "no list": (2, ["2", "list"]),
    "too few": ([2], ["1 layers", "2 taps"]),
    "too many": ([0, 1, 2], ["3 layers", "2 taps"]),
}


@pytest.mark.parametrize(("taps", "shown"), TAPS.values(), ids=TAPS)
def test_tap_list_that_does_not_fit_is_refused(
    taps: object, shown: list[str], private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {f"{NESTED}.target_layer_ids": taps})
    text = refusal(pair, monkeypatch)
    assert all(value in text for value in shown), text


def test_missing_tap_list_is_derived_when_taps_and_draft_layers_are_as_many(
    tmp_path: Path, pristine: dict[str, TinyPair]
) -> None:
    draft = make_draft(tmp_path / "draft", layers=1, taps=(3,))
    edit_config(draft, {f"{NESTED}.target_layer_ids": REMOVED})
    assert load(TinyPair(pristine["qwen3"].target, str(draft))).settings.taps == (2,)


def test_missing_tap_list_is_refused_when_the_derived_one_would_repeat_a_layer(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {f"{NESTED}.target_layer_ids": REMOVED})
    assert "[1, 1]" in refusal(pair, monkeypatch)


def test_missing_tap_list_is_refused_when_its_count_cannot_be_derived(
    tmp_path: Path, pristine: dict[str, TinyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(tmp_path / "draft", taps=(0, 1, 2))
    edit_config(draft, {f"{NESTED}.target_layer_ids": REMOVED})
    text = refusal(TinyPair(pristine["qwen3"].target, str(draft)), monkeypatch)
    assert "3 taps" in text
    assert "2 draft layers" in text


def test_tap_on_the_last_layer_is_served(tmp_path: Path, pristine: dict[str, TinyPair]) -> None:
    draft = make_draft(tmp_path / "draft", taps=(1, 3))
    pair = TinyPair(pristine["qwen3"].target, str(draft))
    config = EngineConfig(target=pair.target, draft=pair.draft, device="cpu", max_model_len=64)
    assert len(run(config, requests([[5, 6, 7]], max_tokens=12)).ids[0]) == 12


def capacity(pair: TinyPair, gib: float, **fields: object) -> EngineConfig:
    settings = {"device": "cpu", "max_model_len": 64, "kv_cache_gib": gib} | fields
    return EngineConfig(target=pair.target, draft=pair.draft, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("length", [64, 500])
def test_smallest_budget_named_by_the_refusal_works_and_less_does_not(
    length: int, page_size: int, pristine: dict[str, TinyPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pristine["llama"]
    fields = {"max_model_len": length, "page_size": page_size}
    with monkeypatch.context() as patch:
        text = refusal(pair, patch, CapacityError, kv_cache_gib=1e-7, **fields)
    assert f"{length} tokens" in text
    named = float(text.split("smallest kv_cache_gib that works is ")[1].split()[0])
    prompt = [3 + i % 200 for i in range(length - 8)]
    outcome = run(capacity(pair, named, **fields), requests([prompt], max_tokens=8))
    assert len(outcome.ids[0]) == 8
    with pytest.raises(CapacityError):
        load_pair(capacity(pair, named - 2e-6, **fields), Single())


@pytest.mark.parametrize("which", ["target", "draft"])
def test_folder_without_a_config_is_refused_by_path(
    which: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    path = Path(getattr(pair, which)) / "config.json"
    path.unlink()
    assert str(path) in refusal(pair, monkeypatch, CheckpointError)


@pytest.mark.parametrize("content", ["{", "[]", "3", "\0"])
def test_config_that_is_no_object_is_refused(
    content: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    path = Path(pair.draft) / "config.json"
    path.write_text(content)
    assert str(path) in refusal(pair, monkeypatch, CheckpointError)


def test_generation_config_that_names_no_end_leaves_the_configs_own(private: Copy) -> None:
    pair = private("qwen3")
    (Path(pair.target) / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load(pair).settings.target.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "valid JSON"), ("[]", "must be an object"), ('{"eos_token_id": "</s>"}', "</s>")],
)
def test_generation_config_that_cannot_be_read_is_refused(
    content: str, named: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    (Path(pair.target) / "generation_config.json").write_text(content)
    assert named in refusal(pair, monkeypatch, ConfigError)


@pytest.mark.parametrize("rope", [{"rope_type": "llama3"}, {"rope_type": "default"}])
def test_rope_number_that_is_missing_or_no_number_is_refused_by_name(
    rope: Mapping[str, object], private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("llama")
    theta = {"rope_theta": "big"} if rope["rope_type"] == "default" else {"rope_theta": 1e4}
    edit_config(Path(pair.target), {"rope_parameters": REMOVED, "rope_scaling": rope, **theta})
    text = refusal(pair, monkeypatch, ConfigError)
    assert ("rope_theta" if rope["rope_type"] == "default" else "factor") in text
