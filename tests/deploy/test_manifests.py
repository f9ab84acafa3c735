import copy
import functools
import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from dflash_serve.serve.settings import ServeSettings, placement_bundles
from dflash_serve.serve.validate import validate_config

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "crds"
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
KUSTOMIZATIONS = sorted(K8S.rglob("kustomization.yaml"))
GPU_RESOURCE = "nvidia.com/gpu"

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"the CRD schemas are not here ({CRDS} is absent)"
)


def load_generator():
    spec = importlib.util.spec_from_file_location("k8s_generate", K8S / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


# -- what kustomize would do, as far as these manifests use it --------------------------------


def build(folder: Path) -> list[dict]:
    """The objects of a kustomization: resources, then JSON patches."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: list[dict] = []
    for name in kustomization.get("resources", ()):
        path = folder / name
        objects += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", ()):
        operations = yaml.safe_load((folder / patch["path"]).read_text())
        matching = [o for o in objects if fits(o, patch["target"])]
        assert matching, f"{patch} fits nothing"
        for found in matching:
            for operation in operations:
                apply(found, operation)
    return objects


def fits(manifest: dict, target: dict) -> bool:
    return manifest["kind"] == target["kind"] and manifest["metadata"]["name"] == target["name"]


def apply(document, operation: dict) -> None:
    assert operation["op"] == "replace"
    *parents, last = operation["path"].removeprefix("/").split("/")
    for part in parents:
        document = document[key_of(document, part)]
    last = key_of(document, last)
    assert last in document or isinstance(last, int), f"{operation['path']} is not there"
    document[last] = copy.deepcopy(operation["value"])


def key_of(document, part: str):
    return int(part) if isinstance(document, list) else part.replace("~1", "/").replace("~0", "~")


def ray_service(folder: str) -> dict:
    (found,) = [o for o in build(K8S / folder) if o["kind"] == "RayService"]
    return found


SERVICES = [
    ("base", "qwen3-8b-tp1.yaml"),
    ("overlays/tp4", "qwen3-8b-tp4.yaml"),
    ("overlays/autoscaling", "qwen3-8b-autoscaling.yaml"),
    ("overlays/two-models", "qwen3-two-models.yaml"),
]


# -- CRD schemas -------------------------------------------------------------------------------


@functools.cache
def crd_schema(kind: str, version: str) -> dict:
    """The schema of a kind; the files are named after group and plural."""
    (path,) = CRDS.glob(f"*_{kind.lower()}s.yaml")
    # A megabyte each: the loader written in C takes a second, the other one twenty.
    crd = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = [v for v in crd["spec"]["versions"] if v["name"] == version]
    schema = strict(found["schema"]["openAPIV3Schema"])
    assert schema["properties"].pop("metadata") == {"type": "object"}
    return schema


def strict(schema):
    """The schema with unknown keys refused, as the API server prunes them silently."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        schema.setdefault("additionalProperties", False)
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
    return schema


def with_defaults(value, schema):
    """The value after the API server's defaulting, which comes before `required` is checked."""
    if isinstance(value, dict):
        value = dict(value)
        for key, inner in schema.get("properties", {}).items():
            if key not in value and "default" in inner:
                value[key] = inner["default"]
            if key in value:
                value[key] = with_defaults(value[key], inner)
    elif isinstance(value, list) and "items" in schema:
        value = [with_defaults(item, schema["items"]) for item in value]
    return value


def check(manifest: dict) -> None:
    schema = crd_schema(manifest["kind"], manifest["apiVersion"].partition("/")[2])
    body = {k: v for k, v in manifest.items() if k != "metadata"}
    jsonschema.Draft202012Validator(schema).validate(with_defaults(body, schema))


# -- tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_deployment_file_is_valid(path):
    report = validate_config(path)
    assert report.problems == []
    assert len(report.applications) == 1


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_serves_own_time_limit_is_only_the_safety_net(path):
    (settings,) = validate_config(path).applications.values()
    http = yaml.safe_load(path.read_text())["http_options"]
    assert http["request_timeout_s"] > settings.request_timeout_s


def test_the_demo_fits_two_cores_at_tp_1():
    (settings,) = validate_config(ROOT / "deployments" / "demo.yaml").applications.values()
    bundles = placement_bundles(settings.hosted[0], gpu=False)
    assert sum(bundle["CPU"] for bundle in bundles) + settings.ingress_cpus <= 2


def test_manifests_are_what_the_generator_writes():
    stale = [p.name for p, text in generate.outputs().items() if p.read_text() != text]
    assert stale == [], "run `python k8s/generate.py`"


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: str(path.relative_to(K8S)))
def test_every_kustomization_builds(path):
    objects = build(path.parent)
    assert objects
    assert all(o["apiVersion"] and o["kind"] and o["metadata"]["name"] for o in objects)


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_serve_config_is_the_deployment_file_word_for_word(folder, name):
    config = ray_service(folder)["spec"]["serveConfigV2"]
    assert config.rstrip() == (ROOT / "deployments" / name).read_text().rstrip()


@needs_crds
@pytest.mark.parametrize("folder", [folder for folder, _ in SERVICES])
def test_ray_service_passes_the_crd_schema(folder):
    check(ray_service(folder))


@needs_crds
def test_a_typo_does_not_pass_the_crd_schema():
    manifest = ray_service("base")
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replika"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replika"):
        check(manifest)


@needs_crds
def test_pod_monitor_passes_the_crd_schema():
    (monitor,) = build(K8S / "monitoring")
    check(monitor)


def models_of(name):
    """Every model of a deployment file, in the order of its worker groups."""
    report = validate_config(ROOT / "deployments" / name)
    (settings,) = report.applications.values()
    return [*settings.hosted, *report.models.values()]


def cluster_of(folder):
    return ray_service(folder)["spec"]["rayClusterConfig"]


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_each_models_pods_hold_one_whole_gang_each(folder, name):
    groups = cluster_of(folder)["workerGroupSpecs"]
    assert len({group["groupName"] for group in groups}) == len(groups)
    for group, model in zip(groups, models_of(name), strict=True):
        (container,) = group["template"]["spec"]["containers"]
        resources = container["resources"]
        assert resources["limits"] == resources["requests"]
        assert resources["limits"][GPU_RESOURCE] == model.engine.tensor_parallel_size
        bundles = placement_bundles(model, gpu=True)
        assert int(resources["limits"]["cpu"]) > sum(bundle["CPU"] for bundle in bundles)


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_pods_follow_the_replicas_that_a_file_allows(folder, name):
    cluster, models = cluster_of(folder), models_of(name)
    for group, model in zip(cluster["workerGroupSpecs"], models, strict=True):
        assert (group["minReplicas"], group["maxReplicas"]) == model.replica_range
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    scales = any(model.autoscaling is not None for model in models)
    assert cluster["enableInTreeAutoscaling"] is scales


def test_the_shipped_files_scale_and_do_not_and_have_one_model_and_more():
    found = {
        (len(models_of(name)), cluster_of(f)["enableInTreeAutoscaling"]) for f, name in SERVICES
    }
    assert {(1, False), (1, True), (2, True)} <= found


def test_the_ingress_keeps_a_pod_when_every_model_may_sleep(monkeypatch, tmp_path):
    text = (ROOT / "deployments" / "qwen3-8b-autoscaling.yaml").read_text()
    (tmp_path / "sleeper.yaml").write_text(text.replace("min_replicas: 1", "min_replicas: 0"))
    monkeypatch.setattr(generate, "DEPLOYMENTS", tmp_path)
    (group,) = yaml.safe_load(generate.render("sleeper.yaml"))["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 4)


def test_a_gang_over_several_hosts_gets_a_pod_for_each(monkeypatch, tmp_path):
    text = (ROOT / "deployments" / "qwen3-8b-autoscaling.yaml").read_text()
    model = yaml.safe_load(text)
    model["applications"][0]["args"] |= {"hosts": 2, "rank_cpus": 3}
    model["applications"][0]["args"]["engine"]["tensor_parallel_size"] = 4
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(model))
    monkeypatch.setattr(generate, "DEPLOYMENTS", tmp_path)
    (group,) = yaml.safe_load(generate.render("wide.yaml"))["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    assert group["numOfHosts"] == 2
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits[GPU_RESOURCE] == 2
    assert 2 * 3 < int(limits["cpu"]) < 4 * 3


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_a_silent_host_is_dead_before_its_requests_are(folder, name):
    """Ray's own values may take a minute, which is half of what a request waits for an engine."""
    env = {
        entry["name"]: entry["value"]
        for entry in cluster_of(folder)["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    }
    check_s = (
        int(env["RAY_health_check_period_ms"]) + int(env["RAY_health_check_timeout_ms"])
    ) / 1000
    patience_s = ServeSettings.model_fields["queue_timeout_s"].default
    assert check_s * int(env["RAY_health_check_failure_threshold"]) <= patience_s / 4


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_pods_outlive_the_drain(folder, name):
    for group in cluster_of(folder)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        env = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
        drain = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        longest = max(model.graceful_shutdown_timeout_s for model in models_of(name))
        assert longest <= drain < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_head_runs_no_replica_and_has_no_gpu(folder, name):
    head = ray_service(folder)["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert GPU_RESOURCE not in json.dumps(head["template"])


@pytest.mark.parametrize(("folder", "name"), SERVICES)
def test_pods_are_unprivileged_with_shared_memory_and_probes(folder, name):
    cluster = ray_service(folder)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["readinessProbe"]
        assert container["livenessProbe"]
        volumes = {v["name"]: v for v in pod["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "8000" not in json.dumps(container["livenessProbe"])


def test_prometheus_scrapes_the_ingress_page():
    config = yaml.safe_load((ROOT / "deployments" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    demo = yaml.safe_load((ROOT / "deployments" / "demo.yaml").read_text())["http_options"]
    (static,) = jobs["dflash"]["static_configs"]
    assert static["targets"] == [f"{demo['host']}:{demo['port']}"]
    assert jobs["ray"]["file_sd_configs"]
