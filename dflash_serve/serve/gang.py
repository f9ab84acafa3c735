"""The gang: one Ray actor per tensor-parallel rank, started, watched and ended as one.

Ray places the ranks, starts them and says when one dies; no rank waits for Ray in a step.
The ranks talk to the replica through sockets in a private folder, and among themselves through
their own collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from dflash_serve import errors, log
from dflash_serve.config import EngineConfig
from dflash_serve.cores import usable_cores
from dflash_serve.engine.client import Port
from dflash_serve.engine.lines import Lines
from dflash_serve.engine.messages import Command, Report
from dflash_serve.engine.pulse import Board
from dflash_serve.engine.sockets import make_key
from dflash_serve.errors import EngineDeadError
from dflash_serve.serve.deaths import describe_death, error_of, weigh
from dflash_serve.serve.gang_checks import check_places
from dflash_serve.serve.placement import Placement
from dflash_serve.serve.processes import await_killed, is_running
from dflash_serve.serve.rank_actor import RUNNER, RankActor, RankPlace
from dflash_serve.serve.relay import Relays
from dflash_serve.serve.rundir import RunDir

__all__ = ["RayExecutor"]

logger = log.get_logger(__name__)

_CREATE_TIMEOUT_S = 120.0
_WATCH_S = 1.0
_CAUSE_GRACE_S = 0.3
"""After a rank failed in a collective, how long to wait for the rank that really caused it."""


class RayExecutor:
    """Runs the ranks of one engine as Ray actors (an `Executor`).

    Args:
        config: the engine configuration.
        rank_cpus: CPUs reserved per rank.
        hosts: over how many hosts the ranks are spread, rank 0 on this one.
        runner: module with `RankSpec`, `run_rank` and `rank_environment`; tests put a stand-in
            here.

    Attributes:
        places: where each rank runs, once all have reported.
        start_seconds: what the phases of the start took: creating the actors, their reports,
            telling each who the others are.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank_cpus: float = 1.0,
        hosts: int = 1,
        runner: str = RUNNER,
    ) -> None:
        # Said once for all ranks: they cannot see how many share the cores.
        sharers = config.tensor_parallel_size // hosts
        threads = config.threads or max(1, usable_cores() // sharers)
        self._config = dataclasses.replace(config, threads=threads)
        self._rank_cpus = rank_cpus
        self._hosts = hosts
        self._runner = runner
        self._actors: list[ActorHandle] = []
        self._runs: list[ray.ObjectRef] = []
        self._placement: Placement | None = None
        self._relays: Relays | None = None
        self._run_dir: RunDir | None = None
        self._failure: str | None = None
        self._stopping = threading.Event()
        self._ended = threading.Lock()
        self._watcher: threading.Thread | None = None
        self.places: list[RankPlace] = []
        self.start_seconds: dict[str, float] = {}

    def start(self) -> Port:
        """Start every rank in two phases: create and report, then connect and load.

        Raises:
            EngineDeadError: a rank could not be placed or died; names the rank.
        """
        from dflash_serve.engine.transport import ZmqPort

        self._run_dir = RunDir()
        port = ZmqPort.bind(str(self._run_dir.path))
        try:
            with self._timed("create"):
                self._create_actors()
            with self._timed("report"):
                self.places = self._collect_places()
                check_places(self._config, self.places, self._hosts)
            logger.info("ranks placed: %s", [(p.pid, p.devices) for p in self.places])
            with self._timed("rank_map"):
                self._run_ranks(str(self._run_dir.path))
        except BaseException:
            port.close()
            self.shutdown()
            raise
        self._watcher = threading.Thread(target=self._watch, name="gang-watch", daemon=True)
        self._watcher.start()
        return _ExplainingPort(port, self)

    def failure(self) -> str | None:
        """Why the gang is dead, or None. Reads a variable: the watch thread asks Ray."""
        return self._failure

    def end_stalled(self, symptom: str) -> str:
        """Let every rank that can log its stacks and leave; kill the rest."""
        board = self._board()
        if board is None:
            return self._failure or symptom
        reason = f"{symptom}: {board.describe(self._config.hang_timeout_s)}"
        reason = board.raise_alarm(reason)
        self._await_leaving(board)
        self._failure = self._failure or reason
        self._kill_ranks()
        return self._failure

    def explain(self, symptom: str) -> str:
        """The likeliest cause of what rank 0 reports as its end.

        When a rank dies, rank 0 often notices first, as a broken collective; who died is known
        a moment later.
        """
        if symptom.partition(":")[0] in errors.__all__:
            return symptom
        deadline = time.monotonic() + 2 * _CAUSE_GRACE_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._failure or symptom

    def shutdown(self) -> None:
        """End every rank and remove what the gang left on the host. Idempotent."""
        self._stopping.set()
        self._kill_ranks()
        if self._watcher is not None:
            self._watcher.join()  # the kill has ended what it waits for
            self._watcher = None
        if self._placement is not None:
            self._placement.remove()
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None

    # -- start ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.start_seconds[phase] = time.monotonic() - started

    def _collect_places(self) -> list[RankPlace]:
        """What every rank says; asked together, since each reads its checkpoints' headers."""
        answers = [actor.place.remote(self._config) for actor in self._actors]
        return [self._await(answer, rank) for rank, answer in enumerate(answers)]

    def _create_actors(self) -> None:
        self._placement = Placement(self._config, hosts=self._hosts, rank_cpus=self._rank_cpus)
        options: dict[str, Any] = {
            "num_cpus": self._rank_cpus,
            "num_gpus": self._placement.gpus_per_rank,
            "runtime_env": {"env_vars": self._environment()},
        }
        for rank in range(self._config.tensor_parallel_size):
            self._actors.append(self._create(RankActor, rank, rank, self._runner, **options))

    def _create(self, kind: type, near: int, *arguments: Any, **options: Any) -> ActorHandle:
        """An actor on the host of rank `near`; it lives once."""
        assert self._placement is not None
        strategy = self._placement.strategy(near)
        options = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0} | options
        actor: ActorHandle = (
            ray.remote(kind).options(scheduling_strategy=strategy, **options).remote(*arguments)
        )
        return actor

    def _environment(self) -> dict[str, str]:
        module = importlib.import_module(self._runner)
        environment: dict[str, str] = module.rank_environment(self._config, usable_cores())
        if self._hosts > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            environment.pop("GLOO_SOCKET_IFNAME", None)  # each rank knows its host's
        return environment

    def _run_ranks(self, run_dir: str) -> None:
        world_size = len(self._actors)
        for actor in self._actors:
            actor.prepare.remote()  # not waited for: what goes wrong there, goes wrong in `run`
        # A gang of one has nobody to meet.
        bind = self._actors[0].bind_store.remote
        store_port = self._await(bind(), 0) if world_size > 1 else 0
        folders, lines = [run_dir] * world_size, None
        if self._hosts > 1:
            folders = self._open_relays(run_dir)
            lines = self._open_lines()
        store_host = self.places[0].address if lines else "127.0.0.1"
        self._runs = [
            actor.run.remote(folder, self._config, world_size, store_host, store_port, lines)
            for actor, folder in zip(self._actors, folders, strict=True)
        ]

    def _open_relays(self, run_dir: str) -> list[str]:
        """Start a relay on every other host; returns each rank's run folder."""
        hosts = _by_node(self.places)
        del hosts[self.places[0].node_id]
        board = Board(run_dir, len(self.places))
        self._relays = Relays(self._create, hosts, board, len(self.places))
        return [self._relays.folder(place.node_id) or run_dir for place in self.places]

    def _open_lines(self) -> Lines:
        """Have every rank listen, before any of them sends."""
        key = make_key()
        opened = [actor.open_inbox.remote(key) for actor in self._actors]
        echo, *plans = (self._await(inbox, rank) for rank, inbox in enumerate(opened))
        return Lines(tuple(plans), echo, key)

    def _await(self, ref: ray.ObjectRef, rank: int) -> Any:
        try:
            return ray.get(ref, timeout=_CREATE_TIMEOUT_S)
        except GetTimeoutError as error:
            raise EngineDeadError(
                f"rank {rank} did not start within {_CREATE_TIMEOUT_S:.0f} s"
            ) from error
        except RayError as error:
            raise EngineDeadError(describe_death(rank, error)) from error

    # -- watch ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the first rank to end, find the cause, and end the others with it."""
        while not self._stopping.is_set():
            done, _ = ray.wait(self._runs, num_returns=1, timeout=_WATCH_S)
            if done and not self._stopping.is_set():
                # What `end_stalled` has said already explains the deaths that it brought.
                self._failure = self._failure or self._cause()
                logger.warning("%s; ending the whole gang", self._failure)
                self._kill_ranks()
                return

    def _board(self) -> Board | None:
        if self._run_dir is None:
            return None
        return Board(str(self._run_dir.path), self._config.tensor_parallel_size)

    def _await_leaving(self, board: Board) -> None:
        """Give the ranks that still can the time to log where they stand."""

        def gone(rank: int) -> bool:
            place = self.places[rank]
            if place.node_id == self.places[0].node_id:
                return not is_running(place.pid)
            return board.has_left(rank)

        board.await_leaving(gone, self._config.hang_timeout_s)

    def _cause(self) -> str:
        """Text of the failure that explains the others best."""
        board = self._board()
        alarm = None if board is None else board.alarm()
        if board is not None and alarm is not None:
            self._await_leaving(board)
        deadline = time.monotonic() + _CAUSE_GRACE_S
        while True:
            ends = self._ends()
            if ends[0][0] == 0:
                return ends[0][1]
            if time.monotonic() > deadline:
                return alarm or ends[0][1]
            time.sleep(0.02)

    def _ends(self) -> list[tuple[int, str]]:
        """(weight, text) per ended rank; the lowest weight is the likeliest cause."""
        done, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        board = self._board()
        ends = []
        for rank, ref in enumerate(self._runs):
            if ref in done:
                error = error_of(ref)
                left = board is not None and board.has_left(rank)
                ends.append((2 if left else weigh(error), describe_death(rank, error)))
        return sorted(ends)

    def _kill_ranks(self) -> None:
        with self._ended:
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            self._actors.clear()
            self._await_exit()

    def _await_exit(self) -> None:
        """Memory is free only once the processes are gone."""
        here = ray.get_runtime_context().get_node_id()
        pids = {
            node: [self.places[rank].pid for rank in ranks]
            for node, ranks in _by_node(self.places).items()
        }
        left = await_killed(pids.get(here, ()))
        if left:
            logger.warning("rank processes %s outlived their kill", sorted(left))
        if self._relays is not None:
            self._relays.close(pids)
            self._relays = None


def _by_node(places: Sequence[RankPlace]) -> dict[str, list[int]]:
    """The ranks on each host."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place.node_id, []).append(rank)
    return found


class _ExplainingPort:
    """The gang's port, naming the rank that died where rank 0 only saw the consequence."""

    def __init__(self, port: Port, gang: RayExecutor) -> None:
        self._port = port
        self._gang = gang

    def send(self, commands: list[Command]) -> None:
        self._port.send(commands)

    def close(self) -> None:
        self._port.close()

    def receive(self, timeout_s: float) -> Report | None:
        report = self._port.receive(timeout_s)
        if report is not None and report.fatal is not None:
            report.fatal = self._gang.explain(report.fatal)
        return report
