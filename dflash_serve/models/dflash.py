"""The DFlash draft: predicts a whole block of tokens in one pass (arXiv 2602.06036).

Context keys and values come from the target's hidden states, never from token embeddings; the
block's own rows see the whole context and each other. Embedding and head are the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.cache.paged import PagedKV
from dflash_serve.kernels.context_kv import store_context
from dflash_serve.kernels.fp8 import quantize_weight, weight_nbytes
from dflash_serve.kernels.linear import Weight, linear, norm_linear
from dflash_serve.kernels.rope import rope_table
from dflash_serve.model_config import DraftConfig
from dflash_serve.models.layers import DecoderLayer, RowBatch, run_layers
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Group

__all__ = ["DFlashDraft"]


class DFlashDraft:
    """Draft layers, the projection of tapped features, and the injection of context.

    Args:
        config: the draft's config.
        plan: collects the parameters to load.
        group: tensor-parallel group.
        num_taps: tapped target layers.
        target_hidden: hidden width of the target.
        max_positions: length of the rope table.
    """

    def __init__(
        self,
        config: DraftConfig,
        plan: WeightPlan,
        group: Group,
        num_taps: int,
        target_hidden: int,
        max_positions: int,
    ) -> None:
        model = config.model
        self.config = config
        self.eps = model.rms_norm_eps
        self.fc: Weight = plan.replicated("fc.weight", model.hidden_size, num_taps * target_hidden)
        self.hidden_norm = plan.replicated("hidden_norm.weight", model.hidden_size)
        self.layers = [
            DecoderLayer(model, plan, group, f"layers.{i}") for i in range(model.num_layers)
        ]
        self.norm = plan.replicated("norm.weight", model.hidden_size)
        self.rope = rope_table(model.rope, model.head_dim, max_positions, plan.device)
        self.kv_weight: Weight = torch.empty(0)
        self.key_norms = torch.empty(0)

    def finish_loading(self) -> None:
        """Stack the k and v rows of all layers for `inject`; call once the weights are read."""
        attentions = [layer.attention for layer in self.layers]
        self.kv_weight = torch.cat([_plain(a.qkv)[a.q_rows :] for a in attentions])
        norms = [a.k_norm for a in attentions if a.k_norm is not None]
        self.key_norms = torch.stack(norms)

    def quantize(self) -> None:
        """Keep the weights of all products in 8 bits; call once, after `finish_loading`.

        One weight at a time, whose original nothing else should hold.
        """
        self.fc = quantize_weight(_plain(self.fc))
        self.kv_weight = quantize_weight(_plain(self.kv_weight))
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            attention.qkv = quantize_weight(_plain(attention.qkv))
            attention.o = quantize_weight(_plain(attention.o))
            mlp.gate_up = quantize_weight(_plain(mlp.gate_up))
            mlp.down = quantize_weight(_plain(mlp.down))

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights of all products on this rank."""
        weights = [self.fc, self.kv_weight]
        for layer in self.layers:
            weights += [layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down]
        return sum(weight_nbytes(weight) for weight in weights)

    def __call__(self, embedded: Tensor, batch: RowBatch, kv: PagedKV) -> Tensor:
        """Block rows → hidden states: [T, H] → [T, H], bidirectional within each block."""
        hidden, _ = run_layers(self.layers, embedded, self.norm, batch, self.rope, kv, causal=False)
        return hidden

    def inject(self, taps: Tensor, positions: Tensor, slots: Tensor, kv: PagedKV) -> None:
        """Write context keys and values of T committed tokens.

        Args:
            taps: [T, taps · target hidden].
            positions, slots: [T].
        """
        context = linear(taps, self.fc)
        kv_rows = norm_linear(context, self.hidden_norm, self.eps, self.kv_weight)
        store_context(kv_rows, self.key_norms, self.eps, self.rope, positions, slots, kv.pool)


def _plain(weight: Weight) -> Tensor:
    """A weight that is not quantised yet."""
    assert isinstance(weight, Tensor)
    return weight
