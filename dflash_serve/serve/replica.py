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

import msgspec
from ray import serve

from dflash_serve import log
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.protocol import ReplicaState
from dflash_serve.api.replica import TextEngine
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.errors import (
    ConfigError,
    DFlashError,
    EngineDeadError,
    EngineStalledError,
    RequestError,
    UnavailableError,
)
from dflash_serve.serve import scaling, wire
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.knobs import SoftKnobs
from dflash_serve.serve.restart import RestartingEngine
from dflash_serve.serve.senders import Senders, actor_is_gone
from dflash_serve.serve.settings import ModelSettings

__all__ = ["Replica"]

logger = log.get_logger(__name__)

_LEAVE_GRACE_S = 1.0
"""After the engine was given up: time for the last errors to reach the front ends."""


class Replica:
    """One tensor-parallel engine behind a deployment handle.

    A gang that dies is replaced in place (`RestartingEngine`); its requests end with an error
    upon which the front ends submit them again, here or elsewhere. When the gang cannot be
    replaced, the replica refuses all work and leaves: Serve sees its process end and puts a new
    one in its place.

    Args:
        settings: the deployment's settings, device resolved.

    Raises:
        ConfigError: something about the configuration or the checkpoints.
        EngineDeadError: a rank failed to load; the text says which and why.
    """

    def __init__(self, settings: ModelSettings) -> None:
        log.configure()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._settings = settings
        self._leaving = threading.Event()
        self._senders = Senders(actor_is_gone)
        self._started = False
        self._knobs = SoftKnobs()
        self._refused_knobs: str | None = None
        started = time.monotonic()
        # What can be refused without weights is refused before a rank is started.
        self._check(settings.engine)
        # The tokenizer loads beside the ranks: both take seconds.
        with ThreadPoolExecutor(max_workers=1) as pool:
            codec = pool.submit(TextCodec.load, settings.engine.target)
            self._engine = RestartingEngine(
                self._start_gang,
                deadline_s=settings.engine.start_timeout_s,
                failures_in_a_row=settings.gang_failures,
                on_loss=self._leave,
            )
        try:
            self._text = self._make_text(settings, codec.result())
        except BaseException:
            self._engine.shutdown()
            raise
        logger.info("%s ready after %.1f s", settings.model, time.monotonic() - started)

    async def generate(self, request: bytes, sender: str | None = None) -> AsyncIterator[bytes]:
        """Stream one request, encoded by `wire`; the last element may be an error.

        Args:
            sender: name of the calling actor, with which the request ends; see `Senders`.
        """
        try:
            self._admit()
            # Closing explicitly, so that a consumer that goes away aborts the request now and
            # not when the garbage collector comes by.
            deltas = self._text.generate(wire.decode_request(request))
            with self._senders.watched(sender):
                async with contextlib.aclosing(deltas):
                    async for delta in deltas:
                        yield wire.encode_delta(delta)
        except DFlashError as error:
            unable = isinstance(error, EngineDeadError | EngineStalledError)
            yield wire.encode_error(error, self._name if unable else None)

    async def status(self) -> bytes:
        """Counters and configuration, encoded by `wire`."""
        status = self._text.status()
        return wire.encode_status(
            msgspec.structs.replace(
                status,
                state=self._state(),
                restarts=self._engine.restarts,
                start_seconds=self._start_seconds,
                config=status.config
                | {"pid": os.getpid(), "ranks": self._ranks()}
                | {"knobs": self._knobs.model_dump()}
                | {"refused_knobs": self._refused_knobs},
            )
        )

    def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Serve's hook for a `user_config`, at the start and whenever it alone has changed.

        Applied between two steps; running requests go on, and no output changes. While the replica
        runs, what cannot be applied is logged and shown in /server_info, and the knobs stay: the
        replica's requests are worth more than a figure.

        Raises:
            ConfigError: at the start, what `SoftKnobs.parse` or the engine refuses.
        """
        try:
            knobs = SoftKnobs.parse(user_config)
            self._engine.tune(knobs.tuning())
        except (ConfigError, RequestError) as error:
            if not self._started:
                raise ConfigError(str(error)) from error
            self._refused_knobs = str(error)
            logger.error("the soft knobs stay as they are: %s", error)
            return
        log.configure(knobs.log_level)
        self._knobs, self._refused_knobs = knobs, None
        logger.info("soft knobs: %s", knobs)

    async def trace(self, order: bytes) -> bytes | None:
        """Profile the next steps, as `wire.decode_order` says; None where another is meant."""
        wanted = wire.decode_order(order)
        if wanted.replica != self._name:
            return None
        try:
            return wire.encode_traced(await self._text.trace(wanted))
        except DFlashError as error:
            return wire.encode_traced(error)

    def record_routing_stats(self) -> dict[str, float]:
        """Serve's hook for routers: the fields of a `LoadReport`."""
        stats, info = self._engine.stats, self._engine.info
        return {
            "requests": self._engine.outstanding,
            "tokens": self._text.held_tokens,
            "kv_tokens": info.num_pages * info.page_size,
            "kv_use": stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
            "starts": self._engine.restarts,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook for the autoscaler; `EngineLoadPolicy` reads it."""
        return {
            scaling.REQUESTS: self._engine.outstanding,
            scaling.TOKENS: self._text.held_tokens,
        }

    async def check_health(self) -> None:
        """Serve's health hook: passes while the engine makes progress or is being replaced.

        Raises:
            EngineDeadError, EngineStalledError: as the engine says.
        """
        self._started = True  # Serve checks nobody before its first `reconfigure`
        self._engine.check_health()

    def __del__(self) -> None:
        """Serve's shutdown hook, once the requests are done: end the ranks, then the process."""
        self._leaving.set()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
            self._executor.shutdown()  # one that is being started

    # -- internals --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Refuse at once what would not be answered; the front end takes it elsewhere.

        Raises:
            UnavailableError: there is no engine, or it does not move.
        """
        if self._leaving.is_set():
            raise UnavailableError("this replica is leaving")
        self._engine.require_running()

    def _check(self, config: EngineConfig) -> None:
        from dflash_serve.engine.checks import resolve_pair

        resolve_pair(config)

    def _start_gang(self) -> EngineClient:
        started = time.monotonic()
        self._executor = self._make_executor(self._settings)
        engine = start_engine(self._settings.engine, self._executor)
        phases = self._executor.start_seconds
        rest = time.monotonic() - started - sum(phases.values())
        self._start_seconds = phases | {"initialise": rest}
        return engine

    def _make_executor(self, settings: ModelSettings) -> RayExecutor:
        return RayExecutor(settings.engine, rank_cpus=settings.rank_cpus, hosts=settings.hosts)

    def _make_text(self, settings: ModelSettings, codec: TextCodec) -> TextEngine:
        return TextEngine(
            self._engine,
            codec,
            settings.model,
            settings.model_dump(exclude={"engine"}) | dataclasses.asdict(settings.engine),
            replica=self._name,
            max_outstanding=settings.max_ongoing_requests,
        )

    def _state(self) -> ReplicaState:
        if self._leaving.is_set():
            return "leaving"
        return "serving" if self._engine.running else "restarting"

    def _ranks(self) -> list[dict[str, Any]]:
        """Where each rank runs."""
        return [
            {"rank": rank, "pid": place.pid, "node": place.node_id, "devices": place.devices}
            for rank, place in enumerate(self._executor.places)
        ]

    def _leave(self, reason: str) -> None:
        """End this process, so that Serve puts another in its place."""
        logger.error("leaving, to be replaced: %s", reason)
        if self._leaving.wait(_LEAVE_GRACE_S):
            return  # Serve ends it already
        self._executor.shutdown()
        # Not sys.exit: that would end this thread only.
        os._exit(1)
