"""A dense decoder-only target: what Llama and Qwen3 have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.cache.paged import PagedKV
from dflash_serve.kernels.rope import rope_table
from dflash_serve.model_config import TargetConfig
from dflash_serve.models.layers import DecoderLayer, Head, RowBatch, VocabEmbedding, run_layers
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.shard import VocabShard

__all__ = ["DenseDecoder"]


class DenseDecoder:
    """embed → layers → norm → head, with hidden states tapped on the way.

    Args:
        config: the target's config.
        plan: collects the parameters to load.
        group: tensor-parallel group.
        shard: this rank's vocabulary rows.
        taps: layers whose output is kept, ascending.
        max_positions: length of the rope table.
    """

    def __init__(
        self,
        config: TargetConfig,
        plan: WeightPlan,
        group: Group,
        shard: VocabShard,
        taps: tuple[int, ...],
        max_positions: int,
    ) -> None:
        model = config.model
        self.config = config
        self.taps = frozenset(taps)
        self.embed = VocabEmbedding(
            "embed_tokens.weight", config.vocab_size, model.hidden_size, shard, plan, group
        )
        self.layers = [
            DecoderLayer(model, plan, group, f"layers.{i}") for i in range(model.num_layers)
        ]
        self.norm = plan.replicated("norm.weight", model.hidden_size)
        head = self.embed.weight
        if not config.tied_head:
            head = plan.vocabulary("lm_head.weight", config.vocab_size, model.hidden_size, shard)
        self.head = Head(head, shard)
        self.rope = rope_table(model.rope, model.head_dim, max_positions, plan.device)

    def __call__(self, ids: Tensor, batch: RowBatch, kv: PagedKV) -> tuple[Tensor, Tensor | None]:
        """Run T tokens, causal.

        Args:
            ids: [T].

        Returns:
            hidden [T, H] after the final norm, and the tapped residual stream [T, taps · H]
            (after each tapped layer, before any norm), or None without taps.
        """
        stream = self.embed(ids)
        hidden, tapped = run_layers(
            self.layers, stream, self.norm, batch, self.rope, kv, causal=True, taps=self.taps
        )
        return hidden, torch.cat(tapped, dim=-1) if tapped else None
