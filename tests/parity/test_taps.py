"""Tapped hidden states are those transformers gives after the same layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.engine.pair import load_pair
from dflash_serve.models.layers import RowBatch
from dflash_serve.parallel.group import Single
from tests.engine.harness import PAGE, engine_config
from tests.engine.neartie import reference_model
from tests.tiny import TinyPair, make_draft, make_target


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("taps", [(0,), (1,), (2,), (0, 1, 2)])
@torch.inference_mode()
def test_tap_is_the_residual_stream_after_its_layer(
    tmp_path: Path, family: str, taps: tuple[int, ...]
) -> None:
    target = str(make_target(tmp_path / "target", family, seed=3))
    draft = str(make_draft(tmp_path / "draft", taps=taps))
    pair = load_pair(engine_config(TinyPair(target, draft)), Single())
    ids = torch.randint(2, 290, (13,), generator=torch.Generator().manual_seed(0))
    batch = RowBatch(
        start=torch.zeros(1, dtype=torch.int64),
        positions=torch.arange(13),
        slots=PAGE + torch.arange(13),
        page_table=torch.tensor([[1, 2, 0]]),
        rows=13,
        longest=13,
    )
    _, tapped = pair.target(ids, batch, pair.target_kv)
    states = reference_model(target)(ids[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
    assert tapped is not None
    assert float((tapped - expected).abs().max()) < 1e-5
