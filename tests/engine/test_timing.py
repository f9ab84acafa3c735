"""Timing steps at start-up leaves the device tables as they are."""

from __future__ import annotations

import pytest
import torch

from tests.engine.direct import Direct
from tests.engine.harness import engine_config
from tests.tiny import TinyPair


@pytest.mark.parametrize("synthetic", [None, 1.0])
def test_timed_steps_take_no_request_beyond_its_pages(
    pairs: dict[str, TinyPair], synthetic: float | None
) -> None:
    """However many steps are timed: with every proposal accepted a slot in use would grow fast."""
    config = engine_config(
        pairs["qwen3"], verify_length="auto", max_model_len=24, synthetic_acceptance=synthetic
    )
    runner = Direct(config).runner
    block = runner.pair.settings.geometry.verify_rows
    runner.warm_up((block, 1))
    before = runner.state.start.clone(), runner.state.page_table.clone()
    for _ in range(12):
        runner.time_steps((block, 1))
    assert torch.equal(runner.state.start, before[0])
    assert torch.equal(runner.state.page_table, before[1])
