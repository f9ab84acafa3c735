"""Executor of one rank in a thread of this process: no other process, no sockets."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import Port
from dflash_serve.engine.messages import Report, Shutdown
from dflash_serve.engine.rank import (
    Links,
    OnReady,
    load_sized_pair,
    serve_rank_zero,
    set_threads,
)
from dflash_serve.engine.transport import QueueChannel
from dflash_serve.log import get_logger
from dflash_serve.parallel.group import Single

__all__ = ["InprocExecutor"]

logger = get_logger(__name__)


class InprocExecutor:
    """Loads in `start`, so that config errors reach the caller as they are.

    Args:
        config: tensor_parallel_size must be 1.
        on_ready: see `OnReady`.
    """

    def __init__(self, config: EngineConfig, on_ready: OnReady | None = None) -> None:
        self._config = config
        self._on_ready = on_ready
        self._channel = QueueChannel()
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def start(self) -> Port:
        # The thread that runs the steps also loads: each thread that computes has its own pool of
        # workers, and with two pools OpenMP's workers stop spinning, which doubles a CPU step.
        loaded: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(loaded,), name="engine-loop", daemon=True
        )
        self._thread.start()
        loaded.result()
        return self._channel

    def _run(self, loaded: Future[None]) -> None:
        try:
            set_threads(self._config)
            pair = load_sized_pair(self._config, Single())
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            links = Links(self._channel.mailbox, on_trip=self._fail)
            serve_rank_zero(self._config, pair, links, self._on_ready)
        except Exception as error:
            logger.exception("the engine loop failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._channel.mailbox.send(Report(fatal=self._failure))

    def failure(self) -> str | None:
        return self._failure

    def end_stalled(self, symptom: str) -> str:
        """Give the engine up; its thread cannot be ended from outside and is left behind."""
        self._failure = self._failure or symptom
        return self._failure

    def shutdown(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._channel.send([Shutdown()])
            # A thread that no longer makes steps would not hear of it.
            self._thread.join(timeout=30.0 if self._failure is None else 0.1)
        self._thread = None
