import dataclasses
import inspect
import os

import pytest
from pydantic import ValidationError

from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError
from dflash_serve.serve.app import build_app, build_model
from dflash_serve.serve.settings import (
    ModelReference,
    ModelSettings,
    ServeSettings,
    describe_unknown_key,
    expand_path,
    placement_bundles,
    replica_names,
)

ONE = {"model": "one", "target": "/m/one", "tensor_parallel_size": 2}
TWO = {"model": "org/two", "engine": {"target": "/m/two"}, "rank_cpus": 2}


def settings(**changes):
    """The one model of a file that names one."""
    (model,) = served(**changes).models
    return model


def served(**changes):
    return ServeSettings.model_validate({"engine": {"target": "/m/target"}} | changes)


@pytest.mark.parametrize(
    ("builder", "expected"), [(build_app, ServeSettings), (build_model, ModelSettings)]
)
def test_builder_annotation_is_the_class_itself(builder, expected):
    (parameter,) = inspect.signature(builder).parameters.values()
    assert parameter.annotation is expected


def test_model_name_defaults_to_the_folder():
    assert settings().model == "target"


def test_flat_engine_keys_are_taken_as_serve_run_passes_them():
    (made,) = ServeSettings.model_validate({"target": "/m/t", "tensor_parallel_size": "3"}).models
    assert made.engine.tensor_parallel_size == 3
    assert made.engine.executor == "ray"


def test_settings_survive_a_round_trip():
    several = ServeSettings(models=[ONE, TWO, {"model": "three", "application": "app"}])
    for made in (served(replicas=2), served(autoscaling={"max_replicas": 2}), several):
        again = ServeSettings.model_validate(made.model_dump())
        assert again == made


def test_several_models_have_their_own_engines_and_deployments():
    made = ServeSettings(models=[ONE, TWO])
    one, two = made.models
    assert (one.engine.tensor_parallel_size, two.engine.tensor_parallel_size) == (2, 1)
    assert (one.rank_cpus, two.rank_cpus) == (1, 2)
    assert replica_names(made) == {"one": "Replica-one", "org/two": "Replica-org-two"}
    assert replica_names(served()) == {"target": "Replica"}


def test_what_all_deployments_have_is_taken_from_beside_the_models():
    made = ServeSettings(
        models=[ONE, TWO | {"graceful_shutdown_timeout_s": 9}],
        graceful_shutdown_timeout_s=5,
        health_check_period_s=1,
    )
    assert [m.graceful_shutdown_timeout_s for m in (made, *made.models)] == [5, 5, 9]
    assert [m.health_check_period_s for m in made.models] == [1, 1]


def test_a_model_may_be_served_by_another_application():
    made = ServeSettings(models=[ONE, {"model": "b", "application": "app", "may_sleep": True}])
    assert made.referenced == (ModelReference(model="b", application="app", may_sleep=True),)
    assert [m.model for m in made.hosted] == ["one"]


def test_max_ongoing_requests_follows_max_running():
    made = settings(engine={"target": "/m/t", "max_running": 4})
    assert made.max_ongoing_requests == 32


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"engine": {"target": "/m", "tensor_paralel_size": 2}}, "'tensor_parallel_size'"),
        ({"engine": {"target": "/m"}, "replica": 2}, "'replicas'"),
        ({"engine": {"target": "/m"}, "zzz": 2}, "known keys"),
        ({"engine": {"target": "/m", "draft": "/d"}, "draft": "/e"}, "given in args and again"),
        ({"engine": {"target": "/m", "executor": "mp"}}, "executor is 'mp'; allowed"),
        ({"engine": {"target": "/m", "page_size": 0}}, "page_size is 0"),
        ({"engine": {"target": "/m", "page_size": "many"}}, "valid integer"),
        ({"engine": {"target": "/m", "device": "tpu"}}, "'cpu'"),
        ({"engine": {"target": "/m"}, "replicas": 0}, "greater than or equal to 1"),
        ({"engine": {"target": "/m"}, "routing": {"policy": "random"}}, "'round_robin'"),
        ({"engine": {"target": "/m"}, "routing": {"polcy": "prefix"}}, "routing.polcy"),
        ({"engine": {"target": "/m"}, "autoscaling": {}}, "max_replicas"),
        (
            {"engine": {"target": "/m"}, "autoscaling": {"min_replicas": 3, "max_replicas": 2}},
            "min_replicas is 3, initial_replicas 3, max_replicas 2; allowed: in ascending order",
        ),
        (
            {"engine": {"target": "/m"}, "replicas": 2, "autoscaling": {"max_replicas": 2}},
            "replicas is 2 and autoscaling is given; give one of them",
        ),
        ({"engine": {"target": "$NO_SUCH_VARIABLE/m"}}, "is not set; set it"),
        ({"models": []}, "models is empty"),
        ({"models": [ONE, ONE]}, "model one is there more than once"),
        ({"models": [ONE], "target": "/m"}, "target given beside models; write them into its"),
        ({"models": [ONE | {"replica": 1}]}, "'replica' in args.models[0]; did you mean"),
        ({"models": [TWO | {"engine": {"darft": 1}}]}, "'darft' in args.models[0].engine; did"),
        ({"models": [{"model": "a", "application": "b", "target": "/m"}]}, "args.models[0]"),
        (
            {"models": [ONE | {"model": "a/b"}, ONE | {"model": "a-b"}]},
            "models a/b, a-b differ in punctuation only",
        ),
        ({"engine": {}}, "target"),
        ({}, "target"),
    ],
)
def test_wrong_args_are_refused_with_the_reason(args, text):
    with pytest.raises(ValidationError) as caught:
        ServeSettings.model_validate(args)
    assert text in str(caught.value)


def test_every_engine_field_has_its_own_name():
    engine = {f.name for f in dataclasses.fields(EngineConfig)}
    assert not engine & {*ServeSettings.model_fields, *ModelSettings.model_fields}


def test_paths_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert expand_path("$MODELS/a") == f"{tmp_path}/a"
    assert expand_path("~/a") == "/home/someone/a"
    assert expand_path("a/b") == os.path.join(tmp_path, "a", "b")
    with pytest.raises(ConfigError, match="NO_SUCH"):
        expand_path("$NO_SUCH_VARIABLE/a")


def test_bundles_hold_one_rank_each_and_the_replica_in_the_first():
    made = settings(tensor_parallel_size=3, rank_cpus=2, replica_cpus=0.5)
    assert placement_bundles(made, gpu=False) == [{"CPU": 2.5}, {"CPU": 2.0}, {"CPU": 2.0}]
    bundles = placement_bundles(made, gpu=True)
    assert [b["GPU"] for b in bundles] == [1.0, 1.0, 1.0]


def test_shared_gpu_is_divided_into_parts_that_fit():
    made = settings(tensor_parallel_size=3, share_gpu=True, accelerator_type="H100")
    bundles = placement_bundles(made, gpu=True)
    assert sum(b["GPU"] for b in bundles) <= 1.0
    assert all(b["accelerator_type:H100"] == 0.001 for b in bundles)


def test_unknown_key_without_a_near_one_lists_the_known():
    assert describe_unknown_key("q", ["alpha", "beta"], "here") == (
        "unknown key 'q' in here; known keys: alpha, beta"
    )


def test_several_hosts_get_a_bundle_each_for_all_their_ranks():
    made = settings(tensor_parallel_size=8, hosts=2, rank_cpus=2, replica_cpus=0.5)
    assert placement_bundles(made, gpu=False) == [{"CPU": 8.5}, {"CPU": 8.0}]
    assert placement_bundles(made, gpu=True)[1] == {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor_parallel_size": 4, "hosts": 3}, "give a divisor"),
        ({"tensor_parallel_size": 1, "hosts": 2}, "give a divisor"),
        ({"tensor_parallel_size": 4, "hosts": 2, "share_gpu": True}, "share a host"),
        ({"hosts": 0}, "greater than or equal to 1"),
    ],
)
def test_hosts_that_cannot_be_are_refused(changes, text):
    with pytest.raises(ValidationError, match=text):
        settings(**changes)
