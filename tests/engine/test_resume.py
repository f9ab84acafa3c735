"""A request submitted with the ids it already emitted goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.engine.cases import SAMPLINGS, EngineKey
from tests.engine.harness import SHORT, Harness
from tests.engines import ids_of


@pytest.mark.parametrize("drafter", ["real", "perfect", "half"])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_resumed_request_gives_exactly_the_remaining_ids(
    harness: Harness, sampling: str, drafter: str
) -> None:
    engine = harness.start(EngineKey("qwen3", 8, 16, False, 1))
    Path(harness.control).write_text(drafter)
    plain = harness.plain("qwen3")
    submit = harness.submits(sampling, SHORT)[2]
    ids = plain[submit.request_id][:SHORT]
    resumed = [
        msgspec.structs.replace(submit, request_id=f"k{k}", emitted_ids=ids[:k])
        for k in range(SHORT + 1)
    ]
    try:
        events = engine.collect(resumed)
    finally:
        engine.shutdown()
    for k in range(SHORT + 1):
        assert ids_of(events[f"k{k}"]) == ids[k:], f"after {k} emitted ids"
        assert events[f"k{k}"][-1].finish_reason == "length"


def test_resume_after_the_end_adds_nothing(harness: Harness) -> None:
    plain = harness.plain("qwen3")
    submit = harness.submits("sampled", SHORT)[0]
    ids = plain[submit.request_id][:5]
    stopped = msgspec.structs.replace(
        submit,
        emitted_ids=ids,
        params=msgspec.structs.replace(submit.params, stop_token_ids=(ids[-1],)),
    )
    engine = harness.start(EngineKey("qwen3", 8, 16, False, 1))
    try:
        (event,) = engine.collect([stopped])[stopped.request_id]
    finally:
        engine.shutdown()
    assert (event.token_ids, event.finish_reason) == ([], "stop")
