"""How many replicas the load asks for, and what Serve is told about it."""

from types import SimpleNamespace

import pytest
from ray import cloudpickle

from dflash_serve.serve.app import assemble
from dflash_serve.serve.scaling import REQUESTS, TOKENS, EngineLoadPolicy, wanted_replicas
from dflash_serve.serve.settings import ServeSettings

from .fake_replica import FakeReplica


@pytest.mark.parametrize(
    ("requests", "tokens", "target_tokens", "wanted"),
    [
        (0, 0, None, 0),
        (12, 10**6, None, 1.5),
        (12, 4_000, 1_000, 4),
        (12, 1_000, 1_000, 1.5),
    ],
)
def test_every_replica_is_to_be_at_its_target(requests, tokens, target_tokens, wanted):
    assert wanted_replicas(requests, tokens, 8, target_tokens) == wanted


def test_the_policy_adds_up_what_the_replicas_report_and_what_waits():
    context = SimpleNamespace(
        aggregated_metrics={REQUESTS: {"a": 8.0, "b": 6.0}, TOKENS: {"a": 900.0, "b": 300.0}},
        total_queued_requests=2.0,
    )
    assert EngineLoadPolicy(8, None)(context) == (2.0, {})
    assert EngineLoadPolicy(8, 400)(context) == (3.0, {})


def test_the_policy_asks_for_nothing_before_anything_is_reported():
    context = SimpleNamespace(aggregated_metrics={}, total_queued_requests=None)
    assert EngineLoadPolicy(8, 400)(context) == (0.0, {})


def deployment(**changes):
    settings = ServeSettings(
        model="m", engine={"target": "/m/t", "device": "cpu", "max_running": 6}, **changes
    )
    application = assemble(settings, FakeReplica)
    (replica,) = application._bound_deployment.init_args[1].values()
    return replica._bound_deployment._deployment_config


def test_a_fixed_count_has_no_autoscaling():
    config = deployment(replicas=3)
    assert config.num_replicas == 3
    assert config.autoscaling_config is None


def test_serve_gets_limits_delays_and_the_policy():
    scaling = {"min_replicas": 0, "max_replicas": 4, "downscale_delay_s": 60, "sleep_delay_s": 90}
    made = deployment(autoscaling=scaling).autoscaling_config
    assert (made.min_replicas, made.initial_replicas, made.max_replicas) == (0, 1, 4)
    assert (made.downscale_delay_s, made.downscale_to_zero_delay_s) == (60, 90)
    policy = made.policy
    assert policy.policy_kwargs == {"target_requests": 6, "target_tokens": None}
    made_there = cloudpickle.loads(policy.get_serialized_policy_def())(**policy.policy_kwargs)
    context = SimpleNamespace(aggregated_metrics={REQUESTS: {"a": 9}}, total_queued_requests=0)
    assert made_there(context)[0] == 1.5


def test_serve_gets_the_rules_of_routing():
    router = deployment(routing={"policy": "two_choices", "report_period_s": 3})
    config = router.request_router_config
    assert config.request_routing_stats_period_s == 3
    assert config.request_router_kwargs["policy"] == "two_choices"
    assert config.request_router_kwargs["overload_requests"] == 2
