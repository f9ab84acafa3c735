"""A stand-in for `dflash_serve.engine.rank`: the same entry points, no model, no torch.

Rank 0 answers each request with its prompt's last id plus 1, 2, 3, …, one id every few
milliseconds. Some targets make it misbehave: the name of the target folder says how.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Report,
    Shutdown,
    Submit,
    TokenEvent,
)
from dflash_serve.engine.transport import ZmqMailbox
from dflash_serve.errors import CheckpointError

STEP_S = 0.005
VOCABULARY = 2_000
_PAGES = 1_000  # a request holds one, whatever its length


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    rank: int
    world_size: int
    run_dir: str
    store_host: str
    store_port: int
    lines: Any = None


def rank_environment(config: EngineConfig, cores: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(max(1, cores // config.tensor_parallel_size))}


def run_rank(spec: RankSpec, store: Any = None, inbox: Any = None) -> None:
    name = Path(spec.config.target).name
    if name == "broken":
        raise CheckpointError("tensor model.norm.weight is missing; give a whole checkpoint")
    if name == "broken-follower" and spec.rank == 1:
        raise CheckpointError("shard 1 is truncated; copy it again")
    assert (store is not None) == (spec.rank == 0 and spec.world_size > 1)
    stop_file = Path(spec.run_dir) / "stop"
    if spec.rank > 0:
        while not stop_file.exists():
            time.sleep(0.02)
        return
    _serve(spec)
    stop_file.touch()


def _serve(spec: RankSpec) -> None:
    mailbox = ZmqMailbox(spec.run_dir)
    mailbox.send(Report(info=_info(spec), stats=EngineStats()))
    running: dict[str, tuple[Submit, int]] = {}
    stats = EngineStats()
    while True:
        events: list[TokenEvent] = []
        for command in mailbox.receive(0.0 if running else 0.05):
            if isinstance(command, Shutdown):
                mailbox.close()
                return
            if isinstance(command, Abort):
                if running.pop(command.request_id, None) is not None:
                    events.append(_end(command.request_id))
            else:
                running[command.request_id] = (command, len(command.emitted_ids))
        events += [_step(running, request_id) for request_id in list(running)]
        stats.steps += 1
        stats.running = stats.pages_used = len(running)
        stats.pages_total = _PAGES
        stats.generated_tokens += len(events)
        if events:
            mailbox.send(Report(events=events, stats=stats))
            time.sleep(STEP_S)


def _end(request_id: str) -> TokenEvent:
    return TokenEvent(request_id=request_id, finish_reason="abort")


def _step(running: dict[str, tuple[Submit, int]], request_id: str) -> TokenEvent:
    submit, done = running[request_id]
    done += 1
    last = done >= submit.params.max_tokens
    running[request_id] = (submit, done)
    if last:
        del running[request_id]
    return TokenEvent(
        request_id=request_id,
        token_ids=[(submit.prompt_ids[-1] + done) % VOCABULARY],
        finish_reason="length" if last else None,
        cached_tokens=0 if done == len(submit.emitted_ids) + 1 else None,
    )


def _info(spec: RankSpec) -> EngineInfo:
    return EngineInfo(
        model_type="fake",
        max_model_len=100_000,
        vocab_size=VOCABULARY,
        eos_token_ids=[0],
        verify_length=1,
        block_size=None,
        tensor_parallel_size=spec.world_size,
        device="cpu",
        dtype="float32",
        executor="ray",
        num_pages=_PAGES,
        page_size=16,
        max_running=spec.config.max_running,
        weight_bytes=0,
        kv_bytes=0,
        load_seconds=0.0,
    )
