"""Serve's side of the choice of a replica: what the router knows goes to a `Chooser`.

Ray Serve pickles this module by value, so nothing here is state of the module.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from dflash_serve.serve import room
from dflash_serve.serve.route_choice import Chooser, LoadReport, ReplicaView, RouteRules
from dflash_serve.serve.route_prefix import Asked, read_asked

__all__ = ["EngineRouter"]

_ASKED = "dflash_asked"


class EngineRouter(RequestRouter):  # type: ignore[misc]
    """Serve's router for the replicas; named in the deployment's options.

    Not a FIFO router: that one gives the replica chosen for a request to whichever waits longest.
    """

    def initialize_state(self, **rules: Any) -> None:
        """Serve's hook: the fields of `RouteRules`."""
        self._chooser = Chooser(RouteRules(**rules))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to try, best first; the next is tried where one is full."""
        if not candidate_replicas:
            return []
        asked = Asked()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve asks without a pause
            asked = self._asked(pending_request)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        choice = self._chooser.choose(asked, [self._view(r) for r in candidate_replicas])
        return [[by_name[name]] for name in choice.order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve's hook: a replica has taken a request."""
        self._chooser.sent(self._asked(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas there are now, with their latest reports."""
        super().update_replicas(replicas)
        self._chooser.retain({replica.replica_id.unique_id for replica in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook: a call found a replica dead."""
        super().on_replica_actor_died(replica_id)
        self._chooser.forget(replica_id.unique_id)

    # -- internals --------------------------------------------------------------------------

    def _view(self, replica: RunningReplica) -> ReplicaView:
        name = replica.replica_id.unique_id
        return ReplicaView(
            name,
            # Serve's own count: kept up with every request sent and ended, and corrected by each
            # answer of the replica. Nothing is asked for here.
            ongoing=self.replica_queue_len_cache.get(replica.replica_id),
            report=LoadReport.read(replica.routing_stats),
            able=room.ROOM.maybe_at(name),
        )

    def _asked(self, pending: PendingRequest) -> Asked:
        """What a request asks, read once: Serve may try to place it many times."""
        known: Asked | None = vars(pending).get(_ASKED)
        if known is None:
            rules = self._chooser.rules
            data = pending.args[0] if pending.args else b""
            known = (
                read_asked(data, rules.block_bytes, rules.request_blocks)
                if rules.policy == "prefix" and isinstance(data, bytes)
                else Asked()
            )
            setattr(pending, _ASKED, known)
        return known
