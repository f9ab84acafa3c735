"""Llama: rotary grouped-query attention, gated SiLU MLP, RMSNorm before each."""

from __future__ import annotations

from dflash_serve.models.decoder import DenseDecoder

__all__ = ["Llama"]


class Llama(DenseDecoder):
    """LlamaForCausalLM. `model_config` leaves q and k without a norm for this family."""
