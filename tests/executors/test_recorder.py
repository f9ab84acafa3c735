"""Flight records: written when an engine ends badly, private, and good for a replay."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dflash_serve.cli import app
from dflash_serve.config import EngineConfig
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.recorder import FlightRecord, Recorder, load_record
from dflash_serve.engine.replay import replay
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import ConfigError, EngineDeadError
from dflash_serve.scheduler.plan import DecodeResult, StepPlan, StepResult
from tests.engines import requests, start
from tests.tiny import TinyPair

SHARED = list(range(10, 60))


class Breaker:
    """Makes the next step raise, when told to."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def install(self, runner: Runner) -> None:
        launch = runner.launch

        def launch_or_raise(plan: StepPlan) -> Pending:
            if self.broken.is_set():
                raise RuntimeError("this step broke")
            return launch(plan)

        runner.launch = launch_or_raise  # type: ignore[method-assign]


def record_of(config: EngineConfig, *batches: list[list[int]], max_tokens: int = 6) -> Path:
    """Serve batches of prompts one after the other, then break; returns the record's path."""
    breaker = Breaker()
    engine = start(config, breaker.install)
    try:
        for number, prompts in enumerate(batches):
            params = {"temperature": 0.7 * (number % 2), "first_seed": 10 * number}
            engine.collect(requests(prompts, max_tokens=max_tokens, **params))
        breaker.broken.set()
        with pytest.raises(EngineDeadError, match="this step broke"):
            engine.collect(requests([[3, 4]]))
    finally:
        engine.shutdown()
    assert config.record_dir is not None
    (path,) = Path(config.record_dir).iterdir()
    return path


@pytest.fixture
def path(config: EngineConfig) -> Path:
    """A record of cold prompts, a prefix hit, sampling, and a step that broke."""
    return record_of(config, [SHARED, [7] * 9], [[*SHARED[:40], 5, 6]])


def test_an_exception_in_a_step_leaves_a_private_record(path: Path, config: EngineConfig) -> None:
    record = load_record(path)
    assert path.name.startswith("dflash-rank0-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert record.reason == "rank 0 failed: RuntimeError: this step broke"
    assert record.config == dataclasses.asdict(config)
    assert record.steps[0].plan.prefill[0].token_ids == SHARED
    assert all(len(step.checksum or "") == 16 for step in record.steps[:-1])
    assert record.steps[-1].result is None


def test_a_record_replays_with_the_ids_it_holds(path: Path, pair: TinyPair) -> None:
    record = load_record(path)
    assert any(setup.start for step in record.steps for setup in step.plan.setups)
    outcome = replay(record, pair.target, pair.draft)
    assert outcome.difference is None
    assert outcome.skipped == {}
    assert outcome.steps == len(record.steps) - 1
    assert outcome.entries >= outcome.steps


def test_the_first_step_that_differs_is_named(path: Path, pair: TinyPair) -> None:
    record = load_record(path)
    decoding = [step for step in record.steps if step.result is not None and step.plan.decode]
    forged = decoding[2]
    assert forged.result is not None
    block = forged.result.decoded[-1]
    block.picked[block.accepted] ^= 1
    found = replay(record, pair.target, pair.draft).difference
    assert found is not None
    assert (found.step, found.slot) == (forged.plan.step, forged.plan.decode[-1])
    assert found.recorded == block.picked[: block.accepted + 1]
    assert found.replayed != found.recorded


def test_slots_from_before_the_record_and_pages_they_left_are_named(
    config: EngineConfig, pair: TinyPair
) -> None:
    slow = dataclasses.replace(config, verify_length=1)
    # 90 steps of two slots; then one prompt on pages filled long ago, beside one of its own.
    path = record_of(slow, [SHARED, [8] * 9], [[*SHARED, 5], [9] * 20], max_tokens=45)
    record = load_record(path)
    assert len(record.steps) == 64
    outcome = replay(record, pair.target, pair.draft)
    assert outcome.difference is None
    assert outcome.entries > 40
    reasons = sorted(outcome.skipped.values())
    assert any("tokens come from cached pages" in reason for reason in reasons)
    assert any("set up before the record begins" in reason for reason in reasons)


def test_the_command_line_replays(path: Path, pair: TinyPair, tmp_path: Path) -> None:
    command = ["replay", str(path), "--target", pair.target, "--draft", pair.draft]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "chunks and blocks compared" in done.output
    record = load_record(path)
    assert record.steps[0].result is not None
    record.steps[0].result.sampled[0] = 0
    forged = tmp_path / "forged.json"
    forged.write_bytes(msgspec.json.encode(record))
    done = CliRunner().invoke(app, [*command[:1], str(forged), *command[2:]])
    assert done.exit_code == 1
    assert f"step {record.steps[0].plan.step} is the first that differs" in done.output


def test_what_is_no_record_is_refused(tmp_path: Path, pair: TinyPair, path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for wrong in (other, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match="no flight record"):
            load_record(wrong)
    record = load_record(path)
    record.config["setting_of_tomorrow"] = 1
    with pytest.raises(ConfigError, match="setting_of_tomorrow"):
        replay(record, pair.target, pair.draft)


def test_a_recorder_keeps_the_last_steps_and_writes_once(config: EngineConfig) -> None:
    recorder = Recorder(config, 1, 2, max_model_len=256, page_size=16)
    block = DecodeResult(picked=[1], accepted=0, fault=False)
    for number in range(100):
        recorder.launched(StepPlan(step=number, decode=[0]))
        recorder.settled(number, StepResult(decoded=[block]), number)
    path = recorder.dump("first")
    assert recorder.dump("second") == path
    record: FlightRecord = load_record(path)
    assert record.reason == "first"
    assert [step.plan.step for step in record.steps] == list(range(36, 100))
    assert record.steps[-1].checksum == f"{99:016x}"
    assert record.world_size == 2


def test_old_files_are_dropped(config: EngineConfig) -> None:
    assert config.record_dir is not None
    folder = Path(config.record_dir)
    folder.mkdir(mode=0o700)
    for number in range(80):
        (folder / f"dflash-rank0-{number}.json").touch()
    (folder / "notes.txt").touch()
    newest = Recorder(config, 0, 1, max_model_len=256, page_size=16).dump("full")
    assert newest.exists()
    assert len(list(folder.glob("dflash-rank*.json"))) == 64
    assert (folder / "notes.txt").exists()
