"""How requests are spread over replicas, and how many replicas there are, as settings."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["AutoscalingSettings", "RoutingSettings"]

_OVERLOAD_SHARE = 4  # of `max_running`
_LEAST_OVERLOAD = 2.0


class RoutingSettings(BaseModel):
    """Which replica a request goes to.

    Loads are counted in requests of the usual size, see `route_choice.relative_loads`. Every
    ingress replica learns on its own what it sent where.

    Attributes:
        policy: "prefix" takes the replica of the session (`x-session-id`, else `user`), else the
            one that was sent the longest beginning of the request, unless it is overloaded, else
            the less loaded of two; "two_choices" always does the last; "round_robin" takes turns,
            for comparison.
        overload_requests: a replica is overloaded when its load is more than this above
            `overload_factor` times the least. Left out: a quarter of `engine.max_running`, at
            least 2.
        overload_factor: see `overload_requests`.
        kv_full: share of its cache pages in use from which a replica counts as overloaded while
            another is below it.
        min_overlap_bytes: shorter common beginnings decide nothing.
        block_bytes: beginnings are compared in blocks of so many bytes of text (4 bytes an id).
        request_blocks: blocks compared of one request, from its beginning.
        replica_blocks: blocks remembered per replica, about 150 bytes of memory each.
        sessions: sessions remembered, about 250 bytes of memory each.
        report_period_s: seconds between two reports of a replica's load.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["prefix", "two_choices", "round_robin"] = "prefix"
    overload_requests: float | None = Field(default=None, gt=0)
    overload_factor: float = Field(default=1.5, ge=1)
    kv_full: float = Field(default=0.95, gt=0, le=1)
    min_overlap_bytes: int = Field(default=256, ge=1)
    block_bytes: int = Field(default=128, ge=16)
    request_blocks: int = Field(default=512, ge=1)
    replica_blocks: int = Field(default=16_384, ge=1)
    sessions: int = Field(default=16_384, ge=1)
    report_period_s: float = Field(default=1.0, gt=0)

    def rules(self, max_running: int) -> dict[str, Any]:
        """The fields of `RouteRules`, in types that JSON has."""
        overload = self.overload_requests
        if overload is None:
            overload = max(_LEAST_OVERLOAD, max_running / _OVERLOAD_SHARE)
        return self.model_dump(exclude={"report_period_s"}) | {"overload_requests": overload}


class AutoscalingSettings(BaseModel):
    """How many replicas there are, by what their engines hold.

    Attributes:
        min_replicas: fewest; 0 lets the model go to sleep. A request then waits for a whole
            start, so `queue_timeout_s` must be longer than one.
        max_replicas: most.
        initial_replicas: at deployment. Left out: `min_replicas`, at least 1, so that what is
            wrong with the model shows then.
        target_requests: requests of one replica, waiting ones included, above which another is
            started. Left out: `engine.max_running`, beyond which requests wait.
        target_tokens: the same in tokens: those in cache pages and in prompts without an answer
            yet. Left out: tokens do not matter.
        look_back_s: seconds the load is averaged over.
        upscale_delay_s: seconds the load must ask for more replicas until they are started.
        downscale_delay_s: seconds it must ask for fewer; a start costs minutes.
        sleep_delay_s: the same for the last replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(default=None, ge=0)
    target_requests: float | None = Field(default=None, gt=0)
    target_tokens: float | None = Field(default=None, gt=0)
    look_back_s: float = Field(default=30.0, gt=0)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=900.0, ge=0)
    sleep_delay_s: float = Field(default=1800.0, ge=0)

    @property
    def first_replicas(self) -> int:
        """Replicas at deployment."""
        wanted = self.initial_replicas
        return max(1, self.min_replicas) if wanted is None else wanted

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_replicas <= self.first_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, initial_replicas {self.first_replicas}, "
                f"max_replicas {self.max_replicas}; allowed: in ascending order"
            )
        return self
