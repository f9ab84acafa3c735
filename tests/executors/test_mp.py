"""Ranks as processes: what a death, an error and an end leave behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.engine.messages import Submit
from dflash_serve.engine.mp import MpExecutor
from dflash_serve.errors import CapacityError, CheckpointError, ConfigError, EngineDeadError
from tests.engines import ids_of, requests, run, start
from tests.executors.ranks import cpu_seconds, gone, outcome_of, rank_pids
from tests.executors.waiting import until
from tests.tiny import TinyPair, make_target

PROMPTS = [[5, 6, 7, 8], [20] * 11]


@pytest.mark.parametrize("victim", [0, 1], ids=["rank0", "rank1"])
def test_death_of_one_rank_ends_all_leaves_nothing_and_a_new_engine_starts(
    victim: int, two_ranks: EngineConfig, run_dirs: Path
) -> None:
    engine = start(dataclasses.replace(two_ranks, max_model_len=500))
    try:
        pids = rank_pids()
        assert len(pids) == 2
        assert len(list(run_dirs.iterdir())) == 1
        kill = [lambda: os.kill(pids[victim], signal.SIGKILL)]
        long = requests(PROMPTS, max_tokens=400)
        thread, errors = outcome_of(
            lambda: engine.collect(long, lambda event: kill.pop()() if kill else None)
        )
        thread.join(60)
        assert f"rank {victim} ended with exit code -9" in str(errors[0])
        with pytest.raises(EngineDeadError, match="exit code -9"):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            engine.collect(requests(PROMPTS))
        engine.abort("r0")
        until(lambda: all(gone(pid) for pid in pids.values()))
    finally:
        engine.shutdown()
    assert list(run_dirs.iterdir()) == []
    assert multiprocessing.active_children() == []
    again = run(two_ranks, requests(PROMPTS, max_tokens=3))
    assert [len(ids) for ids in again.ids] == [3, 3]


def test_ranks_idle_without_cpu_answer_as_one_rank_does_and_leave_nothing(
    two_ranks: EngineConfig, config: EngineConfig, run_dirs: Path
) -> None:
    submits = requests(PROMPTS, max_tokens=16)
    expected = run(config, submits).ids
    engine = start(two_ranks)
    try:
        by_id = engine.collect(submits)
        assert [ids_of(by_id[s.request_id]) for s in submits] == expected
        assert engine.info.tensor_parallel_size == 2
        pids = rank_pids()
        before = {pid: cpu_seconds(pid) for pid in pids.values()}
        threading.Event().wait(2.0)
        used = {pid: cpu_seconds(pid) - before[pid] for pid in pids.values()}
        assert max(used.values()) < 0.3
    finally:
        began = time.monotonic()
        engine.shutdown()
    assert time.monotonic() - began < 15
    assert all(gone(pid) for pid in pids.values())
    assert list(run_dirs.iterdir()) == []


def test_errors_known_before_loading_start_no_process(
    two_ranks: EngineConfig, run_dirs: Path, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, object], type[ConfigError], str]] = [
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size is 3"),
        ({"kv_cache_gib": 1e-7}, CapacityError, "smallest kv_cache_gib"),
        ({"target": str(tmp_path)}, CheckpointError, "config.json does not exist"),
        ({"verify_length": 40}, ConfigError, "verify_length is 40"),
    ]
    for fields, kind, text in cases:
        with pytest.raises(kind, match=text):
            start_engine(dataclasses.replace(two_ranks, **fields))  # type: ignore[arg-type]
    assert multiprocessing.active_children() == []
    assert list(run_dirs.iterdir()) == []


def test_error_found_while_loading_keeps_its_type_and_text(
    two_ranks: EngineConfig, run_dirs: Path, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", "qwen3")
    path = target / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(320, 64)}, path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings: true"):
        start_engine(dataclasses.replace(two_ranks, target=str(target)))
    assert multiprocessing.active_children() == []
    assert list(run_dirs.iterdir()) == []


def test_ray_ranks_are_not_started_here(two_ranks: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="'inproc' or 'mp'"):
        start_engine(dataclasses.replace(two_ranks, executor="ray"))


class Recording(MpExecutor):
    """Keeps the port of the rendezvous store."""

    store_port = 0

    def _receive_port(self, pipe: Connection) -> int:
        self.store_port = super()._receive_port(pipe)
        return self.store_port


@pytest.mark.slow
def test_engines_started_at_once_meet_in_stores_of_their_own(
    two_ranks: EngineConfig, pair: TinyPair, run_dirs: Path
) -> None:
    submits: list[Submit] = requests(PROMPTS, max_tokens=6)
    executors = [Recording(two_ranks) for _ in range(4)]
    answers: dict[int, list[list[int]]] = {}
    together = threading.Barrier(4)

    def serve(index: int) -> None:
        together.wait()
        engine = EngineClient(executors[index], start_timeout_s=300)
        by_id = engine.collect(submits)
        answers[index] = [ids_of(by_id[s.request_id]) for s in submits]
        together.wait()
        engine.shutdown()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({executor.store_port for executor in executors}) == 4
    assert len({str(ids) for ids in answers.values()}) == 1
    assert sorted(answers) == [0, 1, 2, 3]
    assert list(run_dirs.iterdir()) == []
