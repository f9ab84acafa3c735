"""Our targets against transformers' on the same random checkpoint, float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_serve.model_config import TargetConfig
from tests.models.forward import load_reference, load_target, run_target
from tests.tiny import VOCAB, TinyPair, make_draft, make_target

LAYERS = 4
HIDDEN = 64


def random_ids(batch: int = 2, length: int = 45) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("chunk", "length"), [(45, 45), (16, 45), (7, 45), (1, 13)])
def test_logits_equal_transformers(
    family: str, chunk: int, length: int, pairs: dict[str, TinyPair]
) -> None:
    ids = random_ids(length=length)
    with torch.inference_mode():
        expected = load_reference(pairs[family].target)(ids).logits
    logits, _ = run_target(load_target(pairs[family].target), ids, chunk)
    assert (logits - expected).abs().max() < 1e-4


def hidden_states(folder: str, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """transformers' `hidden_states`, and the last layer's output before the final norm."""
    model = load_reference(folder)
    last: list[Tensor] = []

    def keep(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    model.model.layers[-1].register_forward_hook(keep)
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states
    return list(states), last[0]


def check_taps(family: str, folder: Path) -> None:
    """Tap every layer at once and compare each with the reference stream after that layer."""
    target = str(make_target(folder / "target", family, seed=2))
    draft = str(make_draft(folder / "draft", taps=tuple(range(LAYERS))))
    ids = random_ids()
    states, last = hidden_states(target, ids)
    _, taps = run_target(load_target(target, draft), ids, chunk=16)
    assert taps is not None
    for layer, tap in enumerate(taps.split(HIDDEN, dim=-1)):
        reference = states[layer + 1] if layer < LAYERS - 1 else last
        assert (tap - reference).abs().max() < 1e-5, f"tap {layer} of {family}"
    # The reference's own last entry is after the final norm; the tap must not be.
    assert (taps[..., -HIDDEN:] - states[-1]).abs().max() > 1e-2


def test_llama_tap_is_the_stream_after_its_layer_before_any_norm(tmp_path: Path) -> None:
    check_taps("llama", tmp_path)


def test_qwen3_tap_is_the_stream_after_its_layer_before_any_norm(tmp_path: Path) -> None:
    check_taps("qwen3", tmp_path)


def llama3_scaled(folder: Path) -> str:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.08,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    LlamaForCausalLM(config).float().save_pretrained(folder, safe_serialization=True)
    return str(folder)


def test_llama3_rope_scaling_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    folder = llama3_scaled(tmp_path / "scaled")
    ids = random_ids(1, 120) % 64
    with torch.inference_mode():
        expected = load_reference(folder)(ids).logits
    logits, _ = run_target(load_target(folder), ids, chunk=32)
    assert (logits - expected).abs().max() < 1e-4


def test_tied_head_is_the_embedding_itself(pairs: dict[str, TinyPair]) -> None:
    target = load_target(pairs["qwen3"].target).target
    assert target.head.weight is target.embed.weight


def test_untied_head_has_its_own_rows(pairs: dict[str, TinyPair]) -> None:
    target = load_target(pairs["llama"].target).target
    assert not torch.equal(target.head.weight, target.embed.weight)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_head_is_untied_when_the_config_does_not_say(
    family: str, pairs: dict[str, TinyPair], tmp_path: Path
) -> None:
    fields = json.loads((Path(pairs[family].target) / "config.json").read_text())
    fields.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert TargetConfig.load(tmp_path).tied_head is False
