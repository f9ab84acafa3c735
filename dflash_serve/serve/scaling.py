"""How many replicas the load asks for: Serve's autoscaler calls this, in its controller.

Ray Serve pickles this module by value and imports no part of the package there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["REQUESTS", "TOKENS", "EngineLoadPolicy", "wanted_replicas"]

REQUESTS = "engine_requests"
"""What a replica reports: requests its engine holds, waiting ones included."""
TOKENS = "engine_tokens"
"""What a replica reports: tokens in cache pages and in prompts without an answer yet."""


def wanted_replicas(
    requests: float, tokens: float, target_requests: float, target_tokens: float | None
) -> float:
    """Replicas at which each would be at its target, not rounded; 0 without any load.

    Args:
        requests: of all replicas, and waiting for one.
        tokens: of all replicas.
        target_requests, target_tokens: of one replica; None leaves tokens out.
    """
    by_requests = requests / target_requests
    return by_requests if target_tokens is None else max(by_requests, tokens / target_tokens)


class EngineLoadPolicy:
    """Serve's autoscaling policy by what the engines report; delays and limits are Serve's.

    Args:
        target_requests: requests of one replica.
        target_tokens: tokens of one replica; None goes by requests alone.
    """

    def __init__(self, target_requests: float, target_tokens: float | None = None) -> None:
        self._target_requests = target_requests
        self._target_tokens = target_tokens

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Replicas wanted, and no state of our own.

        Args:
            context: Serve's `AutoscalingContext`.
        """
        reported = context.aggregated_metrics or {}
        queued = context.total_queued_requests or 0.0
        return (
            wanted_replicas(
                _total(reported, REQUESTS) + queued,
                _total(reported, TOKENS),
                self._target_requests,
                self._target_tokens,
            ),
            {},
        )


def _total(reported: Mapping[str, Mapping[Any, float]], name: str) -> float:
    return sum(reported.get(name, {}).values())
