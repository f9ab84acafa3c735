"""Executor of any number of ranks as child processes: no Ray."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import Port
from dflash_serve.engine.pair import prepare
from dflash_serve.engine.pulse import Board
from dflash_serve.engine.rank import OnReady, RankSpec, rank_environment, run_rank
from dflash_serve.engine.transport import ZmqPort
from dflash_serve.errors import EngineDeadError
from dflash_serve.log import configure, get_logger
from dflash_serve.parallel.group import bind_store

__all__ = ["MpExecutor"]

logger = get_logger(__name__)
_PR_SET_PDEATHSIG = 1
_environment_lock = threading.Lock()


class MpExecutor:
    """Rank processes of one host; the death of any of them ends all.

    Args:
        on_ready: see `OnReady`; must be importable in the child processes.
    """

    def __init__(self, config: EngineConfig, on_ready: OnReady | None = None) -> None:
        self._config = config
        self._on_ready = on_ready
        self._processes: list[BaseProcess] = []
        self._run_dir: str | None = None
        self._failure: str | None = None

    def start(self) -> Port:
        # Refuse in this process whatever can be refused without weights, with its own type.
        prepare(self._config)
        self._run_dir = tempfile.mkdtemp(prefix="dflash-")
        port = ZmqPort.bind(self._run_dir)
        try:
            self._start_ranks()
        except BaseException:
            self._kill()
            self.shutdown()
            port.close()
            raise
        return port

    def _start_ranks(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with ours, theirs:
            self._spawn(context, 0, 0, theirs)
            store_port = self._receive_port(ours)
            for rank in range(1, self._config.tensor_parallel_size):
                self._spawn(context, rank, store_port, None)

    def _spawn(
        self,
        context: multiprocessing.context.SpawnContext,
        rank: int,
        store_port: int,
        pipe: Connection | None,
    ) -> None:
        assert self._run_dir is not None
        spec = RankSpec(
            config=self._config,
            rank=rank,
            world_size=self._config.tensor_parallel_size,
            run_dir=self._run_dir,
            store_port=store_port,
        )
        process = context.Process(
            target=_rank_main, args=(spec, os.getpid(), pipe, self._on_ready), daemon=True
        )
        with _environment(rank_environment(self._config)):
            process.start()
        self._processes.append(process)

    def _receive_port(self, pipe: Connection) -> int:
        """The port rank 0's store got from the system."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while not pipe.poll(0.2):
            if self.failure() is not None:
                raise EngineDeadError(str(self._failure))
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"rank 0 did not start within {self._config.start_timeout_s:.0f} s"
                )
        return int.from_bytes(pipe.recv_bytes(), "little")

    def failure(self) -> str | None:
        if self._failure is None:
            self._failure = self._find_failure()
            if self._failure is not None:
                self._kill()
        return self._failure

    def _find_failure(self) -> str | None:
        """A rank killed by a signal explains everything else, and an alarm what follows it."""
        assert self._run_dir is not None
        board = Board(self._run_dir, self._config.tensor_parallel_size)
        alarm = board.alarm()
        if alarm is not None:
            board.await_leaving(
                lambda rank: self._processes[rank].exitcode is not None,
                self._config.hang_timeout_s,
            )
        ended = sorted(
            (process.exitcode, rank)
            for rank, process in enumerate(self._processes)
            if process.exitcode is not None
        )
        if ended and (ended[0][0] < 0 or alarm is None):
            return f"rank {ended[0][1]} ended with exit code {ended[0][0]}"
        return alarm

    def end_stalled(self, symptom: str) -> str:
        """Let every rank that can log its stacks and leave; kill the rest."""
        assert self._run_dir is not None
        board = Board(self._run_dir, self._config.tensor_parallel_size)
        board.raise_alarm(f"{symptom}: {board.describe(self._config.hang_timeout_s)}")
        return self.failure() or symptom

    def shutdown(self) -> None:
        for process in self._processes:
            process.join(timeout=5.0)
        self._kill()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(timeout=5.0)


def _rank_main(
    spec: RankSpec, parent: int, pipe: Connection | None, on_ready: OnReady | None
) -> None:
    """Entry of a child process."""
    _die_with_parent(parent)
    configure(rank=spec.rank)
    store = None
    if spec.rank == 0:
        store = bind_store(spec.store_host)
        assert pipe is not None
        pipe.send_bytes(store.port.to_bytes(4, "little"))
    run_rank(spec, store, on_ready)


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the one that started it dies, SIGKILL included."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for child processes started inside the block; one thread at a time."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
