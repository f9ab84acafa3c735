import copy

import pytest
import yaml

from dflash_serve.errors import ConfigError
from dflash_serve.serve.validate import BUILDER, MODEL_BUILDER, validate_config

GOOD = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "dflash",
            "route_prefix": "/",
            "import_path": BUILDER,
            "args": {"engine": {"target": "/m/t", "tensor_parallel_size": 2}},
            "deployments": [{"name": "Replica", "ray_actor_options": {"num_cpus": 1}}],
        }
    ],
}


@pytest.fixture
def check(tmp_path):
    def run(change):
        config = copy.deepcopy(GOOD)
        change(config)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return validate_config(path)

    return run


def application(config):
    return config["applications"][0]


def test_good_file_has_no_problems_and_typed_settings(check):
    report = check(lambda config: None)
    assert report.problems == []
    assert report.applications["dflash"].models[0].engine.tensor_parallel_size == 2
    assert "not a folder on this machine" in report.warnings[0]
    report.require_valid()


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (lambda c: c.update(proxy_lokation="X"), ["'proxy_location'", "the top level"]),
        (lambda c: c["http_options"].update(prot=1), ["'port'", "in http_options"]),
        (lambda c: application(c).update(rout_prefix="/"), ["'route_prefix'", "applications[0]"]),
        (
            lambda c: application(c)["deployments"][0].update(num_replica=1),
            ["'num_replicas'", "applications[0].deployments[0]"],
        ),
        (
            lambda c: application(c)["deployments"][0]["ray_actor_options"].update(num_gpu=1),
            ["'num_gpus'", "ray_actor_options"],
        ),
        (lambda c: application(c)["args"].update(replika=1), ["'replicas'", "in args"]),
        (lambda c: application(c)["args"]["engine"].update(drafts=1), ["'draft'", "args.engine"]),
        (
            lambda c: application(c)["deployments"][0].update(placement_group_strategy="PCK"),
            ["'PCK'", "STRICT_PACK"],
        ),
        (
            lambda c: application(c)["deployments"][0].update(placement_group_strategy="SPREAD"),
            ["hosts is 1", "use STRICT_PACK"],
        ),
        (
            lambda c: application(c)["deployments"][0].update(placement_group_bundles=[{"CPU": 1}]),
            ["has 1 placement_group_bundles", "needs 2"],
        ),
        (lambda c: application(c)["deployments"][0].update(name="Replika"), ["'Replica'"]),
        (lambda c: c["http_options"].update(port="many"), ["http_options.port"]),
        (lambda c: c.update(controller_options={"runtime_env": {"pip": []}}), ["env_vars"]),
    ],
)
def test_each_mistake_is_named_with_its_place(check, change, texts):
    report = check(change)
    assert len(report.problems) == 1, report.problems
    for text in texts:
        assert text in report.problems[0]
    with pytest.raises(ConfigError, match="cannot be served"):
        report.require_valid()


def test_soft_knobs_are_checked_with_the_file(check):
    def knobs(given):
        return lambda config: application(config)["deployments"][0].update(user_config=given)

    assert check(knobs({"verify_length": 4, "speculation": True})).problems == []
    (problem,) = check(knobs({"replicas": 2})).problems
    assert problem.startswith("applications[0].deployments[Replica].user_config: replicas is 2")


def test_all_mistakes_are_reported_together(check):
    def change(config):
        config["proxi"] = 1
        application(config)["args"]["modle"] = "x"

    assert len(check(change).problems) == 2


def test_args_of_other_applications_are_their_own(check):
    def change(config):
        application(config).update(import_path="other:app", args={"anything": 1})
        application(config)["deployments"] = []

    assert check(change).problems == []


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is no YAML"), ("- 1", "holds a list"), (None, "cannot read")]
)
def test_unreadable_files_are_named(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        validate_config(path)


def several(config):
    """One model beside the ingress, one in an application of its own."""
    application(config)["args"] = {
        "models": [
            {"model": "a", "engine": {"target": "/m/a", "tensor_parallel_size": 2}},
            {"model": "b", "application": "b"},
        ]
    }
    application(config)["deployments"] = []
    config["applications"].append(
        {
            "name": "b",
            "route_prefix": None,
            "import_path": MODEL_BUILDER,
            "args": {"model": "b", "target": "/m/b"},
        }
    )


def test_several_models_and_applications_are_read(check):
    report = check(several)
    assert report.problems == []
    assert [entry.model for entry in report.applications["dflash"].models] == ["a", "b"]
    assert report.models["b"].engine.target == "/m/b"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda c: c["applications"].pop(),
            "model 'b' is to be served by application 'b'; applications here that",
        ),
        (lambda c: c["applications"][1]["args"].update(model="z"), "'b' serves 'z'"),
        (
            lambda c: c["applications"][1]["args"].update(
                autoscaling={"min_replicas": 0, "max_replicas": 1}
            ),
            "may_sleep is False, but application 'b' keeps at least 0 replicas",
        ),
        (lambda c: c["applications"][1].update(route_prefix="/b"), "allowed: null"),
        (
            lambda c: application(c)["args"]["models"][0]["engine"].update(page_size=0),
            "applications[0].args.models[0].engine: page_size is 0",
        ),
        (
            lambda c: application(c)["deployments"].append({"name": "Replica-b"}),
            "'Replica-b'",
        ),
        (
            lambda c: c["applications"][1].update(deployments=[{"name": "Ingress"}]),
            "'Ingress'",
        ),
    ],
)
def test_mistakes_with_several_models_are_named(check, change, text):
    def both(config):
        several(config)
        change(config)

    report = check(both)
    assert len(report.problems) == 1, report.problems
    assert text in report.problems[0]
