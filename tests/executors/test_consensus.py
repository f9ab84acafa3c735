"""Ranks that commit different tokens: fatal, and no client sees one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import TokenEvent
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.recorder import load_record
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import EngineDeadError
from dflash_serve.scheduler.plan import StepPlan, StepResult
from tests.engines import ids_of, requests, run, start

PROMPT = [5, 6, 7, 8]


@dataclasses.dataclass(frozen=True)
class Liar:
    """Lets rank 1 commit another token in its n-th step."""

    step: int

    def install(self, runner: Runner) -> None:
        if runner.pair.group.rank != 1:
            return
        launch, launched = runner.launch, 0

        def launch_and_lie(plan: StepPlan) -> Pending:
            nonlocal launched
            launched += 1
            pending = launch(plan)
            if launched == self.step:
                read = pending.result
                pending.result = lambda: _altered(read())  # type: ignore[method-assign]
            return pending

        runner.launch = launch_and_lie  # type: ignore[method-assign]


def _altered(result: StepResult) -> StepResult:
    if result.decoded:
        result.decoded[0].picked[0] ^= 1
    else:
        result.sampled[0] = 1 - (result.sampled[0] or 0)
    return result


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_commits_another_token_ends_the_engine_before_it_is_sent(
    overlap: bool, two_ranks: EngineConfig
) -> None:
    config = dataclasses.replace(two_ranks, overlap=overlap)
    submits = requests([PROMPT], max_tokens=40)
    honest = run(dataclasses.replace(config, executor="inproc", tensor_parallel_size=1), submits)
    engine = start(config, Liar(step=4).install)
    seen: list[TokenEvent] = []
    try:
        text = (
            r"^ConsensusError: the ranks committed different tokens in step \d+: checksums "
            r"rank 0 [0-9a-f]{16}, rank 1 [0-9a-f]{16}; requests: r0; none of"
        )
        with pytest.raises(EngineDeadError, match=text):
            engine.collect(submits, seen.append)
        assert engine.stats.consensus_mismatches == 1
        # One event a step: those of the three steps before are out, or all but the last of them.
        assert 2 <= len(seen) <= 3
        assert ids_of(seen) == ids_of(honest.events[0][: len(seen)])
    finally:
        engine.shutdown()
    assert config.record_dir is not None
    records = [load_record(path) for path in Path(config.record_dir).iterdir()]
    assert sorted(record.rank for record in records) == [0, 1]
    assert all("ConsensusError" in record.reason for record in records)
    zero, one = (
        {step.plan.step: step.checksum for step in record.steps if step.checksum is not None}
        for record in records
    )
    common = sorted(zero.keys() & one.keys())
    assert [step for step in common if zero[step] != one[step]] == common[3:4]


@pytest.mark.slow
def test_two_overlapped_ranks_send_everything_they_agree_on(two_ranks: EngineConfig) -> None:
    submits = requests([PROMPT, [20] * 40, [9]], max_tokens=30)
    expected = run(
        dataclasses.replace(two_ranks, executor="inproc", tensor_parallel_size=1), submits
    )
    outcome = run(dataclasses.replace(two_ranks, overlap=True), submits)
    assert outcome.ids == expected.ids
    assert outcome.stats.consensus_steps > 5
    assert outcome.stats.consensus_mismatches == 0
