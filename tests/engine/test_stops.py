"""Where a request ends inside an accepted block: nothing past it, and the counts agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import Submit, TokenEvent
from tests.engine.cases import EngineKey
from tests.engine.drafting import Switched
from tests.engine.harness import Harness, engine_config
from tests.engines import ids_of, start
from tests.tiny import VOCAB, TinyPair

BLOCK = 8


@pytest.fixture(scope="module")
def perfect(harness: Harness) -> Iterator[EngineClient]:
    """An engine whose every block is accepted whole."""
    engine = harness.start(EngineKey("qwen3", BLOCK, 64, False, 1))
    harness.control.write_text("perfect")
    yield engine
    engine.shutdown()


def changed(submit: Submit, name: str, **fields: object) -> Submit:
    """The same request under another name and with other parameters."""
    params = msgspec.structs.replace(submit.params, **fields)
    return msgspec.structs.replace(submit, request_id=name, params=params)


def check_counts(events: list[TokenEvent]) -> None:
    """What every step claims lies within what it delivered."""
    for event in events:
        assert event.accepted <= min(event.drafted, len(event.token_ids))
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)


def test_every_max_tokens_gives_exactly_that_many_ids(
    harness: Harness, perfect: EngineClient
) -> None:
    base = harness.submits("sampled", 1)[1]
    expected = harness.plain("qwen3")[base.request_id]
    submits = [changed(base, f"n{n}", max_tokens=n) for n in range(1, 21)]
    before = perfect.stats.generated_tokens
    events = perfect.collect(submits)
    for n in range(1, 21):
        mine = events[f"n{n}"]
        check_counts(mine)
        assert ids_of(mine) == expected[:n]
        assert mine[-1].finish_reason == "length"
    assert perfect.stats.generated_tokens - before == sum(range(1, 21))
    assert any(e.accepted == BLOCK - 1 for mine in events.values() for e in mine)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_stop_id_at_every_place_of_a_block_ends_there(
    harness: Harness, perfect: EngineClient, sampling: str
) -> None:
    base = harness.submits(sampling, 40)[4]
    expected = harness.plain("qwen3")[base.request_id][:40]
    submits = [
        changed(base, f"at{i}", stop_token_ids=(token,)) for i, token in enumerate(expected[:24])
    ]
    events = perfect.collect(submits)
    ends = set()
    for i, token in enumerate(expected[:24]):
        mine = events[f"at{i}"]
        check_counts(mine)
        end = expected.index(token) + 1
        assert ids_of(mine) == expected[:end]
        assert mine[-1].finish_reason == "stop"
        ends.add((end - 2) % BLOCK if end > 1 else None)
    if sampling == "sampled":
        assert ends >= set(range(BLOCK)), "not every row of a block was an end"


@pytest.mark.parametrize("index", [0, 1, 4, 8, 9, 13])
def test_end_of_sequence_inside_a_block_ends_the_request(
    harness: Harness, pair: TinyPair, tmp_path: Path, index: int
) -> None:
    """An id that the model is known to emit takes the part of the end of sequence."""
    base = changed(harness.submits("sampled", 40)[0], "r", ignore_eos=False)
    expected = harness.plain("qwen3")["sampled-0"][:40]
    end = expected.index(expected[index]) + 1
    target = tmp_path / "target"
    shutil.copytree(pair.target, target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": expected[index]}))
    control = tmp_path / "behaviour"
    control.write_text("perfect")
    known = {base.params.seed: base.prompt_ids + harness.plain("qwen3")["sampled-0"]}
    config = engine_config(TinyPair(str(target), pair.draft))
    engine = start(config, Switched(known, VOCAB, control).install)
    try:
        events = engine.collect([base, changed(base, "deaf", ignore_eos=True)])
    finally:
        engine.shutdown()
    assert ids_of(events["r"]) == expected[:end]
    assert events["r"][-1].finish_reason == "stop"
    assert ids_of(events["deaf"]) == expected
    assert engine.stats.pages_used == 0


def test_stop_wins_over_length_at_the_same_id(harness: Harness, perfect: EngineClient) -> None:
    base = harness.submits("sampled", 40)[3]
    expected = harness.plain("qwen3")[base.request_id]
    last = next(i for i in range(6, 40) if expected.index(expected[i]) == i)
    submit = changed(base, "r", max_tokens=last + 1, stop_token_ids=(expected[last],))
    events = perfect.collect([submit])["r"]
    assert ids_of(events) == expected[: last + 1]
    assert events[-1].finish_reason == "stop"


def test_abort_in_mid_flight_frees_every_page(harness: Harness, perfect: EngineClient) -> None:
    submits = [changed(s, f"a{i}") for i, s in enumerate(harness.submits("sampled", 150))]

    def abort_some(event: TokenEvent) -> None:
        if event.request_id != "a0" and event.drafted:
            perfect.abort(event.request_id)

    events = perfect.collect(submits, abort_some)
    assert events["a0"][-1].finish_reason == "length"
    assert {e[-1].finish_reason for e in events.values()} >= {"abort"}
    for i, submit in enumerate(harness.submits("sampled", 150)):
        ids = ids_of(events[f"a{i}"])
        assert ids == harness.plain("qwen3")[submit.request_id][: len(ids)]
    assert (perfect.stats.pages_used, perfect.stats.running, perfect.stats.waiting) == (0, 0, 0)


def test_context_end_cuts_the_block(harness: Harness, pair: TinyPair, tmp_path: Path) -> None:
    base = harness.submits("sampled", 500)[1]
    expected = harness.plain("qwen3")[base.request_id]
    control = tmp_path / "behaviour"
    control.write_text("perfect")
    known = {base.params.seed: base.prompt_ids + expected}
    for limit in range(50, 59):
        config = engine_config(pair, max_model_len=limit)
        engine = start(config, Switched(known, VOCAB, control).install)
        try:
            events = engine.collect([base])[base.request_id]
        finally:
            engine.shutdown()
        assert ids_of(events) == expected[: limit - len(base.prompt_ids)]
        assert events[-1].finish_reason == "length"
