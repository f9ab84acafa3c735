"""Launching a step before reading the one ahead of it changes no id."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from dflash_serve.scheduler.draft_scale import DraftScale
from dflash_serve.scheduler.verify_length import Decision, VerifyLengthPolicy
from tests.engine.cases import SAMPLINGS
from tests.engine.harness import SHORT, Harness, engine_config
from tests.engines import ids_of, run, start
from tests.tiny import TinyPair


@pytest.mark.parametrize("pages", [None, 40], ids=["roomy", "short-of-pages"])
@pytest.mark.parametrize("draft", [True, False], ids=["dflash", "plain"])
def test_overlapped_steps_give_the_ids_of_plain_decoding(
    harness: Harness, pair: TinyPair, draft: bool, pages: int | None
) -> None:
    config = engine_config(pair, draft=draft, pages=pages, overlap=True, prefill_chunk=16)
    submits = [s for name in SAMPLINGS for s in harness.submits(name, SHORT)]
    outcome = run(config, submits)
    plain = harness.plain("qwen3")
    for submit, ids in zip(submits, outcome.ids, strict=True):
        assert ids == plain[submit.request_id][:SHORT]
    assert outcome.stats.pages_used == 0
    if pages is not None:
        assert outcome.stats.preemptions > 0


def test_overlapped_steps_give_the_same_ids_on_a_warm_prefix(
    harness: Harness, pair: TinyPair
) -> None:
    engine = start(engine_config(pair, overlap=True, max_running=3))
    submits = harness.submits("sampled", SHORT)
    try:
        cold = engine.collect(submits)
        warm = engine.collect(submits)
    finally:
        engine.shutdown()
    for submit in submits:
        assert ids_of(warm[submit.request_id]) == ids_of(cold[submit.request_id])
    assert any(events[0].cached_tokens for events in warm.values())


def test_a_request_that_is_sure_to_end_is_not_run_again(pair: TinyPair, harness: Harness) -> None:
    """Without a draft every step brings one token, so the number of steps is known."""
    steps = {}
    for overlap in (False, True):
        config = dataclasses.replace(engine_config(pair, draft=False), overlap=overlap)
        steps[overlap] = run(config, harness.submits("greedy", SHORT)).stats.steps
    assert steps[True] == steps[False]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlapped"])
def test_verify_lengths_that_change_from_step_to_step_keep_the_ids(
    harness: Harness, pair: TinyPair, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = itertools.cycle([8, 1, 6, 2, 4, 3])

    def restless(self: VerifyLengthPolicy, batch: int, mean_context: float) -> Decision:
        return Decision(next(ladder), self.decide_itself(batch, mean_context).predicted, "explore")  # type: ignore[attr-defined]

    monkeypatch.setattr(
        VerifyLengthPolicy, "decide_itself", VerifyLengthPolicy.decide, raising=False
    )
    monkeypatch.setattr(VerifyLengthPolicy, "decide", restless)
    config = engine_config(pair, verify_length="auto", overlap=overlap, max_running=7)
    engine = start(config)
    submits = [s for name in SAMPLINGS for s in harness.submits(name, SHORT)]
    try:
        events = engine.collect(submits)
        policy, lengths = engine.stats.policy, set(engine.stats.by_length)
    finally:
        engine.shutdown()
    plain = harness.plain("qwen3")
    for submit in submits:
        assert ids_of(events[submit.request_id]) == plain[submit.request_id][:SHORT]
    assert policy is not None
    assert policy.tokens_per_second.keys() == {1, 2, 3, 4, 6, 8}
    assert lengths == {1, 2, 3, 4, 6, 8}


def test_a_draft_scale_that_is_fitted_keeps_the_ids(
    harness: Harness, pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = itertools.cycle([0.5, 2.0, 1.0])
    monkeypatch.setattr(DraftScale, "choose", lambda self: next(scales))
    monkeypatch.setattr(DraftScale, "observe", lambda self, scale, rows, accepted: None)
    submits = harness.submits("sampled", SHORT)
    outcome = run(engine_config(pair, draft_scale="auto"), submits)
    plain = harness.plain("qwen3")
    assert outcome.ids == [plain[s.request_id][:SHORT] for s in submits]
    assert outcome.stats.scale is not None
