"""What the front end is told about a request (no torch)."""

from __future__ import annotations

from dflash_serve.engine.messages import FinishReason, TokenEvent
from dflash_serve.scheduler.request import Request

__all__ = ["failure", "progress"]


def progress(
    request: Request, ids: list[int], reason: FinishReason | None, drafted: int, accepted: int
) -> TokenEvent:
    """New tokens of a request, or its end; the first event tells what the cache held."""
    event = TokenEvent(
        request_id=request.request_id,
        token_ids=ids,
        finish_reason=reason,
        drafted=drafted,
        accepted=accepted,
    )
    if not request.reported_cached and request.cached is not None:
        event.cached_tokens = request.cached
        request.reported_cached = True
    return event


def failure(request_id: str, error: str) -> TokenEvent:
    """A request that ends before it began."""
    return TokenEvent(request_id=request_id, finish_reason="error", error=error)
