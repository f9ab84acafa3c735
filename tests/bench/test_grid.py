"""The grid on random weights: what is measured, what is modelled, and what does not fit."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash_serve.bench import dummy, grid

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    target = {**dummy.DUMMY_TARGETS["qwen3-4b"], **SMALL}
    draft = {
        **dummy.DUMMY_DRAFTS["qwen3-4b-b16"],
        **SMALL,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
    }
    monkeypatch.setattr(dummy, "DUMMY_TARGETS", {"tiny": target})
    monkeypatch.setattr(dummy, "DUMMY_DRAFTS", {"tiny-b16": draft})
    monkeypatch.setattr(grid, "_STEPS", (2, 3))


def measure(tmp_path: Path, contexts: list[int], **options: object) -> tuple[str, dict[str, list]]:
    text, output = io.StringIO(), tmp_path / "grid.json"
    grid.bench_presets(
        "dummy:tiny",
        "dummy:tiny-b16",
        batches=[1, 2],
        contexts=contexts,
        lengths=[16, 4],
        accept=[3, 5],
        options={"device": "cpu", **options},
        console=Console(file=text, width=160),
        output=output,
    )
    return text.getvalue(), json.loads(output.read_text())


def test_every_batch_context_and_length_is_measured_beside_plain_decoding(tmp_path: Path) -> None:
    text, figures = measure(tmp_path, [32, 64])
    measured = {(c["batch"], c["context"], c["rows"]) for c in figures["cells"] if c["step_ms"]}
    assert measured == {(b, c, g) for b in (1, 2) for c in (32, 64) for g in (None, 4, 16)}
    assert "modelled" in text
    assert "the weights are random" in text


def test_a_cell_that_does_not_fit_says_what_it_would_need(tmp_path: Path) -> None:
    text, figures = measure(tmp_path, [32, 1024], kv_cache_gib=0.0015)
    unmeasured = [c for c in figures["cells"] if not c["step_ms"]]
    assert unmeasured
    assert all(c["needs_gib"] > 0.0015 for c in unmeasured)
    assert text.count("needs") >= len(unmeasured)


@pytest.mark.parametrize("tau", [1.5, 3.0, 6.5])
def test_modelled_tokens_of_a_whole_block_are_those_asked_for(tau: float) -> None:
    assert grid.modelled_tokens(tau, 16, 16) == pytest.approx(tau)
    assert grid.modelled_tokens(tau, 1, 16) == 1.0
    assert grid.modelled_tokens(tau, None, 16) == 1.0
    assert 1.0 < grid.modelled_tokens(tau, 4, 16) < tau
