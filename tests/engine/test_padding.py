"""Head rows past the true vocabulary never win, however bad the real ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.engine.drafting import Recorder, read_records
from tests.engine.harness import engine_config, prompts
from tests.engines import run
from tests.tiny import VOCAB, TinyPair, make_pair


def padded_pair(folder: Path, valid: int) -> TinyPair:
    """Every real id's logit is far below 0 and every padding id's is exactly 0.

    The first hidden feature is large and positive in every token of target and draft; real head
    rows weigh it negatively, padding rows are zero.
    """
    pair = make_pair(folder, "llama")
    path = Path(pair.target) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][:, 0] = 6.0
    tensors["model.norm.weight"][0] = 1.0
    head = tensors["lm_head.weight"]
    head[:, 0] = -3.0
    head[valid:] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return pair


def submits(temperature: float, max_tokens: int) -> list[Submit]:
    """A few requests."""
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=[token % 240 for token in prompt],
            params=SamplingParams(
                max_tokens=max_tokens, seed=i, temperature=temperature, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(prompts(8))
    ]


def ids_and_proposals(
    pair: TinyPair, folder: Path, tp: int, valid: int | None, temperature: float, tokens: int
) -> tuple[set[int], set[int]]:
    """Every id emitted and every id proposed."""
    folder.mkdir()
    config = engine_config(pair, tp=tp, valid_vocab_size=valid)
    outcome = run(config, submits(temperature, tokens), Recorder(folder).install)
    proposals, _ = read_records(folder, tp)
    proposed = {i for starts in proposals.values() for ids in starts.values() for i in ids}
    return {i for ids in outcome.ids for i in ids}, proposed


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_padding_rows_never_win_in_target_or_draft(tmp_path: Path, temperature: float) -> None:
    pair = padded_pair(tmp_path / "pair", valid=300)
    emitted, proposed = ids_and_proposals(
        pair, tmp_path / "checked", 1, 300, temperature, tokens=100
    )
    assert max(emitted) < 300
    assert max(proposed) < 300


def test_the_crafted_padding_would_win_if_it_counted(tmp_path: Path) -> None:
    pair = padded_pair(tmp_path / "pair", valid=300)
    emitted, proposed = ids_and_proposals(pair, tmp_path / "unchecked", 1, None, 0.0, tokens=10)
    assert min(emitted) >= 300
    assert min(proposed) >= 300


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_last_shard_of_padding_only_never_wins(tmp_path: Path, temperature: float) -> None:
    pair = padded_pair(tmp_path / "pair", valid=240)
    assert VOCAB // 4 * 3 == 240  # the fourth rank's rows are padding
    tokens = 12
    emitted, proposed = ids_and_proposals(pair, tmp_path / "ranks", 4, 240, temperature, tokens)
    assert max(emitted) < 240
    assert max(proposed) < 240
    alone, _ = ids_and_proposals(pair, tmp_path / "alone", 1, 240, temperature, tokens)
    assert emitted == alone


def test_ten_thousand_hot_samples_stay_inside_the_vocabulary() -> None:
    from dflash_serve.parallel.group import Single
    from dflash_serve.parallel.pick import pick, row_noise
    from dflash_serve.parallel.shard import VocabShard
    from tests.engine.rows import row_sampling

    logits = torch.full((10_000, 320), -30.0)
    logits[:, 300:] = 0.0
    shard = VocabShard.of(320, 300, 0, 1)
    rows = row_sampling(10_000, temperature=2.0)
    ids, faults = pick(logits, rows, shard, Single(), noise=row_noise(rows, shard))
    assert int(ids.max()) < 300
    assert len(ids.unique()) == 300
    assert not bool(faults.any())
