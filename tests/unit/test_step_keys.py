"""Which captured step runs a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.engine.graphs import StepGraphs, StepKey, batch_buckets


def _graphs(largest: int, quiet_rows: int) -> StepGraphs:
    def run(key: StepKey, slots: Tensor) -> Tensor:
        raise AssertionError("nothing is captured here")

    idle = torch.zeros(largest, dtype=torch.int64)
    return StepGraphs(run, idle, idle, batch_buckets(largest), quiet_rows)


def test_a_step_is_one_for_all_temperatures_up_to_the_quiet_rows() -> None:
    graphs = _graphs(8, quiet_rows=64)
    for noisy in (False, True):
        assert graphs.key(4, 16, truncates=False, noisy=noisy) == StepKey(4, 16)
    assert graphs.key(5, 16, truncates=False, noisy=False) == StepKey(6, 16)
    assert graphs.key(5, 16, truncates=False, noisy=True) == StepKey(6, 16, noisy=True)


def test_every_key_that_a_batch_without_truncation_can_have_is_captured() -> None:
    graphs = _graphs(20, quiet_rows=64)
    lengths = (16, 8, 1)
    asked = {
        graphs.key(batch, rows, truncates=False, noisy=noisy)
        for batch in range(1, 21)
        for rows in lengths
        for noisy in (False, True)
    }
    keys = graphs.keys(lengths)
    assert set(keys) == asked
    assert len(keys) == len(asked)
    sizes = [key.batch * key.rows for key in keys]
    assert sizes == sorted(sizes, reverse=True)


def test_timed_steps_are_those_without_noise() -> None:
    keys = _graphs(20, quiet_rows=64).keys((16, 1), noisy=(False,))
    assert len(keys) == 2 * len(batch_buckets(20))
    assert not any(key.noisy for key in keys)
