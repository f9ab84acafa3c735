"""A trace of one replica, asked for through its deployment's handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from ray.serve.handle import DeploymentHandle

from dflash_serve.api.admin import busiest
from dflash_serve.api.protocol import ReplicaStatus, TraceFiles, TraceRequest
from dflash_serve.errors import EngineDeadError
from dflash_serve.serve import wire

__all__ = ["trace_one"]

_ANSWER_S = 5.0
"""Beyond the trace's own time: for the way there and back."""


async def trace_one(
    handles: Mapping[str, DeploymentHandle],
    statuses: Sequence[ReplicaStatus],
    order: TraceRequest,
) -> TraceFiles:
    """Profile the replica that the order names, or the busiest.

    Serve cannot send a call to a certain replica: all get it, and the others do nothing.

    Args:
        handles: by model.
        statuses: of the replicas that answer.

    Raises:
        DFlashError: what the replica says; see `TextEngine.trace`.
        EngineDeadError: it gave no answer.
    """
    chosen = busiest(statuses, order)
    named = msgspec.structs.replace(order, model=chosen.model, replica=chosen.replica)
    call = handles[chosen.model].broadcast("trace", wire.encode_order(named))
    try:
        answers = await call.results_async(
            timeout_s=order.timeout_s + _ANSWER_S, return_exceptions=True
        )
    except TimeoutError:
        answers = []
    for answer in answers:
        if isinstance(answer, bytes):
            return wire.decode_traced(answer)
    raise EngineDeadError(f"replica {chosen.replica} gave no answer; ask again")
