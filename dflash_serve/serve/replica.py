"""The replica deployment: one engine, its gang of ranks, and the text side in front of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve

from dflash_serve import log
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import TextEngine
from dflash_serve.config import EngineConfig
from dflash_serve.engine.executors import start_engine
from dflash_serve.errors import (
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    UnavailableError,
)
from dflash_serve.serve import wire
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.settings import ServeSettings

__all__ = ["Replica"]

logger = log.get_logger(__name__)

_LEAVE_POLL_S = 0.2
_LEAVE_GRACE_S = 1.0
"""After the engine died: time for the last errors to reach their clients."""


class Replica:
    """One tensor-parallel engine behind a deployment handle.

    A dead engine cannot be repaired here, so the replica refuses all work at once and leaves;
    Serve sees its process end and puts a new one, with a new gang, in its place.

    Args:
        settings: the deployment's settings, device resolved.

    Raises:
        ConfigError: something about the configuration or the checkpoints.
        EngineDeadError: a rank failed to load; the text says which and why.
    """

    def __init__(self, settings: ServeSettings) -> None:
        log.configure()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._leaving = threading.Event()
        started = time.monotonic()
        # What can be refused without weights is refused before a rank is started.
        self._check(settings.engine)
        self._executor = self._make_executor(settings)
        # The tokenizer loads beside the ranks: both take seconds.
        with ThreadPoolExecutor(max_workers=1) as pool:
            codec = pool.submit(TextCodec.load, settings.engine.target)
            self._engine = start_engine(settings.engine, self._executor)
        try:
            self._text = self._make_text(settings, codec.result())
        except BaseException:
            self._engine.shutdown()
            raise
        logger.info("%s ready after %.1f s", settings.model, time.monotonic() - started)
        threading.Thread(target=self._leave_when_dead, name="leave-when-dead", daemon=True).start()

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        """Stream one request, encoded by `wire`; the last element may be an error."""
        try:
            self._admit()
            # Closing explicitly, so that a consumer that goes away aborts the request now and
            # not when the garbage collector comes by.
            deltas = self._text.generate(wire.decode_request(request))
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    yield wire.encode_delta(delta)
        except DFlashError as error:
            unable = isinstance(error, EngineDeadError | EngineStalledError)
            yield wire.encode_error(error, self._name if unable else None)

    async def status(self) -> bytes:
        """Counters and configuration, encoded by `wire`."""
        return wire.encode_status(self._text.status())

    async def check_health(self) -> None:
        """Serve's health hook: passes while the engine makes progress.

        Raises:
            EngineDeadError, EngineStalledError: as the engine says.
        """
        self._engine.check_health()

    def __del__(self) -> None:
        """Serve's shutdown hook: end the ranks before the process goes."""
        self._leaving.set()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    # -- internals --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Refuse at once what a dead or stalled engine would never answer."""
        try:
            self._engine.check_health()
        except (EngineDeadError, EngineStalledError) as error:
            raise UnavailableError(str(error)) from error

    def _check(self, config: EngineConfig) -> None:
        from dflash_serve.engine.checks import resolve_pair

        resolve_pair(config)

    def _make_executor(self, settings: ServeSettings) -> RayExecutor:
        return RayExecutor(settings.engine, rank_cpus=settings.rank_cpus)

    def _make_text(self, settings: ServeSettings, codec: TextCodec) -> TextEngine:
        return TextEngine(
            self._engine,
            codec,
            settings.model,
            self._description(settings),
            replica=self._name,
            max_outstanding=settings.max_ongoing_requests,
        )

    def _description(self, settings: ServeSettings) -> dict[str, Any]:
        """What /server_info shows: every setting, and where each rank runs."""
        config = settings.model_dump(exclude={"engine"}) | dataclasses.asdict(settings.engine)
        ranks = [
            {"rank": rank, "pid": place.pid, "node": place.node_id, "devices": place.devices}
            for rank, place in enumerate(self._executor.places)
        ]
        return config | {"ranks": ranks}

    def _leave_when_dead(self) -> None:
        while not self._leaving.wait(_LEAVE_POLL_S):
            try:
                self._engine.check_health()
            except EngineStalledError:
                continue  # Serve's repeated health checks decide, a long step may still end
            except EngineDeadError as error:
                logger.error("leaving, to be replaced: %s", error)
                self._leaving.wait(_LEAVE_GRACE_S)
                self._executor.shutdown()
                # Not sys.exit: that would end this thread only.
                os._exit(1)
