"""Tensors missing, left over, cut off, misshapen or of another kind are refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.errors import CheckpointError, ConfigError, PairError
from tests.tiny import TinyPair, make_draft
from tests.unit.folders import edit_config, edit_tensors
from tests.unit.loading import load, refusal

Copy = Callable[[str], TinyPair]
Tensors = dict[str, Tensor]


def some_names(folder: str) -> list[str]:
    """A name of each kind: one layer's tensors and those outside the layers."""
    names = load_file(Path(folder) / "model.safetensors")
    return sorted(n for n in names if "layers." not in n or "layers.1." in n)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_tensor_is_missed_by_name(
    family: str, which: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private(family)
    folder = Path(getattr(pair, which))
    whole = load_file(folder / "model.safetensors")
    for name in some_names(str(folder)):
        save_file({n: t for n, t in whole.items() if n != name}, folder / "model.safetensors")
        kind = PairError if name == "fc.weight" else CheckpointError
        assert name.removeprefix("model.") in refusal(pair, monkeypatch, kind)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_renamed_tensor_is_refused_with_the_name_that_is_missing(
    which: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("llama")

    def rename(tensors: Tensors) -> None:
        old = next(n for n in tensors if n.endswith("layers.0.self_attn.k_proj.weight"))
        tensors[old.replace("k_proj", "key_proj")] = tensors.pop(old)

    edit_tensors(Path(getattr(pair, which)), rename)
    text = refusal(pair, monkeypatch, CheckpointError)
    assert "layers.0.self_attn.k_proj.weight" in text


EXTRA = {
    "target": ["layers.0.self_attn.q_proj.bias", "layers.4.mlp.up_proj.weight", "score.weight"],
    "draft": [
        "lm_head.weight",
        "embed_tokens.weight",
        "d2t",
        "t2d",
        "prefix_gru.weight_ih_l0",
        "layers.0.self_attn.attention_sink_bias",
        "layers.2.input_layernorm.weight",
    ],
}


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which, names in EXTRA.items() for name in names]
)
def test_tensor_that_no_parameter_claims_is_refused_by_name(
    which: str, name: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_tensors(Path(getattr(pair, which)), lambda t: t.update({name: torch.zeros(2)}))
    assert name in refusal(pair, monkeypatch, CheckpointError)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_rotary_cache_is_the_only_tensor_ignored(which: str, private: Copy) -> None:
    pair = private("qwen3")
    cache = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    edit_tensors(Path(getattr(pair, which)), lambda t: t.update(cache))
    load(pair)


MISSHAPEN = {
    "target": ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"],
    "draft": ["layers.0.self_attn.q_norm.weight", "layers.1.self_attn.v_proj.weight"],
}


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which, names in MISSHAPEN.items() for name in names]
)
def test_misshapen_tensor_is_refused_with_both_shapes(
    which: str, name: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    folder = Path(getattr(pair, which))
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    edit_tensors(folder, lambda t: t.update({name: t[name][1:]}))
    text = refusal(pair, monkeypatch, CheckpointError)
    assert name.removeprefix("model.") in text
    assert str(shape) in text
    assert str([shape[0] - 1, *shape[1:]]) in text


@pytest.mark.parametrize("width", [63, 65, 32, 100])
def test_projection_that_is_no_whole_number_of_taps_wide_is_refused(
    width: int, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_tensors(Path(pair.draft), lambda t: t.update({"fc.weight": torch.zeros(64, width)}))
    text = refusal(pair, monkeypatch, PairError)
    assert str([64, width]) in text
    assert "hidden_size, 64" in text


def test_projection_of_another_rank_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    for shape in ((128,), (), (64, 2, 64)):
        edit_tensors(Path(pair.draft), lambda t, s=shape: t.update({"fc.weight": torch.zeros(s)}))
        assert str(list(shape)) in refusal(pair, monkeypatch, PairError)


def test_draft_of_another_head_width_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_config(Path(pair.draft), {"head_dim": 8})
    assert "[64, 64]" in refusal(pair, monkeypatch, CheckpointError)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=lambda n: f"first{n}")
def test_truncated_file_is_refused_by_path(
    keep: int, which: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    path = Path(getattr(pair, which)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(pair, monkeypatch, CheckpointError)


@pytest.mark.parametrize("which", ["target", "draft"])
def test_pickled_weights_are_never_read(
    which: str, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    folder = Path(getattr(pair, which))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(pair, monkeypatch, CheckpointError)
    assert "pytorch_model.bin" in text
    assert "safetensors" in text


def test_the_same_tensor_in_two_files_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    path = Path(pair.target) / "model.safetensors"
    shutil.copy(path, path.with_name("zz-consolidated.safetensors"))
    text = refusal(pair, monkeypatch, CheckpointError)
    assert "twice" in text
    assert "zz-consolidated" in text


def test_the_same_tensor_under_two_names_is_refused(
    private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("qwen3")
    edit_tensors(Path(pair.draft), lambda t: t.update({"model.norm.weight": torch.ones(64)}))
    assert "norm.weight" in refusal(pair, monkeypatch, CheckpointError)


def test_checkpoint_in_several_files_loads_whole(private: Copy) -> None:
    pair = private("qwen3")
    path = Path(pair.target) / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    path.unlink()
    for part in range(3):
        some = {n: tensors[n].clone() for n in names[part::3]}
        save_file(some, path.with_name(f"model-{part}.safetensors"))
    target = load(pair).target
    assert torch.equal(target.embed.weight, tensors["model.embed_tokens.weight"])


def test_draft_names_may_begin_with_model(private: Copy, pristine: dict[str, TinyPair]) -> None:
    pair = private("qwen3")

    def prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    edit_tensors(Path(pair.draft), prefix)
    renamed, plain = load(pair).draft, load(pristine["qwen3"]).draft
    assert renamed is not None
    assert plain is not None
    assert torch.equal(renamed.kv_weight, plain.kv_weight)
    assert torch.equal(renamed.fc, plain.fc)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("draft", "layers.0.self_attn.q_proj.weight"),
        ("target", "lm_head.weight"),
        ("target", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_quantised_tensor_is_refused_by_name_and_type(
    which: str, name: str, stored: torch.dtype, private: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = private("llama")
    edit_tensors(Path(getattr(pair, which)), lambda t: t.update({name: t[name].to(stored)}))
    text = refusal(pair, monkeypatch, CheckpointError)
    assert name.removeprefix("model.") in text
    assert "BF16, F16, F32" in text


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_weights_take_the_engines_type_whatever_the_config_calls_theirs(
    stored: torch.dtype, key: str | None, private: Copy
) -> None:
    pair = private("qwen3")
    edit_tensors(Path(pair.target), lambda t: t.update({n: v.to(stored) for n, v in t.items()}))
    edit_config(Path(pair.target), {"dtype": None} if key is None else {key: "bfloat16"})
    for dtype in ("float32", "bfloat16"):
        loaded = load(pair, dtype=dtype)
        assert str(loaded.target.norm.dtype) == f"torch.{dtype}"
        assert str(loaded.target_kv.layers[0][0].dtype) == f"torch.{dtype}"


def test_tied_target_without_a_head_uses_its_embedding(pristine: dict[str, TinyPair]) -> None:
    target = load(pristine["qwen3"]).target
    assert target.head.weight.data_ptr() == target.embed.weight.data_ptr()


def test_tied_target_may_store_its_head_again(private: Copy) -> None:
    pair = private("qwen3")
    edit_tensors(
        Path(pair.target),
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    target = load(pair).target
    assert target.head.weight is target.embed.weight


@pytest.mark.parametrize("rows", [320, 319])
def test_tied_target_with_another_head_is_refused(rows: int, private: Copy) -> None:
    pair = private("qwen3")
    edit_tensors(Path(pair.target), lambda t: t.update({"lm_head.weight": torch.zeros(rows, 64)}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings: true"):
        load(pair)


def test_untied_target_keeps_two_matrices(pristine: dict[str, TinyPair]) -> None:
    target = load(pristine["llama"]).target
    assert target.head.weight.data_ptr() != target.embed.weight.data_ptr()


def test_padded_vocabulary_is_shared_with_a_draft_that_names_the_same_padding(
    tmp_path: Path, pristine: dict[str, TinyPair]
) -> None:
    draft = make_draft(tmp_path / "draft")
    pair = TinyPair(pristine["llama"].target, str(draft))
    loaded = load(pair, valid_vocab_size=300)
    assert loaded.target.head.shard.valid == 300
    assert loaded.target.head.weight.shape[0] == 320


def test_refusals_are_config_errors_a_caller_can_catch_as_one() -> None:
    assert issubclass(CheckpointError, ConfigError)
    assert issubclass(PairError, ConfigError)
