"""The draft in the form that trains: many blocks of one conversation in one pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .ops import norm_rope, rms_norm, rope_tables, swiglu
from .settings import MASK_TOKEN_ID, DraftSettings
from .target import ROPE_LENGTH, Target

PUBLIC_GROUPS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp."),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DraftLayer(nn.Module):
    """One Qwen3-style layer whose keys and values also come from the context."""

    def __init__(self, target: Target, intermediate: int) -> None:
        super().__init__()
        hidden, dim = target.hidden, target.head_dim
        self.heads, self.kv_heads, self.head_dim, self.eps = (
            target.heads,
            target.kv_heads,
            dim,
            target.eps,
        )
        self.q_proj = nn.Parameter(torch.empty(self.heads * dim, hidden))
        self.k_proj = nn.Parameter(torch.empty(self.kv_heads * dim, hidden))
        self.v_proj = nn.Parameter(torch.empty(self.kv_heads * dim, hidden))
        self.o_proj = nn.Parameter(torch.empty(hidden, self.heads * dim))
        self.gate_proj = nn.Parameter(torch.empty(intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, intermediate))
        self.q_norm = nn.Parameter(torch.ones(dim))
        self.k_norm = nn.Parameter(torch.ones(dim))
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))

    def forward(
        self, x: Tensor, context: Tensor, tables: tuple[Tensor, ...], attend: Attend
    ) -> Tensor:
        """Run block rows ``x [N, Q, H]`` over ``context [N, L, H]``."""
        cos_q, sin_q, cos_k, sin_k = tables
        dtype, dim, length = x.dtype, self.head_dim, context.shape[1]
        fixed = self.training
        normed = rms_norm(x, self.input_layernorm, self.eps, fixed=fixed)
        q = F.linear(normed, self.q_proj.to(dtype)).unflatten(-1, (self.heads, dim))
        kv_weight = torch.cat((self.k_proj, self.v_proj)).to(dtype)
        kv = torch.cat((F.linear(context, kv_weight), F.linear(normed, kv_weight)), dim=1)
        k, v = kv.unflatten(-1, (2 * self.kv_heads, dim)).chunk(2, dim=2)
        cos_all = torch.cat((cos_k.expand(x.shape[0], length, -1), cos_q), dim=1)
        sin_all = torch.cat((sin_k.expand(x.shape[0], length, -1), sin_q), dim=1)
        q = norm_rope(q, self.q_norm, cos_q, sin_q, self.eps)
        k = norm_rope(k, self.k_norm, cos_all, sin_all, self.eps)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.o_proj.to(dtype))
        normed = rms_norm(x, self.post_attention_layernorm, self.eps, fixed=fixed)
        gate_up = F.linear(normed, torch.cat((self.gate_proj, self.up_proj)).to(dtype))
        return x + F.linear(swiglu(gate_up, fixed=fixed), self.down_proj.to(dtype))


class Draft(nn.Module):
    """DFlash draft: projection of tapped features, a few layers, a final norm."""

    feature_scale: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, target: Target, settings: DraftSettings) -> None:
        super().__init__()
        self.settings = settings
        self.eps, self.heads = target.eps, target.heads
        width = len(settings.target_layer_ids) * target.hidden
        self.fc = nn.Parameter(torch.empty(target.hidden, width))
        self.hidden_norm = nn.Parameter(torch.ones(target.hidden))
        self.norm = nn.Parameter(torch.ones(target.hidden))
        self.layers = nn.ModuleList(
            DraftLayer(target, settings.intermediate_size) for _ in range(settings.layers)
        )
        self.register_buffer("feature_scale", torch.ones(width))
        cos, sin = rope_tables(ROPE_LENGTH, target.head_dim, target.theta, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self, features: Tensor, embedding: Tensor, anchor_ids: Tensor, anchors: Tensor
    ) -> Tensor:
        """Return final hidden rows ``[N, A, B, H]`` for blocks that start at ``anchors [N, A]``."""
        count, blocks = anchors.shape
        size, length = self.settings.block_size, features.shape[1]
        scaled = features * self.feature_scale.to(features.dtype)
        context = rms_norm(F.linear(scaled, self.fc.to(features.dtype)), self.hidden_norm, self.eps)
        ids = torch.full((count, blocks, size), MASK_TOKEN_ID, device=anchors.device)
        ids[:, :, 0] = anchor_ids
        x = F.embedding(ids.flatten(1), embedding)
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        tables = (
            self.cos[positions],
            self.sin[positions],
            self.cos[None, :length],
            self.sin[None, :length],
        )
        attend = block_attention(anchors, length, size, self.heads)
        for layer in self.layers:
            x = layer(x, context, tables, attend)
        return rms_norm(x, self.norm, self.eps).unflatten(1, (blocks, size))


def block_attention(anchors: Tensor, length: int, size: int, heads: int) -> Attend:
    """Return attention in which a block sees the context before its anchor and itself."""
    count, blocks = anchors.shape
    rows = blocks * size
    limit = anchors.repeat_interleave(size, dim=1)
    context = torch.arange(length, device=anchors.device) < limit[..., None]
    owner = torch.arange(rows, device=anchors.device) // size
    own = (owner[:, None] == owner).expand(count, rows, rows)
    dense = torch.cat((context, own), dim=-1)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = heads // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

    return attend


@torch.no_grad()
def initialise(draft: Draft, target: Target, features: Tensor) -> None:
    """Scale the feature channels to unit size and set every weight.

    ``features [tokens, taps * hidden]`` is a sample of tapped features. With
    ``init_from_target`` the layers start as copies of the target's last ones, and the projection
    starts by passing the last tap through.
    """
    settings, hidden = draft.settings, target.hidden
    draft.feature_scale.copy_(features.float().pow(2).mean(0).add(1e-6).rsqrt())
    nn.init.normal_(draft.fc, std=0.02)
    draft.fc[:, -hidden:] += torch.eye(hidden, device=draft.fc.device)
    draft.norm.copy_(target.norm)
    first = len(target.layers) - settings.layers
    for index, layer in enumerate(draft.layers):
        for name, parameter in layer.named_parameters():
            if name.endswith("_proj"):
                nn.init.normal_(parameter, std=0.02)
        if settings.init_from_target:
            _copy_layer(layer, target, first + index)
        else:
            layer.o_proj.mul_(0.1)
            layer.down_proj.mul_(0.1)


def _copy_layer(layer: DraftLayer, target: Target, index: int) -> None:
    """Copy one target layer; a narrower MLP keeps the channels with the largest output weights."""
    prefix = f"model.layers.{index}."
    weights = {
        name.removeprefix(prefix).removesuffix(".weight"): tensor.float()
        for name, tensor in target.weights.items()
        if name.startswith(prefix)
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(layer, name).copy_(weights[f"self_attn.{name}"])
    width = layer.down_proj.shape[1]
    order = weights["mlp.down_proj"].pow(2).sum(0).argsort(descending=True)[:width]
    layer.gate_proj.copy_(weights["mlp.gate_proj"][order])
    layer.up_proj.copy_(weights["mlp.up_proj"][order])
    layer.down_proj.copy_(weights["mlp.down_proj"][:, order])
    layer.input_layernorm.copy_(weights["input_layernorm"])
    layer.post_attention_layernorm.copy_(weights["post_attention_layernorm"])
    scale = weights["input_layernorm"].pow(2)
    for name, norm in (("q_proj", layer.q_norm), ("k_proj", layer.k_norm)):
        typical = (weights[f"self_attn.{name}"].pow(2) * scale).sum(1).mean().sqrt()
        norm.fill_(float(typical))


def public_config(target: Target, settings: DraftSettings) -> dict[str, Any]:
    """Return the config in the public DFlash format."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": settings.block_size,
        "bos_token_id": target.config["bos_token_id"],
        "dflash_config": {
            "mask_token_id": MASK_TOKEN_ID,
            "target_layer_ids": list(settings.target_layer_ids),
        },
        "dtype": "bfloat16",
        "eos_token_id": target.config["eos_token_id"],
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "initializer_range": 0.02,
        "intermediate_size": settings.intermediate_size,
        "layer_types": ["full_attention"] * settings.layers,
        "max_position_embeddings": target.config["max_position_embeddings"],
        "model_type": "qwen3",
        "num_attention_heads": target.heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": target.kv_heads,
        "num_target_layers": len(target.layers),
        "pad_token_id": target.config["pad_token_id"],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": target.theta, "rope_type": "default"},
        "rope_theta": target.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": target.config["vocab_size"],
    }


def public_tensors(draft: Draft) -> dict[str, Tensor]:
    """Return the weights under their public names in bfloat16, feature scale folded in."""
    tensors = {
        "fc.weight": draft.fc.detach() * draft.feature_scale,
        "hidden_norm.weight": draft.hidden_norm,
        "norm.weight": draft.norm,
    }
    for index, layer in enumerate(draft.layers):
        for name, parameter in layer.named_parameters():
            tensors[f"layers.{index}.{PUBLIC_GROUPS.get(name, '')}{name}.weight"] = parameter
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def save_draft(draft: Draft, target: Target, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the public format."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(public_config(target, draft.settings), indent=2)
    (folder / "config.json").write_text(config + "\n")
    save_file(public_tensors(draft), folder / "model.safetensors", metadata={"format": "pt"})


def load_draft(folder: Path, target: Target) -> Draft:
    """Read a draft in the public format back into the trainable form."""
    config = json.loads((folder / "config.json").read_text())
    settings = DraftSettings(
        layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        block_size=config["block_size"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
    )
    draft = Draft(target, settings)
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removesuffix(".weight").replace("self_attn.", "").replace("mlp.", "")
        state[short] = tensor.float()
    missing, unexpected = draft.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"feature_scale"}:
        raise ValueError(f"draft in {folder}: missing {missing}, unexpected {unexpected}")
    return draft.to(target.device)
