"""Whatever the draft proposes, the ids are those of plain decoding and of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tests.engine.cases import SAMPLINGS, Case, EngineKey, matrix, pairwise, rank_cases
from tests.engine.harness import SHORT, Harness, engine_config
from tests.engine.neartie import count_difference, defined_ids, greedy_ids
from tests.engine.report import histogram_cases
from tests.engines import ids_of, run
from tests.tiny import TinyPair

PAIRWISE = pairwise(matrix(tp=1))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_plain_greedy_equals_transformers(
    harness: Harness, pairs: dict[str, TinyPair], family: str
) -> None:
    plain = harness.plain(family)
    ties = sum(
        count_difference(
            pairs[family].target,
            submit,
            greedy_ids(pairs[family].target, submit.prompt_ids, SHORT),
            plain[submit.request_id][:SHORT],
        )
        for submit in harness.submits("greedy", SHORT)
    )
    assert ties <= 1


@pytest.mark.parametrize("sampling", [name for name in SAMPLINGS if name != "greedy"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_plain_sampling_picks_what_the_definition_says(
    harness: Harness, pairs: dict[str, TinyPair], family: str, sampling: str
) -> None:
    """The best logit + T · G(seed, absolute position, id) among the ids that truncation keeps."""
    plain = harness.plain(family)
    for submit in harness.submits(sampling, SHORT):
        ids = plain[submit.request_id][:SHORT]
        assert defined_ids(pairs[family].target, submit, ids) == ids


def test_pairwise_cases_cover_every_pair_of_choices() -> None:
    values = {v for case in PAIRWISE for v in dataclasses.astuple(case)[1:]}
    assert {*SAMPLINGS, "real", "perfect", "half", "random", 1, 7} <= values
    assert len(PAIRWISE) < 40


def test_ids_equal_plain_decoding_in_every_pair_of_choices(harness: Harness) -> None:
    tally = harness.run(PAIRWISE)
    print(tally.text())
    assert tally.preemptions > 0
    assert tally.near_ties <= 2


@pytest.mark.parametrize("tp", [2, 4])
def test_ids_equal_plain_decoding_across_ranks(harness: Harness, tp: int) -> None:
    family, small = ("qwen3", True) if tp == 2 else ("llama", False)
    key = EngineKey(family, block=8, chunk=64, small_pool=small, tp=tp)
    cases = [
        Case(key, "greedy", "random", batch=7, warm=False),
        Case(key, "sampled", "half", batch=7, warm=True),
        Case(key, "nucleus", "perfect", batch=1, warm=True),
        Case(key, "mixed", "real", batch=7, warm=False),
    ]
    assert harness.run(cases).near_ties <= 2


def test_every_accepted_length_occurs_often(harness: Harness) -> None:
    harness.run(histogram_cases())
    print(harness.tally.text())
    assert set(harness.tally.accepted) == {2, 8, 16}
    assert harness.tally.rare(least=20) == {}


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_narrower_verification_keeps_the_ids(harness: Harness, pair: TinyPair, rows: int) -> None:
    submits = [s for name in SAMPLINGS for s in harness.submits(name, SHORT)]
    outcome = run(engine_config(pair, verify_length=rows), submits)
    plain = harness.plain("qwen3")
    for submit, ids in zip(submits, outcome.ids, strict=True):
        assert ids == plain[submit.request_id][:SHORT]
    assert set(outcome.stats.by_length) == {rows}


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}])
def test_truncation_to_one_id_equals_greedy_when_most_drafts_are_wrong(
    harness: Harness, truncation: dict[str, float]
) -> None:
    engine = harness.start(EngineKey("qwen3", 8, 64, False, 1))
    harness.control.write_text("random")
    submits = [
        msgspec.structs.replace(
            s, params=msgspec.structs.replace(s.params, temperature=1.0, **truncation)
        )
        for s in harness.submits("greedy", SHORT)
    ]
    try:
        events = engine.collect(submits)
    finally:
        engine.shutdown()
    plain = harness.plain("qwen3")
    for submit in submits:
        assert ids_of(events[submit.request_id]) == plain[submit.request_id][:SHORT]


def test_a_top_k_beyond_the_vocabulary_keeps_every_id(harness: Harness, pair: TinyPair) -> None:
    submits = [
        msgspec.structs.replace(s, params=msgspec.structs.replace(s.params, top_k=2**60))
        for s in harness.submits("sampled", SHORT)
    ]
    outcome = run(engine_config(pair), submits)
    plain = harness.plain("qwen3")
    assert outcome.ids == [plain[s.request_id][:SHORT] for s in submits]


@pytest.mark.slow
def test_ids_equal_plain_decoding_in_the_full_matrix(
    pairs: dict[str, TinyPair], tmp_path: Path
) -> None:
    tally = Harness(pairs, tmp_path).run(matrix(1))
    print(tally.text())
    assert tally.near_ties <= tally.requests // 100
    assert tally.rare(least=20) == {}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ids_equal_plain_decoding_in_every_pair_of_choices_at_more_ranks(
    pairs: dict[str, TinyPair], tmp_path: Path, tp: int
) -> None:
    tally = Harness(pairs, tmp_path).run(rank_cases(tp))
    print(tally.text())
    assert tally.near_ties <= tally.requests // 100
