"""Every rank reads its own slices; together they are the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.model_config import DraftConfig, TargetConfig
from dflash_serve.models.dflash import DFlashDraft
from dflash_serve.models.layers import Attention, DecoderLayer
from dflash_serve.models.loader import Checkpoint, load, load_dummy
from dflash_serve.models.registry import target_class
from dflash_serve.models.weights import WeightPlan
from dflash_serve.parallel.group import Single
from dflash_serve.parallel.shard import HeadShard, VocabShard
from tests.tiny import VOCAB, TinyPair

CPU = torch.device("cpu")
SIZES = [1, 2, 4, 8]  # 8 ranks share 4 key/value heads


class Rank(Single):
    """A group that says it is one of several; its collectives are never called here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def tensors_of(folder: str) -> dict[str, Tensor]:
    stored = load_file(Path(folder) / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def load_rank(pair: TinyPair, rank: int, size: int) -> tuple[object, DFlashDraft]:
    """One rank's target and draft."""
    config, draft_config = TargetConfig.load(pair.target), DraftConfig.load(pair.draft)
    group = Rank(rank, size)
    plan = WeightPlan(rank, size, torch.float32, CPU)
    shard = VocabShard.of(config.vocab_size, config.vocab_size, rank, size)
    target = target_class(config.family)(config, plan, group, shard, (0, 2), 16)
    load(Checkpoint(pair.target), plan, ignored=("lm_head.weight",) if config.tied_head else ())
    draft_plan = WeightPlan(rank, size, torch.float32, CPU)
    draft = DFlashDraft(draft_config, draft_plan, group, 2, config.model.hidden_size, 16)
    load(Checkpoint(pair.draft), draft_plan)
    draft.finish_loading()
    return target, draft


def key_rows(attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v rows of a rank's packed matrix."""
    kv = attention.num_kv_heads * attention.head_dim
    return attention.qkv.split([attention.q_rows, kv, kv])  # type: ignore[return-value]


def check_layer(layers: list[DecoderLayer], stored: dict[str, Tensor], prefix: str) -> None:
    size = len(layers)
    packed = [key_rows(layer.attention) for layer in layers]
    attention = f"{prefix}.self_attn"
    assert torch.equal(torch.cat([p[0] for p in packed]), stored[f"{attention}.q_proj.weight"])
    copies = max(1, size // 4)
    for at, name in ((1, "k_proj"), (2, "v_proj")):
        distinct = torch.cat([p[at] for p in packed[::copies]])
        assert torch.equal(distinct, stored[f"{attention}.{name}.weight"])
        for rank, part in enumerate(packed):
            assert torch.equal(part[at], packed[rank - rank % copies][at])
    out = torch.cat([layer.attention.o for layer in layers], dim=1)
    assert torch.equal(out, stored[f"{attention}.o_proj.weight"])
    # Gate and up rows in turn on every rank.
    gate, up = (torch.cat([layer.mlp.gate_up[at::2] for layer in layers]) for at in (0, 1))
    assert torch.equal(gate, stored[f"{prefix}.mlp.gate_proj.weight"])
    assert torch.equal(up, stored[f"{prefix}.mlp.up_proj.weight"])
    down = torch.cat([layer.mlp.down for layer in layers], dim=1)
    assert torch.equal(down, stored[f"{prefix}.mlp.down_proj.weight"])
    for layer in layers:
        assert torch.equal(layer.input_norm, stored[f"{prefix}.input_layernorm.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("size", SIZES)
def test_shards_of_all_ranks_are_the_checkpoint(
    size: int, family: str, pairs: dict[str, TinyPair]
) -> None:
    pair = pairs[family]
    stored, draft_stored = tensors_of(pair.target), tensors_of(pair.draft)
    ranks = [load_rank(pair, rank, size) for rank in range(size)]
    embeds = [target.embed.weight for target, _ in ranks]  # type: ignore[attr-defined]
    heads = [target.head.weight for target, _ in ranks]  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(embeds), stored["embed_tokens.weight"])
    head = "embed_tokens.weight" if family == "qwen3" else "lm_head.weight"
    assert torch.equal(torch.cat(heads), stored[head])
    for index in range(4):
        layers = [target.layers[index] for target, _ in ranks]  # type: ignore[attr-defined]
        check_layer(layers, stored, f"layers.{index}")
    for index in range(2):
        check_layer([draft.layers[index] for _, draft in ranks], draft_stored, f"layers.{index}")
    for _, draft in ranks:
        assert torch.equal(draft.fc, draft_stored["fc.weight"])


@pytest.mark.parametrize("size", SIZES)
def test_tied_head_shares_storage_on_every_rank(size: int, pairs: dict[str, TinyPair]) -> None:
    for rank in range(size):
        target, _ = load_rank(pairs["qwen3"], rank, size)
        assert target.head.weight.data_ptr() == target.embed.weight.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("vocab", "size"), [(5, 4), (4, 4), (3, 4), (7, 3), (320, 2)])
def test_vocabulary_rows_cover_every_id_once_even_when_ranks_get_none(
    vocab: int, size: int, tmp_path: Path
) -> None:
    whole = torch.arange(vocab * 2, dtype=torch.float32).view(vocab, 2)
    save_file({"embed.weight": whole}, tmp_path / "model.safetensors")
    parts = []
    for rank in range(size):
        shard = VocabShard.of(vocab, vocab, rank, size)
        plan = WeightPlan(rank, size, torch.float32, CPU)
        part = plan.vocabulary("embed.weight", vocab, 2, shard)
        load(Checkpoint(tmp_path), plan)
        assert part.shape[0] == shard.rows
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_random_values_are_the_same_whether_or_not_rows_alternate(rank: int) -> None:
    names, mine = ["gate.weight", "up.weight"], slice(6 * rank, 6 * rank + 6)
    plans = [WeightPlan(rank, 2, torch.float32, CPU) for _ in range(2)]
    turns = plans[0].alternating(names, 12, mine, 5)
    apart = plans[1].columns([(name, 12, mine) for name in names], 5)
    for plan in plans:
        load_dummy(plan, seed=3)
    assert torch.equal(torch.cat((turns[0::2], turns[1::2])), apart)
    assert not torch.equal(turns[0::2], turns[1::2])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("valid", [1, 100, 299, 320])
def test_valid_ids_of_all_ranks_are_the_first_ids(valid: int, size: int) -> None:
    shards = [VocabShard.of(VOCAB, valid, rank, size) for rank in range(size)]
    ids = [s.first + i for s in shards for i in range(s.valid)]
    assert ids == list(range(valid))


@pytest.mark.parametrize("size", SIZES)
def test_each_query_head_keeps_its_own_key_head(size: int, pairs: dict[str, TinyPair]) -> None:
    model = TargetConfig.load(pairs["llama"].target).model
    group = model.num_heads // model.num_kv_heads
    for rank in range(size):
        shard = HeadShard.of(model, rank, size)
        local_group = shard.num_heads // shard.num_kv_heads
        for local, head in enumerate(range(shard.heads.start, shard.heads.stop)):
            assert shard.kv_heads.start + local // local_group == head // group
