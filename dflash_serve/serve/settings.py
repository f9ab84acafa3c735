"""The typed arguments of a deployment: what a deployment file's `args` may hold.

No postponed annotations here: Ray Serve looks at the builder's annotation at run time, and a
string in its place silently turns validation off.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError

__all__ = [
    "AutoscalingSettings",
    "RoutingSettings",
    "ServeSettings",
    "describe_unknown_key",
    "expand_path",
    "placement_bundles",
]

_ENGINE_KEYS = tuple(f.name for f in dataclasses.fields(EngineConfig))
_PATH_KEYS = ("target", "draft")
_QUEUE_PER_RUNNING = 8
_OVERLOAD_SHARE = 4  # of `max_running`
_LEAST_OVERLOAD = 2.0
_GPU_SHARE_STEPS = 10_000  # Ray counts resources in ten-thousandths


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


class ServeSettings(BaseModel):
    """One served model: its engine, its replicas, its limits.

    Engine keys may be given under `engine` or beside the others (`serve run ... target=...` can
    only pass flat keys). Paths may hold `~` and `$VARIABLES`; a relative path is taken from the
    working directory of the process that builds the application (with `serve deploy`, where
    `ray start` was called).

    Attributes:
        model: name clients use; the last part of the target's path when left out.
        engine: the engine's own configuration. The executor is always "ray".
        replicas: engine replicas, each with its own `engine.tensor_parallel_size` ranks.
        autoscaling: in place of `replicas`, lets their number follow the load.
        routing: which replica a request goes to.
        ingress_replicas: HTTP front ends.
        max_ongoing_requests: requests one replica holds, waiting ones included; more are
            refused with HTTP 429. Left out: eight times `engine.max_running`.
        max_queued_requests: requests one ingress keeps while no replica takes them.
        rank_cpus: CPUs Ray reserves per rank.
        replica_cpus: CPUs Ray reserves for tokenising and detokenising, per replica.
        ingress_cpus: CPUs Ray reserves per ingress.
        health_check_period_s: seconds between two health checks of a replica.
        health_check_timeout_s: seconds after which a health check counts as failed.
        graceful_shutdown_timeout_s: seconds running requests get before a replica stops.
        queue_timeout_s: seconds a request may wait for its first token, and for its next one
            after its replica or a rank of it has died.
        request_timeout_s: seconds a whole request may take.
        resume_attempts: how often a request whose replica or rank died is given to another
            engine, from where it stopped, before the client gets an error.
        gang_failures: gangs of one replica that may die or fail to start in a row, none having
            finished a request, before the replica leaves and Serve puts another in its place;
            0 leaves at the first death. Until then new ranks are started in the same process, which
            may take `engine.start_timeout_s`.
        start_attempts: failed starts after which the deployment is given up.
        accelerator_type: restricts the ranks to one kind of GPU, as Ray names it ("H100").
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    engine: EngineConfig
    replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSettings | None = None
    routing: RoutingSettings = RoutingSettings()
    ingress_replicas: int = Field(default=1, ge=1)
    max_ongoing_requests: int = Field(ge=1)
    max_queued_requests: int = Field(default=64, ge=1)
    rank_cpus: float = Field(default=1.0, gt=0)
    replica_cpus: float = Field(default=0.25, gt=0)
    ingress_cpus: float = Field(default=0.25, gt=0)
    health_check_period_s: float = Field(default=2.0, gt=0)
    health_check_timeout_s: float = Field(default=4.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=30.0, gt=0)
    queue_timeout_s: float = Field(default=120.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    resume_attempts: int = Field(default=5, ge=0)
    gang_failures: int = Field(default=3, ge=0)
    start_attempts: int = Field(default=3, ge=1)
    accelerator_type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        if not isinstance(values, dict) or isinstance(values.get("engine"), EngineConfig):
            return values
        known = (*cls.model_fields, *_ENGINE_KEYS)
        _refuse_unknown(values, known, "args")
        engine = dict(values.get("engine") or {})
        _refuse_unknown(engine, _ENGINE_KEYS, "args.engine")
        settings = {k: v for k, v in values.items() if k in cls.model_fields}
        flat = {k: v for k, v in values.items() if k in _ENGINE_KEYS}
        _refuse_twice(engine, flat)
        settings["engine"] = _engine_values(engine | flat)
        _fill_in(settings)
        return settings

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no replica at all."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError(
                f"replicas is {self.replicas} and autoscaling is given; give one of them"
            )
        return self


def placement_bundles(settings: ServeSettings, *, gpu: bool) -> list[dict[str, float]]:
    """Ray resources of one replica: a bundle per rank, the replica's own CPU in the first."""
    engine = settings.engine
    bundle = {"CPU": settings.rank_cpus}
    if gpu:
        bundle["GPU"] = gpu_share(engine)
        if settings.accelerator_type is not None:
            bundle[f"accelerator_type:{settings.accelerator_type}"] = 0.001
    bundles = [dict(bundle) for _ in range(engine.tensor_parallel_size)]
    bundles[0]["CPU"] += settings.replica_cpus
    return bundles


def gpu_share(engine: EngineConfig) -> float:
    """GPUs one rank reserves: one, or an equal part of one when ranks share it."""
    if not engine.share_gpu:
        return 1.0
    return _GPU_SHARE_STEPS // engine.tensor_parallel_size / _GPU_SHARE_STEPS


def describe_unknown_key(key: str, known: Iterable[str], where: str) -> str:
    """Error text for a key that nothing reads: where it is, and the nearest known one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(names)}"
    return f"unknown key {key!r} in {where}; {hint}"


def expand_path(path: str) -> str:
    """Absolute form of a path that may hold `~` and environment variables.

    Raises:
        ConfigError: a variable in it is not set.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if "$" in expanded:
        raise ConfigError(f"path {path!r} names an environment variable that is not set; set it")
    return os.path.abspath(expanded)


def _refuse_unknown(values: dict[str, Any], known: Iterable[str], where: str) -> None:
    unknown = [key for key in values if key not in set(known)]
    if unknown:
        raise ValueError("; ".join(describe_unknown_key(key, known, where) for key in unknown))


def _refuse_twice(engine: dict[str, Any], flat: dict[str, Any]) -> None:
    twice = sorted(engine.keys() & flat.keys())
    if twice:
        raise ValueError(
            f"{', '.join(twice)} given in args and again in args.engine; give each once"
        )


def _engine_values(engine: dict[str, Any]) -> dict[str, Any]:
    if engine.setdefault("executor", "ray") != "ray":
        raise ValueError(
            f"executor is {engine['executor']!r}; allowed in a deployment: ray (leave it out). "
            "The others are for `dflash-serve generate`"
        )
    for key in _PATH_KEYS:
        if isinstance(engine.get(key), str):
            engine[key] = expand_path(engine[key])
    return engine


def _fill_in(settings: dict[str, Any]) -> None:
    """Defaults that follow from other values."""
    engine = settings["engine"]
    if "model" not in settings and isinstance(engine.get("target"), str):
        settings["model"] = os.path.basename(engine["target"])
    if settings.get("max_ongoing_requests") is None:
        running = engine.get("max_running", EngineConfig.max_running)
        # A value of the wrong type is reported by the engine's own validation.
        settings["max_ongoing_requests"] = _QUEUE_PER_RUNNING * int(running or 1)
