"""The target as plain tensors: feature extraction for training, weights for generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from .fused import add_norm, gate, split_rope
from .ops import rms_norm, rope_tables

ROPE_LENGTH = 2048


@dataclass
class TargetLayer:
    """Weights of one decoder layer, projections fused."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norm_in: Tensor
    norm_post: Tensor


class Target:
    """A Llama-shaped target read from a prepared checkpoint folder."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.device, self.dtype = device, dtype
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config["num_key_value_heads"])
        self.head_dim = int(self.config["head_dim"])
        self.hidden = int(self.config["hidden_size"])
        self.eps = float(self.config["rms_norm_eps"])
        self.theta = float(self.config["rope_parameters"]["rope_theta"])
        self.eos = int(self.config["eos_token_id"])
        raw = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in raw.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.norm = self.weights["model.norm.weight"]
        self.layers = [self._layer(i) for i in range(int(self.config["num_hidden_layers"]))]
        self.cos, self.sin = rope_tables(ROPE_LENGTH, self.head_dim, self.theta, device)

    def _layer(self, index: int) -> TargetLayer:
        def get(name: str) -> Tensor:
            return self.weights[f"model.layers.{index}.{name}.weight"]

        return TargetLayer(
            qkv=torch.cat([get(f"self_attn.{n}_proj") for n in "qkv"]),
            out=get("self_attn.o_proj"),
            gate_up=torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            down=get("mlp.down_proj"),
            norm_in=get("input_layernorm"),
            norm_post=get("post_attention_layernorm"),
        )

    @torch.no_grad()
    def features(self, ids: Tensor, taps: tuple[int, ...]) -> Tensor:
        """Return the residual stream after each tapped layer, ``[N, L, taps * hidden]``."""
        count, length = ids.shape
        cos, sin = self.cos[:length], self.sin[:length]
        x = F.embedding(ids, self.embedding)
        normed = rms_norm(x, self.layers[0].norm_in, self.eps)
        tapped = []
        for index, layer in enumerate(self.layers[: max(taps) + 1]):
            qkv = F.linear(normed, layer.qkv).view(count, length, -1, self.head_dim)
            q, k, v = split_rope(qkv, cos, sin, self.heads, self.kv_heads)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = F.linear(attended.transpose(1, 2).flatten(2), layer.out)
            normed, x = add_norm(mixed, x, layer.norm_post, self.eps)
            mlp = F.linear(gate(F.linear(normed, layer.gate_up)), layer.down)
            following = self.layers[min(index + 1, len(self.layers) - 1)].norm_in
            normed, x = add_norm(mlp, x, following, self.eps)
            if index in taps:
                tapped.append(x)
        return torch.cat(tapped, dim=-1)
