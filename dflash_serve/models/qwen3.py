"""Qwen3 (dense): Llama's layer with an RMSNorm on every query and key head before the rotation."""

from __future__ import annotations

from dflash_serve.models.decoder import DenseDecoder

__all__ = ["Qwen3"]


class Qwen3(DenseDecoder):
    """Qwen3ForCausalLM. `model_config` sets `qk_norm` for this family."""
