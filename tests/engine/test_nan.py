"""A request whose logits are NaN ends alone and leaves nothing behind in pages it used."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.engine.direct import Direct
from tests.engine.drafting import Recorder, read_records
from tests.engine.harness import engine_config, prompts
from tests.engines import ids_of, run
from tests.tiny import TinyPair, make_pair

POISON = 295


@pytest.fixture
def poisoned(tmp_path: Path) -> TinyPair:
    """A pair in which one id's embedding is NaN; the head is whole."""
    pair = make_pair(tmp_path / "pair", "llama")
    path = Path(pair.target) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = math.nan
    tensors["lm_head.weight"][POISON] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return pair


def submits() -> list[Submit]:
    """Sound requests."""
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=20, seed=i, temperature=i % 2, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts(6))
    ]


def poison(name: str, length: int, *, resumed: bool) -> Submit:
    """A request that reads the NaN row in its prompt, or as the anchor it resumes from."""
    return Submit(
        request_id=name,
        prompt_ids=[5] * length + ([] if resumed else [POISON, 6]),
        emitted_ids=[POISON] if resumed else [],
        params=SamplingParams(max_tokens=20, seed=99, ignore_eos=True),
    )


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("resumed", [False, True])
def test_nan_ends_its_request_and_no_other(poisoned: TinyPair, resumed: bool, chunk: int) -> None:
    sound = run(engine_config(poisoned, draft=False), submits())
    engine = Direct(engine_config(poisoned, pages=40, max_model_len=128, prefill_chunk=chunk))
    for _ in range(2):  # the second finds no pages of the first that hide the fault
        first = engine.run([poison("bad0", 21, resumed=resumed)])
        assert first["bad0"][-1].finish_reason == "error"
    mixed = [
        s
        for pair in zip(
            submits()[:3],
            [poison(f"bad{i}", 7 * i, resumed=resumed) for i in (1, 2, 3)],
            strict=True,
        )
        for s in pair
    ]
    events = engine.run([*mixed, *submits()[3:]])
    for i, ids in enumerate(sound.ids):
        assert ids_of(events[f"r{i}"]) == ids
    for i in (1, 2, 3):
        assert events[f"bad{i}"][-1].finish_reason == "error"
        assert "NaN" in (events[f"bad{i}"][-1].error or "")
    assert all(
        bool(part.isfinite().all())
        for kv in (engine.pair.target_kv, engine.pair.draft_kv)
        if kv is not None
        for layer in kv.layers
        for part in layer
    )


def test_nan_of_one_request_leaves_the_drafts_of_others_alone(
    poisoned: TinyPair, tmp_path: Path
) -> None:
    records = {}
    for name, extra in (("alone", []), ("beside", [poison("bad", 9, resumed=True)])):
        folder = tmp_path / name
        folder.mkdir()
        outcome = run(engine_config(poisoned), [*extra, *submits()], Recorder(folder).install)
        assert len(outcome.ids) == 6 + len(extra)
        records[name] = read_records(folder, 1)[0]
    for seed, starts in records["alone"].items():
        assert records["beside"][seed] == starts
