"""The draft's context: keys and values written from the target's hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_serve.engine.pair import Pair
from dflash_serve.kernels.context_kv import store_context, valid_slots
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.rope import apply_rope, rope_table
from dflash_serve.model_config import RopeConfig
from tests.models.forward import PAGE, load_target, row_batch
from tests.tiny import TinyPair

HIDDEN, KV_HEADS, WIDTH, EPS = 24, 2, 8, 1e-6


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_fused_injection_equals_each_layer_on_its_own(layers: int, tokens: int) -> None:
    context = rand(tokens, HIDDEN)
    weights = rand(layers, 2, KV_HEADS * WIDTH, HIDDEN, seed=1)
    norms = 1 + 0.1 * rand(layers, WIDTH, seed=2)
    table = rope_table(RopeConfig(theta=1e4), WIDTH, 64, torch.device("cpu"))
    positions = torch.arange(3, 3 + tokens)
    cos_sin = table[positions]
    slots = torch.randperm(5 * PAGE, generator=torch.Generator().manual_seed(3))[:tokens] + PAGE
    pages = torch.zeros(layers, 2, 6, PAGE, KV_HEADS, WIDTH)
    kv = context @ weights.flatten(0, 2).T
    store_context(kv, norms, EPS, table, positions, slots, pages)
    for layer in range(layers):
        key = (context @ weights[layer, 0].T).view(tokens, KV_HEADS, WIDTH)
        key = apply_rope(rms_norm(key, norms[layer], EPS), cos_sin)
        value = (context @ weights[layer, 1].T).view(tokens, KV_HEADS, WIDTH)
        stored_key, stored_value = (p.view(-1, KV_HEADS, WIDTH) for p in pages[layer])
        assert (stored_key[slots] - key).abs().max() < 1e-5
        assert (stored_value[slots] - value).abs().max() < 1e-5


def test_rows_past_the_accepted_run_go_to_the_dummy_page() -> None:
    slots = torch.arange(10, 22).view(3, 4)
    kept = valid_slots(slots, torch.tensor([0, 2, 3]))
    assert kept.tolist() == [[10, 0, 0, 0], [14, 15, 16, 0], [18, 19, 20, 21]]


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_injection_leaves_rejected_positions_as_they_were(
    accepted: int, pairs: dict[str, TinyPair]
) -> None:
    pair = load_target(pairs["qwen3"].target, pairs["qwen3"].draft)
    table = torch.tensor([[3, 1]])
    batch = row_batch([6], 4, table)
    slots = valid_slots(batch.slots.view(1, 4), torch.tensor([accepted])).flatten()
    inject(pair, rand(4, 128), batch.positions, slots)
    for stored in stored_rows(pair):
        written = stored.abs().sum(dim=(1, 2)) > 0
        committed = set(batch.slots[: accepted + 1].tolist())
        assert set(written.nonzero().flatten().tolist()) - set(range(PAGE)) == committed


def test_injected_keys_follow_position_and_not_slot(pairs: dict[str, TinyPair]) -> None:
    pair = load_target(pairs["llama"].target, pairs["llama"].draft)
    taps = rand(1, 128)
    inject(pair, taps, torch.tensor([5]), torch.tensor([PAGE]))
    inject(pair, taps, torch.tensor([5]), torch.tensor([3 * PAGE + 2]))
    inject(pair, taps, torch.tensor([6]), torch.tensor([2 * PAGE]))
    for key, value in zip(stored_rows(pair)[::2], stored_rows(pair)[1::2], strict=True):
        assert torch.equal(key[PAGE], key[3 * PAGE + 2])
        assert not torch.equal(key[PAGE], key[2 * PAGE])
        assert torch.equal(value[PAGE], value[2 * PAGE])


@torch.inference_mode()
def inject(pair: Pair, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
    pair.inject(taps, positions, slots)


def stored_rows(pair: Pair) -> list[Tensor]:
    """Keys and values of every draft layer, by slot."""
    assert pair.draft_kv is not None
    return [p.view(-1, *p.shape[2:]) for both in pair.draft_kv.layers for p in both]
