"""Which replica a request goes to: of two the shorter queue, passing by those without an engine.

A replica whose gang is being started again refuses what it gets, and so has the shortest queue of
all. Without this every request would go there for as long as that lasts.
"""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from dflash_serve.serve import room

__all__ = ["RoomRouter"]

_CHOICES = 2


class RoomRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Serve's router for the replicas; named in the deployment's options."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Two replicas to compare, drawn among those that may have room, else among all."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve asks without a pause
        able = [r for r in candidate_replicas if room.ROOM.maybe_at(r.replica_id.unique_id)]
        pool = able or candidate_replicas
        return [random.sample(pool, min(_CHOICES, len(pool)))]
