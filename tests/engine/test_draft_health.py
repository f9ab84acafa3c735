"""The real draft proposes the same and holds the same context, whatever path led there.

Ids alone cannot show a broken draft, since verification hides it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.engine.drafting import Recorder, read_records
from tests.engine.harness import engine_config, prompts
from tests.engines import ids_of, start
from tests.tiny import TinyPair, make_pair

VOCAB = 16  # few ids, so that a random draft is right often enough for blocks of all lengths
MAX_TOKENS = 24
TOLERANCE = 1e-5

Records = tuple[dict[int, dict[int, list[int]]], dict[int, torch.Tensor]]


@pytest.fixture(scope="module")
def narrow_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A pair with few ids."""
    return make_pair(tmp_path_factory.mktemp("narrow"), vocab=VOCAB)


def submits(emitted: dict[str, list[int]] | None = None) -> list[Submit]:
    """Greedy and sampled requests; continued ones where `emitted` has their ids."""
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=[token % (VOCAB - 1) for token in prompt],
            emitted_ids=(emitted or {}).get(f"r{i}", []),
            params=SamplingParams(
                max_tokens=MAX_TOKENS, seed=i, temperature=0.7 * (i % 2), ignore_eos=True
            ),
        )
        for i, prompt in enumerate(prompts(8))
    ]


@pytest.fixture(scope="module")
def reference(narrow_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """One request at a time, nothing cached, prompts in one piece."""
    folder = tmp_path_factory.mktemp("reference")
    config = engine_config(narrow_pair, prefix_cache=False)
    engine = start(config, Recorder(folder).install)
    try:
        for submit in submits():
            engine.collect([submit])
    finally:
        engine.shutdown()
    return read_records(folder, 1)


def check(reference: Records, folder: Path, *, tp: int = 1, same_starts: bool = True) -> None:
    """Compare proposals by start and context by position."""
    proposals, context = read_records(folder, tp)
    assert set(proposals) == set(reference[0])
    for seed, expected in reference[0].items():
        got = proposals[seed]
        if same_starts:
            assert set(got) == set(expected)
        common = set(got) & set(expected)
        assert common, f"request {seed} has no step in common"
        assert {s: got[s] for s in common} == {s: expected[s] for s in common}
        length = min(context[seed].shape[1], reference[1][seed].shape[1])
        difference = (context[seed][:, :length] - reference[1][seed][:, :length]).abs().max()
        assert difference <= TOLERANCE


def test_reference_run_accepts_some_and_rejects_some(reference: Records) -> None:
    steps = [len(starts) for starts in reference[0].values()]
    assert len(steps) < sum(steps) < len(steps) * MAX_TOKENS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("batch", {}),
        ("chunk of 4", {"prefill_chunk": 4}),
        ("chunk of 32", {"prefill_chunk": 32}),
        ("no prefix cache", {"prefix_cache": False, "prefill_chunk": 5}),
    ],
)
def test_draft_is_unchanged_in_batches_and_chunks(
    narrow_pair: TinyPair,
    reference: Records,
    tmp_path: Path,
    path: str,
    fields: dict[str, object],
) -> None:
    engine = start(engine_config(narrow_pair, **fields), Recorder(tmp_path).install)
    try:
        engine.collect(submits())
    finally:
        engine.shutdown()
    check(reference, tmp_path)


def test_draft_is_unchanged_on_a_warm_prefix(
    narrow_pair: TinyPair, reference: Records, tmp_path: Path
) -> None:
    engine = start(engine_config(narrow_pair, prefill_chunk=4), Recorder(tmp_path).install)
    try:
        engine.collect(submits())
        events = engine.collect(submits())
        assert sum(e[0].cached_tokens or 0 for e in events.values()) > 50
    finally:
        engine.shutdown()
    check(reference, tmp_path)


def test_draft_is_unchanged_after_preemption(
    narrow_pair: TinyPair, reference: Records, tmp_path: Path
) -> None:
    config = engine_config(narrow_pair, pages=13, max_model_len=80, prefill_chunk=16)
    engine = start(config, Recorder(tmp_path).install)
    try:
        engine.collect(submits())
        assert engine.stats.preemptions > 0
    finally:
        engine.shutdown()
    check(reference, tmp_path)


@pytest.mark.parametrize("emitted", [1, 7, 16, 23])
def test_draft_is_unchanged_in_a_resumed_request(
    narrow_pair: TinyPair, reference: Records, tmp_path: Path, emitted: int
) -> None:
    plain = start(engine_config(narrow_pair, draft=False))
    try:
        ids = {k: ids_of(v)[:emitted] for k, v in plain.collect(submits()).items()}
    finally:
        plain.shutdown()
    # Resume where the reference began a block, so that both have steps in common.
    for submit in submits():
        seed, prompt_len = submit.params.seed, len(submit.prompt_ids)
        starts = [s for s in reference[0][seed] if s - prompt_len < emitted]
        ids[submit.request_id] = ids[submit.request_id][: max(starts) - prompt_len + 1]
    engine = start(engine_config(narrow_pair), Recorder(tmp_path).install)
    try:
        engine.collect(submits(ids))
    finally:
        engine.shutdown()
    check(reference, tmp_path, same_starts=False)


def test_draft_is_unchanged_across_two_ranks(
    narrow_pair: TinyPair, reference: Records, tmp_path: Path
) -> None:
    config = engine_config(narrow_pair, tp=2, prefill_chunk=24)
    engine = start(config, Recorder(tmp_path).install)
    try:
        engine.collect(submits())
    finally:
        engine.shutdown()
    check(reference, tmp_path, tp=2)
