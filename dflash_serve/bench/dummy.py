"""Shapes of public checkpoints by name, to measure speed with where no checkpoint is at hand.

A preset is a config.json for `load_format: dummy`. With random weights a step costs what it costs
with the real ones; only the number of accepted drafts says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_serve.errors import ConfigError

__all__ = ["DUMMY_DRAFTS", "DUMMY_TARGETS", "PREFIX", "is_dummy", "resolve_dummy"]

PREFIX = "dummy:"
"""Start of a name that means a preset rather than a folder."""

Fields = Mapping[str, Any]


def _target(
    base: Fields, *, layers: int, hidden: int, wide: int, heads: int = 32, tied: bool = False
) -> Fields:
    """A target of a family; every one of them has 8 key heads of 128."""
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


_QWEN3: Fields = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

_LLAMA: Fields = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

DUMMY_TARGETS: Mapping[str, Fields] = MappingProxyType(
    {
        "qwen3-4b": _target(_QWEN3, layers=36, hidden=2560, wide=9728, tied=True),
        "qwen3-8b": _target(_QWEN3, layers=36, hidden=4096, wide=12288),
        "qwen3-32b": _target(_QWEN3, layers=64, hidden=5120, wide=25600, heads=64),
        "llama-3.1-8b": _target(_LLAMA, layers=32, hidden=4096, wide=14336),
    }
)
"""config.json of targets."""


def _draft(target: str, taps: list[int], *, mask_id: int, **fields: int) -> Fields:
    """A draft of five layers, each as wide as the target's; `fields` stand beside them."""
    base = DUMMY_TARGETS[target]
    left_out = {"rope_scaling", "bos_token_id", "eos_token_id"}
    return {
        **{name: value for name, value in base.items() if name not in left_out},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": base["num_hidden_layers"],
        "tie_word_embeddings": False,
        **fields,
        "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": taps},
    }


DUMMY_DRAFTS: Mapping[str, Fields] = MappingProxyType(
    {
        "qwen3-4b-b16": _draft("qwen3-4b", [1, 9, 17, 25, 33], mask_id=151669, block_size=16),
        "qwen3-8b-b16": _draft("qwen3-8b", [1, 9, 17, 25, 33], mask_id=151669, block_size=16),
        # Width and mask token of this one are not published; a reserved token stands in.
        "llama-3.1-8b-b10": _draft(
            "llama-3.1-8b", [1, 8, 15, 22, 29], mask_id=128002, block_size=10
        ),
    }
)
"""config.json of drafts; the end of a name is the block."""


def is_dummy(name: str) -> bool:
    """Whether a model name means a preset."""
    return name.startswith(PREFIX)


def resolve_dummy(name: str, folder: str | Path) -> Path:
    """Write a preset's config.json, and nothing else, below a folder.

    Args:
        name: "dummy:" and a key of DUMMY_TARGETS or DUMMY_DRAFTS.
        folder: the caller's; made when it does not exist.

    Returns:
        the sub-folder with the preset's name that holds the file, for `EngineConfig.target` or
        `draft` together with `load_format="dummy"`. Several presets can share `folder`.

    Raises:
        ConfigError: an unknown name, or a sub-folder that holds another checkpoint's config.json.
    """
    key = name.removeprefix(PREFIX)
    fields = {**DUMMY_TARGETS, **DUMMY_DRAFTS}.get(key)
    if fields is None or not is_dummy(name):
        raise ConfigError(
            f"{name!r} is no dummy model; targets: {_listing(DUMMY_TARGETS)}; "
            f"drafts: {_listing(DUMMY_DRAFTS)}"
        )
    path = Path(folder) / key / "config.json"
    text = json.dumps(fields, indent=1)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(f"{path} exists and is not that of {name}; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.parent


def _listing(presets: Mapping[str, Fields]) -> str:
    return ", ".join(PREFIX + name for name in presets)
