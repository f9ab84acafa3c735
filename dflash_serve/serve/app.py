"""The application builder: `serve deploy`, `serve run` and `serve.run` all come through here.

No postponed annotations here: Ray Serve looks at the builder's annotation at run time, and a
string in its place silently turns validation off.
"""

import dataclasses
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from dflash_serve.config import EngineConfig
from dflash_serve.serve.balance import AutoscalingSettings
from dflash_serve.serve.ingress import Ingress, IngressArguments
from dflash_serve.serve.journal import ResumeLimits
from dflash_serve.serve.replica import Replica
from dflash_serve.serve.routing import EngineRouter
from dflash_serve.serve.scaling import EngineLoadPolicy
from dflash_serve.serve.settings import (
    REPLICA,
    ModelSettings,
    ServeSettings,
    placement_bundles,
    placement_strategy,
    replica_names,
)

__all__ = ["assemble", "assemble_model", "build_app", "build_model"]

_CONTROL_SLOTS = 8
"""Calls a replica takes beyond its request limit, so that health and status always get in."""
_INGRESS_SLOTS = 4096
_WHOLE_SURGE = 100
"""Percent: a new ingress is there before the old one stops taking connections."""


def build_app(args: ServeSettings) -> Application:
    """Build an ingress and its models from a deployment file's `args`.

    Raises:
        pydantic.ValidationError: unknown or wrong settings; the text names the nearest key.
    """
    # Serve passes the model; code that calls the builder itself may pass a plain dict.
    return assemble(args if isinstance(args, ServeSettings) else ServeSettings(**args))


def build_model(args: ModelSettings) -> Application:
    """Build one model's replicas, for an ingress in another application (`ModelReference`).

    Raises:
        pydantic.ValidationError: as `build_app`.
    """
    return assemble_model(args if isinstance(args, ModelSettings) else ModelSettings(**args))


def assemble(settings: ServeSettings, replica: type[Any] = Replica) -> Application:
    """Bind ingress and replica deployments; `replica` is a class like `Replica`."""
    names = replica_names(settings)
    handles = {m.model: _bind_replica(m, names[m.model], replica) for m in settings.hosted}
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**_ingress_options(settings))
    application: Application = ingress.bind(_ingress_arguments(settings), handles)
    return application


def assemble_model(settings: ModelSettings, replica: type[Any] = Replica) -> Application:
    """Bind a replica deployment alone."""
    return _bind_replica(settings, REPLICA, replica)


def _bind_replica(settings: ModelSettings, name: str, replica: type[Any]) -> Application:
    settings = settings.model_copy(update={"engine": resolve_device(settings.engine)})
    deployment = serve.deployment(replica).options(name=name, **_replica_options(settings))
    application: Application = deployment.bind(settings)
    return application


def _ingress_arguments(settings: ServeSettings) -> IngressArguments:
    return IngressArguments(
        models=tuple(entry.model for entry in settings.models),
        applications={entry.model: entry.application for entry in settings.referenced},
        sleepers=tuple(entry.model for entry in settings.models if entry.may_sleep),
        limits=ResumeLimits(
            attempts=settings.resume_attempts,
            wait_s=settings.queue_timeout_s,
            total_s=settings.request_timeout_s,
        ),
        admin=settings.admin,
    )


def resolve_device(engine: EngineConfig) -> EngineConfig:
    """Decide "auto" once for all ranks: cuda when the cluster has a GPU."""
    if engine.device != "auto":
        return engine
    gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    return dataclasses.replace(engine, device="cuda" if gpus else "cpu")


def _replica_options(settings: ModelSettings) -> dict[str, Any]:
    gpu = settings.engine.device == "cuda"
    return {
        **_replica_count(settings),
        "max_ongoing_requests": settings.max_ongoing_requests + _CONTROL_SLOTS,
        "max_queued_requests": settings.max_queued_requests,
        "ray_actor_options": {"num_cpus": settings.replica_cpus},
        "placement_group_bundles": placement_bundles(settings, gpu=gpu),
        "placement_group_strategy": placement_strategy(settings.hosts),
        "request_router_config": RequestRouterConfig(
            request_router_class=EngineRouter,
            request_router_kwargs=settings.routing.rules(settings.engine.max_running),
            request_routing_stats_period_s=settings.routing.report_period_s,
        ),
        "max_constructor_retry_count": settings.start_attempts,
        **_common_options(settings),
    }


def _replica_count(settings: ModelSettings) -> dict[str, Any]:
    scaling = settings.autoscaling
    if scaling is None:
        return {"num_replicas": settings.replicas}
    return {"autoscaling_config": _autoscaling(scaling, settings.engine.max_running)}


def _autoscaling(scaling: AutoscalingSettings, max_running: int) -> AutoscalingConfig:
    target = scaling.target_requests or max_running
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        initial_replicas=scaling.first_replicas,
        target_ongoing_requests=target,  # shown by Serve; the policy has its own
        look_back_period_s=scaling.look_back_s,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        downscale_to_zero_delay_s=scaling.sleep_delay_s,
        policy=AutoscalingPolicy(
            policy_function=EngineLoadPolicy,
            policy_kwargs={"target_requests": target, "target_tokens": scaling.target_tokens},
        ),
    )


def _ingress_options(settings: ServeSettings) -> dict[str, Any]:
    return {
        "name": "Ingress",
        "num_replicas": settings.ingress_replicas,
        "max_ongoing_requests": _INGRESS_SLOTS,
        "max_surge_percent": _WHOLE_SURGE,
        "ray_actor_options": {"num_cpus": settings.ingress_cpus},
        **_common_options(settings),
    }


def _common_options(settings: ModelSettings | ServeSettings) -> dict[str, Any]:
    return {
        "health_check_period_s": settings.health_check_period_s,
        "health_check_timeout_s": settings.health_check_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout_s,
    }
