"""A rank's life, the same under every executor: join, load, serve, leave."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dflash_serve.config import EngineConfig
from dflash_serve.cores import usable_cores
from dflash_serve.engine.checks import resolve_device
from dflash_serve.engine.consensus import Echoes, Ledger, NoEchoes
from dflash_serve.engine.guard import Guard
from dflash_serve.engine.lines import (
    EchoReceiver,
    EchoSender,
    Inbox,
    Lines,
    PlanReceiver,
    PlanSender,
    local_lines,
)
from dflash_serve.engine.loop import EngineLoop, follow, limits_of
from dflash_serve.engine.messages import EngineInfo, Report
from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.engine.pulse import Board
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.sizing import step_bytes
from dflash_serve.engine.transport import Mailbox, NoFollowers, Plans, ZmqMailbox
from dflash_serve.engine.watchdog import leave
from dflash_serve.errors import EngineDeadError
from dflash_serve.log import get_logger
from dflash_serve.parallel.group import Group, Single, connect
from dflash_serve.scheduler.draft_scale import DraftScale
from dflash_serve.scheduler.scheduler import Scheduler
from dflash_serve.scheduler.verify_length import CostTable, VerifyLengthPolicy, verify_ladder

__all__ = [
    "Links",
    "OnReady",
    "RankSpec",
    "check_sums",
    "load_sized_pair",
    "rank_environment",
    "run_rank",
    "serve_rank_zero",
    "set_threads",
]

logger = get_logger(__name__)

_KV_BYTES_PER_SECOND = 3.4e12
"""What attention reads keys and values with on an H200."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank must know to start.

    Attributes:
        run_dir: private folder on the rank's host, for the engine's sockets and signs of life.
        store_host, store_port: where rank 0's rendezvous store listens.
        lines: where ranks on several hosts listen; None where all share the run folder.
    """

    config: EngineConfig
    rank: int
    world_size: int
    run_dir: str
    store_host: str = "127.0.0.1"
    store_port: int = 0
    lines: Lines | None = None


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
    spec: RankSpec,
    store: TCPStore | None = None,
    on_ready: OnReady | None = None,
    inbox: Inbox | None = None,
) -> None:
    """Load and serve until rank 0 is told to shut down; blocks until then.

    Rank 0 reports to the front end when every rank is ready, and reports why when it fails.

    Args:
        store: rank 0's own rendezvous store.
        inbox: where this rank listens, as `spec.lines` says; None without them.

    Raises:
        ConfigError: as `load_pair`.
    """
    set_threads(spec.config)
    mailbox = ZmqMailbox(spec.run_dir) if spec.rank == 0 else None
    try:
        group = _join(spec, store)
        pair = load_sized_pair(spec.config, group)
        if mailbox is not None:
            serve_rank_zero(spec.config, pair, _links(spec, mailbox, inbox), on_ready)
        else:
            _serve_follower(spec, pair, on_ready, inbox)
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
    group = connect(
        spec.rank,
        spec.world_size,
        backend="gloo" if gloo else "nccl",
        host=spec.store_host,
        port=spec.store_port,
        timeout_s=spec.config.start_timeout_s,
        store=store,
    )
    check_sums(group, device)
    return group


def check_sums(group: Group, device: torch.device) -> None:
    """Add up rank numbers, once per way a sum is taken: a link that is broken shows before a load.

    Raises:
        EngineDeadError: a sum is wrong.
    """
    expected = group.size * (group.size + 1) // 2
    for count in (1, (1 << 20) // 4 + 1):
        total = group.all_reduce(torch.full((count,), float(group.rank + 1), device=device))
        if not bool((total == expected).all()):
            raise EngineDeadError(
                f"rank {group.rank}: adding up the numbers of {group.size} ranks gave "
                f"{total.min().item():g} to {total.max().item():g} instead of {expected}; check "
                "the links between the GPUs (nvidia-smi topo -m) or set NCCL_P2P_DISABLE=1"
            )


def load_sized_pair(config: EngineConfig, group: Group) -> Pair:
    """Load a pair with as many pages as memory leaves room for beside the largest steps.

    Raises:
        ConfigError: as `load_pair`.
    """
    return load_pair(config, group, log_progress, lambda pair: step_bytes(pair, config))


def log_progress(what: str, done: int, of: int) -> None:
    """Say at every quarter how much of a checkpoint has been read."""
    if done * 4 // of != (done - 1) * 4 // of:
        logger.info("%s: %d of %d tensors read", what, done, of)


@dataclasses.dataclass(frozen=True)
class Links:
    """What rank 0 is connected to.

    Attributes:
        mailbox: the front end.
        plans, echoes: the followers.
        board: where ranks show signs of life; None for one that is a thread of its owner.
        on_trip: called with the reason when the watchdog ends this rank.
    """

    mailbox: Mailbox
    plans: Plans = dataclasses.field(default_factory=NoFollowers)
    echoes: Echoes = dataclasses.field(default_factory=NoEchoes)
    board: Board | None = None
    on_trip: Callable[[str], None] = leave


def _lines(spec: RankSpec) -> Lines:
    return spec.lines or local_lines(spec.run_dir, spec.world_size)


def _links(spec: RankSpec, mailbox: Mailbox, inbox: Inbox | None) -> Links:
    board = Board(spec.run_dir, spec.world_size)
    if spec.world_size == 1:
        return Links(mailbox, board=board)
    lines = _lines(spec)
    return Links(mailbox, PlanSender(lines), EchoReceiver(lines, inbox), board)


def serve_rank_zero(
    config: EngineConfig, pair: Pair, links: Links, on_ready: OnReady | None = None
) -> None:
    """Build rank 0's loop, say that the engine is ready, and run it.

    Raises:
        ConsensusError: the ranks committed different tokens.
    """
    runner, policy = _ready_runner(config, pair, on_ready)
    scale = DraftScale() if config.draft_scale == "auto" and pair.draft is not None else None
    scheduler = Scheduler(limits_of(config, runner), policy, scale)
    ledger = Ledger(links.echoes, pair.group.size - 1)
    try:
        with Guard(runner, config, links.board, links.on_trip) as guard:
            links.mailbox.send(Report(info=_info(config, runner), stats=scheduler.snapshot()))
            EngineLoop(
                scheduler,
                guard,
                links.mailbox,
                links.plans,
                ledger,
                overlap=_overlaps(config, pair),
            ).run()
    finally:
        links.plans.close()
        links.echoes.close()


def _serve_follower(
    spec: RankSpec, pair: Pair, on_ready: OnReady | None, inbox: Inbox | None
) -> None:
    lines = _lines(spec)
    plans, echoes = PlanReceiver(lines, spec.rank, inbox), EchoSender(lines)
    runner, _ = _ready_runner(spec.config, pair, on_ready)
    board = Board(spec.run_dir, spec.world_size)
    try:
        with Guard(runner, spec.config, board) as guard:
            follow(guard, plans, echoes, overlap=_overlaps(spec.config, pair))
    finally:
        plans.close()
        echoes.close()


def _overlaps(config: EngineConfig, pair: Pair) -> bool:
    return config.overlap if config.overlap is not None else pair.device.type == "cuda"


def _ready_runner(
    config: EngineConfig, pair: Pair, on_ready: OnReady | None
) -> tuple[Runner, VerifyLengthPolicy | None]:
    """A runner that has run, captured and timed its steps, on every rank; rank 0's choice of g."""
    if config.synthetic_acceptance is not None:
        logger.warning("synthetic acceptance is on; the output is wrong on purpose")
    runner = Runner(pair, config)
    automatic = config.verify_length == "auto"
    block = pair.settings.geometry.verify_rows
    lengths = verify_ladder(block) if automatic else (block,)
    runner.warm_up(lengths)
    policy = None
    if automatic:
        seconds = runner.time_steps(lengths)
        policy = VerifyLengthPolicy(CostTable(seconds, context_seconds=_context_seconds(pair)))
    if on_ready is not None:
        on_ready(runner)
    _all_ready(pair.group, pair.device)
    # What lives now lives as long as the engine: the collector need not look at it in a step.
    gc.collect()
    gc.freeze()
    return runner, policy


def _context_seconds(pair: Pair) -> float:
    """Time to read one token's keys and values of both models once; 0 where it is not known."""
    if pair.device.type != "cuda":
        return 0.0
    return pair.kv_bytes / (pair.num_pages * pair.page_size) / _KV_BYTES_PER_SECOND


def _all_ready(group: Group, device: torch.device) -> None:
    """Wait until every rank has loaded."""
    group.all_gather(torch.zeros(1, device=device))


def _fallbacks(config: EngineConfig, runner: Runner) -> list[str]:
    """Where a slower path than the device could run is in use, and why."""
    found = []
    if config.share_gpu:
        found.append("share_gpu: gloo collectives on CUDA tensors")
    if runner.pair.device.type == "cuda" and runner.graphs is None:
        why = "gloo collectives cannot be captured" if config.share_gpu else "asked for"
        found.append(f"eager: steps run kernel by kernel, {why}")
    return found


def _tunable_lengths(config: EngineConfig, runner: Runner) -> list[int]:
    """Values of g that need no capture while requests wait, and 1, at which nothing is drafted."""
    block = runner.pair.settings.geometry.verify_rows
    if config.verify_length == "auto":
        return list(verify_ladder(block))
    return list(range(1, block + 1)) if runner.graphs is None else sorted({1, block})


def _info(config: EngineConfig, runner: Runner) -> EngineInfo:
    pair, settings = runner.pair, runner.pair.settings
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
        dummy_weights=config.load_format == "dummy",
        draft_quantization=None if pair.draft_head is None else config.draft_quantization,
        synthetic_acceptance=config.synthetic_acceptance,
        startup=runner.startup,
        verify_lengths=_tunable_lengths(config, runner),
        fallbacks=_fallbacks(config, runner),
        versions={name: version(name) for name in ("torch", "transformers", "safetensors")},
    )
