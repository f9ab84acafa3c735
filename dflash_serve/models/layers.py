"""Building blocks of a dense decoder, sharded over tensor-parallel ranks.

T tokens in a call, H hidden width, D head width, I intermediate width; nq and nkv are this rank's
query and key heads. Parameters are plain tensors declared through a WeightPlan.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from dflash_serve.kernels.attention import AttentionView, attend
from dflash_serve.kernels.block import BlockRows
from dflash_serve.kernels.embedding import embed_rows
from dflash_serve.kernels.linear import linear, linear_add, norm_gated, norm_linear
from dflash_serve.kernels.qkv import rope_and_store
from dflash_serve.model_config import TransformerConfig
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Group
from dflash_serve.parallel.shard import VocabShard

__all__ = [
    "Attention",
    "DecoderLayer",
    "GatedMLP",
    "Head",
    "RowBatch",
    "VocabEmbedding",
    "add_product",
]


@dataclasses.dataclass(frozen=True)
class RowBatch(BlockRows):
    """Where the T = B · R tokens of a call stand.

    Attributes:
        rows: R, rows of each request.
        longest: host bound on start + R.
    """

    rows: int
    longest: int

    def view(self, page_size: int, *, causal: bool) -> AttentionView:
        """Which keys the rows see."""
        return AttentionView(
            self.page_table, self.start, self.rows, self.longest, page_size, causal
        )


class Attention:
    """Grouped-query attention over pages, with per-head q/k norm where the family has it."""

    def __init__(
        self, config: TransformerConfig, plan: WeightPlan, group: Group, prefix: str
    ) -> None:
        shard, width = plan.heads(config), config.head_dim
        hidden, all_heads = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * width
        self.group = group
        self.eps = config.rms_norm_eps
        self.head_dim = width
        self.num_heads, self.num_kv_heads = shard.num_heads, shard.num_kv_heads
        self.q_rows = shard.num_heads * width
        q_rows, kv_rows = _scaled(shard.heads, width), _scaled(shard.kv_heads, width)
        self.qkv = plan.columns(
            [
                (f"{prefix}.q_proj.weight", all_heads, q_rows),
                (f"{prefix}.k_proj.weight", kv, kv_rows),
                (f"{prefix}.v_proj.weight", kv, kv_rows),
            ],
            hidden,
        )
        self.o = plan.rows(f"{prefix}.o_proj.weight", hidden, all_heads, q_rows)
        self.q_norm = plan.replicated(f"{prefix}.q_norm.weight", width) if config.qk_norm else None
        self.k_norm = plan.replicated(f"{prefix}.k_norm.weight", width) if config.qk_norm else None

    def __call__(
        self,
        stream: Tensor,
        norm: Tensor,
        batch: RowBatch,
        rope: Tensor,
        pages: tuple[Tensor, Tensor],
        view: AttentionView,
    ) -> Tensor:
        """stream + attention(rms_norm(stream)): [T, H] → [T, H]; stores the keys and values."""
        qkv = norm_linear(stream, norm, self.eps, self.qkv)
        query = rope_and_store(
            qkv,
            self.q_norm,
            self.k_norm,
            self.eps,
            rope,
            batch.positions,
            batch.slots,
            pages,
            self.num_heads,
        )
        query = query.view(-1, batch.rows, self.num_heads, self.head_dim)
        out = attend(query, *pages, view)
        # The stream is kept: the model may have tapped it.
        return add_product(stream, out.reshape(stream.shape[0], -1), self.o, self.group)


class GatedMLP:
    """down(silu(gate x) · up x)."""

    def __init__(
        self, config: TransformerConfig, plan: WeightPlan, group: Group, prefix: str
    ) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size
        mine = plan.part(wide)
        self.group = group
        self.eps = config.rms_norm_eps
        self.gate_up = plan.columns(
            [(f"{prefix}.gate_proj.weight", wide, mine), (f"{prefix}.up_proj.weight", wide, mine)],
            hidden,
        )
        self.down = plan.rows(f"{prefix}.down_proj.weight", hidden, wide, mine)

    def __call__(self, stream: Tensor, norm: Tensor) -> Tensor:
        """stream + mlp(rms_norm(stream)): [T, H] → [T, H]; `stream` is gone afterwards."""
        wide = norm_gated(stream, norm, self.eps, self.gate_up)
        return add_product(stream, wide, self.down, self.group, consume=True)


class DecoderLayer:
    """Pre-norm attention and MLP around a residual stream."""

    def __init__(
        self, config: TransformerConfig, plan: WeightPlan, group: Group, prefix: str
    ) -> None:
        hidden = config.hidden_size
        self.input_norm = plan.replicated(f"{prefix}.input_layernorm.weight", hidden)
        self.post_norm = plan.replicated(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.attention = Attention(config, plan, group, f"{prefix}.self_attn")
        self.mlp = GatedMLP(config, plan, group, f"{prefix}.mlp")

    def __call__(
        self,
        stream: Tensor,
        batch: RowBatch,
        rope: Tensor,
        pages: tuple[Tensor, Tensor],
        view: AttentionView,
    ) -> Tensor:
        """The residual stream after this layer: [T, H] → [T, H]."""
        stream = self.attention(stream, self.input_norm, batch, rope, pages, view)
        return self.mlp(stream, self.post_norm)


def add_product(
    stream: Tensor, x: Tensor, weight: Tensor, group: Group, *, consume: bool = False
) -> Tensor:
    """stream + x @ weight.T summed over the ranks: [T, H], [T, K] and [H, K] → [T, H].

    With `consume` the result may take the memory of `stream`, whose contents are then gone.
    """
    if group.size == 1:
        return linear_add(x, weight, stream, consume=consume)
    return stream + group.all_reduce(linear(x, weight))


class VocabEmbedding:
    """Token embedding, vocabulary rows spread over the ranks."""

    def __init__(
        self, name: str, vocab: int, width: int, shard: VocabShard, plan: WeightPlan, group: Group
    ) -> None:
        self.group = group
        self.shard = shard
        self.weight = plan.vocabulary(name, vocab, width, shard)

    def __call__(self, ids: Tensor) -> Tensor:
        """[T] ids → [T, H]."""
        return self.group.all_reduce(embed_rows(ids, self.weight, self.shard.first))


class Head:
    """Language-model head: this rank's logits."""

    def __init__(self, weight: Tensor, shard: VocabShard) -> None:
        self.weight = weight
        self.shard = shard

    def apply(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, shard.rows] logits of ids shard.first…"""
        return linear(hidden, self.weight)


def _scaled(heads: slice, width: int) -> slice:
    return slice(heads.start * width, heads.stop * width)
