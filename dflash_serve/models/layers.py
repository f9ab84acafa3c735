"""Building blocks of a dense decoder, sharded over tensor-parallel ranks.

T tokens in a call, H hidden width, D head width, I intermediate width; nq and nkv are this rank's
query and key heads. Parameters are plain tensors declared through a WeightPlan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torch import Tensor

from dflash_serve.cache.paged import PagedKV
from dflash_serve.kernels.attention import AttentionView, attend
from dflash_serve.kernels.block import BlockRows
from dflash_serve.kernels.embedding import embed_rows
from dflash_serve.kernels.linear import (
    Rows,
    Weight,
    gated_linear,
    linear,
    linear_add_norm,
    norm_for,
)
from dflash_serve.kernels.norm import add_norm
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
    "run_layers",
]


@dataclasses.dataclass(frozen=True)
class RowBatch(BlockRows):
    """Where the T tokens of a call stand: B · R, or as many as `row_starts` says.

    Attributes:
        rows: R, rows of each request; with `row_starts` a host bound on them.
        longest: host bound on start + R.
        row_starts: [B + 1] int64 where requests have different numbers of rows; see
            `AttentionView`.
    """

    rows: int
    longest: int
    row_starts: Tensor | None = None

    def view(self, page_size: int, *, causal: bool) -> AttentionView:
        """Which keys the rows see."""
        return AttentionView(
            self.page_table,
            self.start,
            self.rows,
            self.longest,
            page_size,
            causal,
            row_starts=self.row_starts,
        )


class Attention:
    """Grouped-query attention over pages, with per-head q/k norm where the family has it."""

    def __init__(self, config: TransformerConfig, plan: WeightPlan, prefix: str) -> None:
        shard, width = plan.heads(config), config.head_dim
        hidden, all_heads = config.hidden_size, config.num_heads * config.head_dim
        kv = config.num_kv_heads * width
        self.eps = config.rms_norm_eps
        self.head_dim = width
        self.num_heads, self.num_kv_heads = shard.num_heads, shard.num_kv_heads
        self.q_rows = shard.num_heads * width
        q_rows, kv_rows = _scaled(shard.heads, width), _scaled(shard.kv_heads, width)
        self.qkv: Weight = plan.columns(
            [
                (f"{prefix}.q_proj.weight", all_heads, q_rows),
                (f"{prefix}.k_proj.weight", kv, kv_rows),
                (f"{prefix}.v_proj.weight", kv, kv_rows),
            ],
            hidden,
        )
        self.o: Weight = plan.rows(f"{prefix}.o_proj.weight", hidden, all_heads, q_rows)
        self.q_norm = plan.replicated(f"{prefix}.q_norm.weight", width) if config.qk_norm else None
        self.k_norm = plan.replicated(f"{prefix}.k_norm.weight", width) if config.qk_norm else None

    def __call__(
        self,
        normal: Rows,
        batch: RowBatch,
        rope: Tensor,
        pages: tuple[Tensor, Tensor],
        view: AttentionView,
    ) -> Tensor:
        """[T, H] normalised rows → [T, heads · head_dim] for `o`; stores the keys and values."""
        qkv = linear(normal, self.qkv)
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
        each = () if batch.row_starts is not None else (batch.rows,)
        query = query.view(-1, *each, self.num_heads, self.head_dim)
        return attend(query, *pages, view).reshape(normal.shape[0], -1)


class GatedMLP:
    """down(silu(gate x) · up x)."""

    def __init__(self, config: TransformerConfig, plan: WeightPlan, prefix: str) -> None:
        hidden, wide = config.hidden_size, config.intermediate_size
        mine = plan.part(wide)
        # Rows in turn: a product has a gate and its up side by side, hence in one thread.
        self.gate_up: Weight = plan.alternating(
            [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"], wide, mine, hidden
        )
        self.down: Weight = plan.rows(f"{prefix}.down_proj.weight", hidden, wide, mine)

    def __call__(self, normal: Rows) -> Tensor:
        """[T, H] normalised rows → [T, I] for `down`."""
        return gated_linear(normal, self.gate_up)


class DecoderLayer:
    """Pre-norm attention and MLP around a residual stream.

    A norm is taken together with the sum that it normalises, so that a layer gets its input
    normalised and normalises its output for whoever comes next.
    """

    def __init__(
        self, config: TransformerConfig, plan: WeightPlan, group: Group, prefix: str
    ) -> None:
        hidden = config.hidden_size
        self.input_norm = plan.replicated(f"{prefix}.input_layernorm.weight", hidden)
        self.post_norm = plan.replicated(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.eps = config.rms_norm_eps
        self.group = group
        self.attention = Attention(config, plan, f"{prefix}.self_attn")
        self.mlp = GatedMLP(config, plan, f"{prefix}.mlp")

    def __call__(
        self,
        stream: Tensor,
        normal: Rows,
        next_norm: Tensor,
        reader: Weight | None,
        batch: RowBatch,
        rope: Tensor,
        pages: tuple[Tensor, Tensor],
        view: AttentionView,
    ) -> tuple[Tensor, Rows]:
        """One layer: stream + attention(norm(stream)), and that plus its mlp(norm(·)).

        Args:
            stream: [T, H] residual stream; kept, since the model may have tapped it.
            normal: [T, H] with this layer's input norm.
            next_norm: [H] weight of the norm that follows this layer.
            reader: the weight that multiplies that norm; None where something else reads it.

        Returns:
            The stream after this layer and its norm with `next_norm`, both [T, H].
        """
        heads = self.attention(normal, batch, rope, pages, view)
        o, gate_up = self.attention.o, self.mlp.gate_up
        stream, normal = self._add(stream, heads, o, self.post_norm, gate_up)
        wide = self.mlp(normal)
        return self._add(stream, wide, self.mlp.down, next_norm, reader, consume=True)

    def _add(
        self,
        stream: Tensor,
        x: Tensor,
        weight: Weight,
        norm: Tensor,
        reader: Weight | None,
        *,
        consume: bool = False,
    ) -> tuple[Tensor, Rows]:
        """stream + x @ weight.T summed over the ranks, and its norm: two [T, H]."""
        if self.group.size == 1:
            return linear_add_norm(
                x, weight, stream, norm, self.eps, reader=reader, consume=consume
            )
        delta = self.group.all_reduce(linear(x, weight))
        return add_norm(delta, stream, norm, self.eps, consume=consume)


def run_layers(
    layers: Sequence[DecoderLayer],
    stream: Tensor,
    final_norm: Tensor,
    batch: RowBatch,
    rope: Tensor,
    kv: PagedKV,
    *,
    causal: bool,
    taps: Collection[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """All layers of a model over [T, H] embedded rows.

    Args:
        final_norm: [H], the norm behind the last layer.
        taps: layers whose output is kept.

    Returns:
        [T, H] after the final norm, and the tapped residual streams (after the layer, before any
        norm), each [T, H].
    """
    view = batch.view(kv.page_size, causal=causal)
    norms = [layer.input_norm for layer in layers] + [final_norm]
    readers = [layer.attention.qkv for layer in layers] + [None]
    normal = norm_for(layers[0].attention.qkv, stream, norms[0], layers[0].eps)
    tapped = []
    for index, (layer, pages) in enumerate(zip(layers, kv.layers, strict=True)):
        following = norms[index + 1], readers[index + 1]
        stream, normal = layer(stream, normal, *following, batch, rope, pages, view)
        if index in taps:
            tapped.append(stream)
    assert isinstance(normal, Tensor)
    return normal, tapped


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

    def __init__(self, weight: Weight, shard: VocabShard) -> None:
        self.weight = weight
        self.shard = shard

    def apply(self, hidden: Tensor) -> Tensor:
        """[R, H] → [R, shard.rows] logits of ids shard.first…"""
        return linear(hidden, self.weight)


def _scaled(heads: slice, width: int) -> slice:
    return slice(heads.start * width, heads.stop * width)
