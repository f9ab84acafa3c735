"""Soft knobs of a live engine: changed in the middle of requests, whose ids stay the same."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import TokenEvent
from dflash_serve.errors import RequestError
from dflash_serve.scheduler.tuning import Tuning
from tests.engines import ids_of, requests, run, start

PROMPTS = [[5, 6, 7, 8], [20] * 11]
CHANGES = [
    Tuning(verify_length=2),
    Tuning(speculation=False),
    Tuning(),
    Tuning(max_running=1),
    Tuning(verify_length=3),
]


def tuned_in_flight(engine: EngineClient) -> list[list[int]]:
    """Ids of requests that see every change while they run."""
    seen = 0

    def change(_: TokenEvent) -> None:
        nonlocal seen
        if seen % 8 == 0 and seen // 8 < len(CHANGES):
            engine.tune(CHANGES[seen // 8])
        seen += 1

    submits = requests(PROMPTS, max_tokens=120, temperature=0.7)
    outcome = engine.collect(submits, change)
    assert seen > 8 * len(CHANGES)
    return [ids_of(outcome[s.request_id]) for s in submits]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlap", [False, True])
def test_ids_stay_those_of_plain_decoding_across_changes(
    ranks: int, overlap: bool, config: EngineConfig, two_ranks: EngineConfig
) -> None:
    base = config if ranks == 1 else two_ranks
    plain = dataclasses.replace(base, draft=None)
    expected = run(plain, requests(PROMPTS, max_tokens=120, temperature=0.7)).ids
    engine = start(dataclasses.replace(base, overlap=overlap))
    try:
        assert tuned_in_flight(engine) == expected
        assert {1, 2, 3} <= engine.stats.by_length.keys()
        assert engine.stats.tuning == CHANGES[-1]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("field", ["verify_length", "max_running"])
def test_what_the_engine_was_not_started_for_is_refused_by_name(
    field: str, config: EngineConfig
) -> None:
    engine = start(config)
    try:
        with pytest.raises(RequestError, match=f"{field} is 99; allowed.*deploy again"):
            engine.tune(Tuning(**{field: 99}))
        assert engine.stats.tuning == Tuning()
    finally:
        engine.shutdown()
