"""Tiny random checkpoints, written with transformers and safetensors, float32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

__all__ = ["TinyPair", "make_draft", "make_pair", "make_target"]

VOCAB = 320
VALID_VOCAB = 300
MASK_ID = 299


@dataclasses.dataclass(frozen=True)
class TinyPair:
    """Folders of a random target and its random draft."""

    target: str
    draft: str


def make_pair(
    folder: Path, family: str = "qwen3", *, block: int = 8, seed: int = 0, vocab: int = VOCAB
) -> TinyPair:
    """A target of 4 layers (8 heads, 4 key heads, hidden 64) and a 2-layer draft."""
    target = make_target(folder / "target", family, seed=seed, vocab=vocab)
    draft = make_draft(folder / "draft", block=block, seed=seed + 1, vocab=vocab)
    return TinyPair(str(target), str(draft))


def make_target(folder: Path, family: str, *, seed: int = 0, vocab: int = VOCAB) -> Path:
    """A random target; weights are scaled up so that logits have clear winners."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.08,
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = 1
    model.float().save_pretrained(folder, safe_serialization=True)
    return folder


def make_draft(
    folder: Path,
    *,
    block: int = 8,
    layers: int = 2,
    taps: tuple[int, ...] = (0, 2),
    seed: int = 1,
    vocab: int = VOCAB,
    config: dict[str, object] | None = None,
) -> Path:
    """A random draft in the public DFlash format; `config` overrides fields of config.json."""
    generator = torch.Generator().manual_seed(seed)
    hidden, wide, heads, kv, width = 64, 96, 8, 4, 16

    def matrix(*shape: int) -> torch.Tensor:
        return 0.08 * torch.randn(shape, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(taps) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(layers):
        p = f"layers.{i}"
        tensors |= {
            f"{p}.input_layernorm.weight": norm(hidden),
            f"{p}.post_attention_layernorm.weight": norm(hidden),
            f"{p}.self_attn.q_proj.weight": matrix(heads * width, hidden),
            f"{p}.self_attn.k_proj.weight": matrix(kv * width, hidden),
            f"{p}.self_attn.v_proj.weight": matrix(kv * width, hidden),
            f"{p}.self_attn.o_proj.weight": matrix(hidden, heads * width),
            f"{p}.self_attn.q_norm.weight": norm(width),
            f"{p}.self_attn.k_norm.weight": norm(width),
            f"{p}.mlp.gate_proj.weight": matrix(wide, hidden),
            f"{p}.mlp.up_proj.weight": matrix(wide, hidden),
            f"{p}.mlp.down_proj.weight": matrix(hidden, wide),
        }
    fields: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block,
        "dflash_config": {
            "mask_token_id": min(MASK_ID, vocab - 1),
            "target_layer_ids": list(taps),
        },
        "num_target_layers": 4,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    fields |= config or {}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return folder
