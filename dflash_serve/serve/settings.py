"""The typed arguments of a deployment: what a deployment file's `args` may hold.

No postponed annotations here: Ray Serve looks at the builder's annotation at run time, and a
string in its place silently turns validation off.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError
from dflash_serve.serve.balance import AutoscalingSettings, RoutingSettings

__all__ = [
    "REPLICA",
    "ModelReference",
    "ModelSettings",
    "ServeSettings",
    "describe_unknown_key",
    "expand_path",
    "gpu_share",
    "placement_bundles",
    "placement_strategy",
    "rank_bundles",
    "replica_names",
]

_ENGINE_KEYS = tuple(f.name for f in dataclasses.fields(EngineConfig))
_PATH_KEYS = ("target", "draft")
_QUEUE_PER_RUNNING = 8
_GPU_SHARE_STEPS = 10_000  # Ray counts resources in ten-thousandths

REPLICA = "Replica"
"""Name of the deployment with a model's replicas, where there is one model."""


class _Watched(BaseModel):
    """What Serve is told about a deployment whatever is in it.

    Attributes:
        health_check_period_s: seconds between two health checks of a replica.
        health_check_timeout_s: seconds after which a health check counts as failed.
        graceful_shutdown_timeout_s: seconds running requests get before a replica stops.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    health_check_period_s: float = Field(default=2.0, gt=0)
    health_check_timeout_s: float = Field(default=4.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=30.0, gt=0)


class ModelSettings(_Watched):
    """One served model: its engine, its replicas, their limits.

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
        max_ongoing_requests: requests one replica holds, waiting ones included; more are
            refused with HTTP 429. Left out: eight times `engine.max_running`.
        max_queued_requests: requests one ingress keeps while no replica takes them.
        hosts: hosts each replica is spread over, equally many ranks on each. For models that fit on
            no single host: every layer waits twice for the network between them.
        rank_cpus: CPUs Ray reserves per rank.
        replica_cpus: CPUs Ray reserves for tokenising and detokenising, per replica.
        gang_failures: gangs of one replica that may die or fail to start in a row, none having
            finished a request, before the replica leaves and Serve puts another in its place;
            0 leaves at the first death. Until then new ranks are started in the same process, which
            may take `engine.start_timeout_s`.
        start_attempts: failed starts after which the deployment is given up.
        accelerator_type: restricts the ranks to one kind of GPU, as Ray names it ("H100").
    """

    model: str = Field(min_length=1)
    engine: EngineConfig
    replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSettings | None = None
    routing: RoutingSettings = RoutingSettings()
    max_ongoing_requests: int = Field(ge=1)
    max_queued_requests: int = Field(default=64, ge=1)
    hosts: int = Field(default=1, ge=1)
    rank_cpus: float = Field(default=1.0, gt=0)
    replica_cpus: float = Field(default=0.25, gt=0)
    gang_failures: int = Field(default=3, ge=0)
    start_attempts: int = Field(default=3, ge=1)
    accelerator_type: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        if not isinstance(values, dict) or isinstance(values.get("engine"), EngineConfig):
            return values
        _refuse_unknown_model_keys(values, "args")
        engine = dict(values.get("engine") or {})
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

    @property
    def replica_range(self) -> tuple[int, int]:
        """Fewest and most replicas."""
        if self.autoscaling is None:
            return self.replicas, self.replicas
        return self.autoscaling.min_replicas, self.autoscaling.max_replicas

    @model_validator(mode="after")
    def _equal_hosts(self) -> Self:
        ranks = self.engine.tensor_parallel_size
        if ranks % self.hosts:
            raise ValueError(
                f"hosts is {self.hosts} and tensor_parallel_size {ranks}; every host takes equally "
                "many ranks: give a divisor of it"
            )
        if self.hosts > 1 and self.engine.share_gpu:
            raise ValueError(
                f"hosts is {self.hosts} and share_gpu is set; ranks that share a GPU share a host"
            )
        return self

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.autoscaling is not None and self.replicas != 1:
            raise ValueError(
                f"replicas is {self.replicas} and autoscaling is given; give one of them"
            )
        return self


_MODEL_KEYS = (*ModelSettings.model_fields, *_ENGINE_KEYS)


class ModelReference(BaseModel):
    """A model whose replicas are an application of their own (`build_model`).

    Serve gives everything in an application a new version when any of its `args` changes; a
    model in another application can be changed without a new ingress.

    Attributes:
        model: name clients use.
        application: name of the application with its replicas.
        may_sleep: whether that application's `autoscaling.min_replicas` is 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    application: str = Field(min_length=1)
    may_sleep: bool = False


def _kind(entry: Any) -> str:
    if isinstance(entry, dict):
        return "reference" if "application" in entry else "model"
    return "reference" if isinstance(entry, ModelReference) else "model"


_Entry = Annotated[
    Annotated[ModelSettings, Tag("model")] | Annotated[ModelReference, Tag("reference")],
    Discriminator(_kind),
]


class ServeSettings(_Watched):
    """An ingress and the models behind it.

    With one model its keys (`ModelSettings`) stand beside these; with several they stand in
    `models`, whose entries take `health_check_*` and `graceful_shutdown_timeout_s` from here
    where they have none of their own.

    Attributes:
        models: in the order that /v1/models shows.
        ingress_replicas: HTTP front ends.
        ingress_cpus: CPUs Ray reserves per ingress.
        queue_timeout_s: seconds a request may wait for its first token, and for its next one
            after its replica or a rank of it has died.
        request_timeout_s: seconds a whole request may take.
        resume_attempts: how often a request whose replica or rank died is given to another
            engine, from where it stopped, before the client gets an error.
        admin: answer POST /admin/trace. It asks for no key: switch it on only where whoever
            reaches the HTTP port may operate the server.
    """

    models: tuple[_Entry, ...]
    ingress_replicas: int = Field(default=1, ge=1)
    ingress_cpus: float = Field(default=0.25, gt=0)
    queue_timeout_s: float = Field(default=120.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    resume_attempts: int = Field(default=5, ge=0)
    admin: bool = False

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        shared = {k: v for k, v in values.items() if k in _Watched.model_fields}
        own = {k: v for k, v in values.items() if k in cls.model_fields}
        beside = {k: v for k, v in values.items() if k not in cls.model_fields}
        if "models" not in values:
            _refuse_unknown(beside, _MODEL_KEYS, "args", cls.model_fields)
            _refuse_unknown_model_keys(beside, "args")
            return own | {"models": [shared | beside]}
        misplaced = [key for key in beside if key in _MODEL_KEYS]
        if misplaced:
            raise ValueError(
                f"{', '.join(misplaced)} given beside models; write them into its entries"
            )
        _refuse_unknown(beside, cls.model_fields, "args")
        if not isinstance(own["models"], list | tuple):
            return own
        return own | {"models": [_entry(e, shared, n) for n, e in enumerate(own["models"])]}

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [entry.model for entry in self.models]
        if not names:
            raise ValueError("models is empty; allowed: one entry or more")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"model {', '.join(twice)} is there more than once; name each once")
        deployments = list(replica_names(self).values())
        if len(set(deployments)) < len(deployments):
            raise ValueError(
                f"models {', '.join(names)} differ in punctuation only, and each needs a "
                "deployment of its own; give them names that differ in a letter or digit"
            )
        return self

    @property
    def hosted(self) -> tuple[ModelSettings, ...]:
        """The models whose replicas are part of this application."""
        return tuple(entry for entry in self.models if isinstance(entry, ModelSettings))

    @property
    def referenced(self) -> tuple[ModelReference, ...]:
        """The models whose replicas are applications of their own."""
        return tuple(entry for entry in self.models if isinstance(entry, ModelReference))


def replica_names(settings: ServeSettings) -> dict[str, str]:
    """Name of the deployment with the replicas, by model, of those in this application."""
    if len(settings.models) == 1:
        return {model.model: REPLICA for model in settings.hosted}
    return {
        model.model: f"{REPLICA}-{re.sub(r'[^A-Za-z0-9.]+', '-', model.model)}"
        for model in settings.hosted
    }


def placement_bundles(settings: ModelSettings, *, gpu: bool) -> list[dict[str, float]]:
    """Ray resources of one replica, the replica's own CPU in the first; see `rank_bundles`."""
    engine = settings.engine
    need = {"CPU": settings.rank_cpus}
    if gpu:
        need["GPU"] = gpu_share(engine)
    bundles = rank_bundles(need, engine.tensor_parallel_size, settings.hosts)
    if gpu and settings.accelerator_type is not None:
        for bundle in bundles:
            bundle[f"accelerator_type:{settings.accelerator_type}"] = 0.001
    bundles[0]["CPU"] += settings.replica_cpus
    return bundles


def rank_bundles(need: Mapping[str, float], ranks: int, hosts: int) -> list[dict[str, float]]:
    """A bundle per rank on one host; on several a bundle per host, for all its ranks."""
    if hosts == 1:
        return [dict(need) for _ in range(ranks)]
    return [
        {name: amount * (ranks // hosts) for name, amount in need.items()} for _ in range(hosts)
    ]


def placement_strategy(hosts: int) -> str:
    """How Ray must place these bundles."""
    return "STRICT_PACK" if hosts == 1 else "STRICT_SPREAD"


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


def _refuse_unknown(
    values: dict[str, Any], known: Iterable[str], where: str, also: Iterable[str] = ()
) -> None:
    """Raise for keys outside `known`; those of `also` may be what was meant, too."""
    names = {*known, *also}
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ValueError("; ".join(describe_unknown_key(key, names, where) for key in unknown))


def _refuse_unknown_model_keys(values: dict[str, Any], where: str) -> None:
    _refuse_unknown(values, _MODEL_KEYS, where)
    engine = values.get("engine")
    if isinstance(engine, dict):
        _refuse_unknown(engine, _ENGINE_KEYS, f"{where}.engine")


def _entry(entry: Any, shared: dict[str, Any], number: int) -> Any:
    """An entry of `models`, with what it takes from beside them."""
    if not isinstance(entry, dict):
        return entry
    where = f"args.models[{number}]"
    if _kind(entry) == "reference":
        _refuse_unknown(entry, ModelReference.model_fields, where)
        return entry
    _refuse_unknown_model_keys(entry, where)
    return shared | entry


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
