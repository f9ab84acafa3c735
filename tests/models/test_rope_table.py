"""The rope table against transformers' inverse frequencies."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.rope import rope_table
from dflash_serve.model_config import RopeConfig

LENGTH = 700
CPU = torch.device("cpu")


def reference(parameters: dict[str, object], head_dim: int) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=LENGTH,
        rope_parameters=parameters,
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(LENGTH)[None])
    half = head_dim // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_default_table_equals_transformers(theta: float, head_dim: int) -> None:
    table = rope_table(RopeConfig(theta=theta), head_dim, LENGTH, CPU)
    expected = reference({"rope_type": "default", "rope_theta": theta}, head_dim)
    assert (table - expected).abs().max() < 1e-4


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama3_table_equals_transformers(factor: float, original: int) -> None:
    assert "llama3" in ROPE_INIT_FUNCTIONS
    scaled = RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=original,
    )
    expected = reference(
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        64,
    )
    table = rope_table(scaled, 64, LENGTH, CPU)
    assert (table - expected).abs().max() < 1e-4
    plain = rope_table(RopeConfig(theta=500000.0), 64, LENGTH, CPU)
    assert (table - plain).abs().max() > 1e-2


def test_other_scaling_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'yarn'.*llama3"):
        rope_table(RopeConfig(theta=1e4, scaling="yarn"), 16, 8, CPU)
