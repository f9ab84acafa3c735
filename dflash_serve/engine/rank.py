"""A rank's life, the same under every executor: join, load, serve, leave."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dflash_serve.config import EngineConfig
from dflash_serve.cores import usable_cores
from dflash_serve.engine.checks import resolve_device
from dflash_serve.engine.loop import EngineLoop, follow, limits_of
from dflash_serve.engine.messages import EngineInfo, Report
from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.transport import (
    Mailbox,
    NoFollowers,
    PlanReceiver,
    Plans,
    PlanSender,
    ZmqMailbox,
)
from dflash_serve.log import get_logger
from dflash_serve.parallel.group import Group, Single, connect
from dflash_serve.scheduler.scheduler import Scheduler

__all__ = [
    "OnReady",
    "RankSpec",
    "log_progress",
    "rank_environment",
    "run_rank",
    "serve_rank_zero",
    "set_threads",
]

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank must know to start.

    Attributes:
        run_dir: private folder on the host, for the engine's sockets.
        store_host, store_port: where rank 0's rendezvous store listens.
    """

    config: EngineConfig
    rank: int
    world_size: int
    run_dir: str
    store_host: str = "127.0.0.1"
    store_port: int = 0


def rank_environment(config: EngineConfig, cores: int | None = None) -> dict[str, str]:
    """Variables a rank's process needs before it imports torch.

    Several ranks share the cores, and then waiting threads must sleep: spinning ones were seen to
    slow a step twenty-fold. A single rank has the cores to itself, and there a short spin between
    two products is what keeps a step fast.
    """
    threads = str(_threads(config, cores))
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.tensor_parallel_size > 1:
        variables |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
    return variables


def set_threads(config: EngineConfig) -> None:
    """Limit this process's compute threads to its share of the cores."""
    torch.set_num_threads(_threads(config, None))


def _threads(config: EngineConfig, cores: int | None) -> int:
    if config.threads is not None:
        return config.threads
    available = usable_cores() if cores is None else cores
    return max(1, available // config.tensor_parallel_size)


OnReady = Callable[[Runner], None]
"""Called with a rank's runner before its first step; tests put another drafter in place here."""


def run_rank(
    spec: RankSpec, store: TCPStore | None = None, on_ready: OnReady | None = None
) -> None:
    """Load and serve until rank 0 is told to shut down; blocks until then.

    Rank 0 reports to the front end when every rank is ready, and reports why when it fails.

    Args:
        store: rank 0's own rendezvous store.

    Raises:
        ConfigError: as `load_pair`.
    """
    set_threads(spec.config)
    mailbox = ZmqMailbox(spec.run_dir) if spec.rank == 0 else None
    try:
        group = _join(spec, store)
        pair = load_pair(spec.config, group, log_progress)
        if mailbox is not None:
            sender = PlanSender(spec.run_dir, spec.world_size)
            serve_rank_zero(spec.config, pair, mailbox, sender, on_ready)
        else:
            _serve_follower(spec, pair, on_ready)
        group.close()
    except Exception as error:
        if mailbox is not None:
            mailbox.send(Report(fatal=f"{type(error).__name__}: {error}"))
        raise
    finally:
        if mailbox is not None:
            mailbox.close()


def _join(spec: RankSpec, store: TCPStore | None) -> Group:
    if spec.world_size == 1:
        return Single()
    device, _ = resolve_device(spec.config, spec.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gloo = device.type == "cpu" or spec.config.share_gpu
    return connect(
        spec.rank,
        spec.world_size,
        backend="gloo" if gloo else "nccl",
        host=spec.store_host,
        port=spec.store_port,
        timeout_s=spec.config.start_timeout_s,
        store=store,
    )


def log_progress(what: str, done: int, of: int) -> None:
    """Say at every quarter how much of a checkpoint has been read."""
    if done * 4 // of != (done - 1) * 4 // of:
        logger.info("%s: %d of %d tensors read", what, done, of)


def serve_rank_zero(
    config: EngineConfig,
    pair: Pair,
    mailbox: Mailbox,
    plans: Plans | None = None,
    on_ready: OnReady | None = None,
) -> None:
    """Build rank 0's loop, say that the engine is ready, and run it."""
    plans = plans if plans is not None else NoFollowers()
    runner = Runner(pair, config.max_running, config.draft_scale)
    runner.warm_up()
    if on_ready is not None:
        on_ready(runner)
    _all_ready(pair.group, pair.device)
    scheduler = Scheduler(limits_of(config, runner))
    mailbox.send(Report(info=_info(config, pair), stats=scheduler.snapshot()))
    try:
        EngineLoop(scheduler, runner, mailbox, plans).run()
    finally:
        plans.close()


def _serve_follower(spec: RankSpec, pair: Pair, on_ready: OnReady | None) -> None:
    plans = PlanReceiver(spec.run_dir, spec.rank)
    runner = Runner(pair, spec.config.max_running, spec.config.draft_scale)
    runner.warm_up()
    if on_ready is not None:
        on_ready(runner)
    _all_ready(pair.group, pair.device)
    try:
        follow(runner, plans)
    finally:
        plans.close()


def _all_ready(group: Group, device: torch.device) -> None:
    """Wait until every rank has loaded."""
    group.all_gather(torch.zeros(1, device=device))


def _info(config: EngineConfig, pair: Pair) -> EngineInfo:
    settings = pair.settings
    return EngineInfo(
        model_type=settings.target.family,
        max_model_len=settings.max_model_len,
        vocab_size=settings.target.vocab_size,
        eos_token_ids=list(settings.target.eos_token_ids),
        verify_length=settings.geometry.rows,
        block_size=settings.geometry.block if settings.draft is not None else None,
        tensor_parallel_size=pair.group.size,
        device=str(pair.device),
        dtype=str(pair.target.norm.dtype).removeprefix("torch."),
        executor=config.executor,
        num_pages=pair.num_pages,
        page_size=pair.page_size,
        max_running=config.max_running,
        weight_bytes=pair.weight_bytes,
        kv_bytes=pair.kv_bytes,
        load_seconds=pair.load_seconds,
        fallbacks=["share_gpu: gloo collectives on CUDA tensors"] if config.share_gpu else [],
        versions={name: version(name) for name in ("torch", "transformers", "safetensors")},
    )
