"""What every shipped deployment and the whole package must have, or must not."""

import ast
import json
import re
from pathlib import Path

import pytest

import dflash_serve

from .test_manifests import K8S, ROOT, SERVICES, build, cluster_of

PACKAGE = Path(dflash_serve.__file__).parent
SOURCES = [
    path for folder in (PACKAGE, ROOT / "deployments", K8S) for path in sorted(folder.rglob("*.py"))
]
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
FOLDERS = [folder for folder, _ in SERVICES]
SECRET = re.compile(r"(?i)(password|secret|api_?key|token)\s*[:=]\s*[\"']?[A-Za-z0-9+/_-]{8,}")
"""A value where a name of one should be."""

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "subprocess.getoutput"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_ray_service_asks_for_a_token(folder):
    assert cluster_of(folder)["authOptions"] == {"mode": "token"}
    text = json.dumps(cluster_of(folder))
    assert "RAY_AUTH_MODE" not in text, "it would stand against the operator's own"
    assert "RAY_AUTH_TOKEN" not in text, "the operator mounts its Secret"


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_deployment_file_says_how_to_start_a_ray_with_a_token(path):
    comments = "\n".join(x for x in path.read_text().splitlines() if x.startswith("#"))
    assert "ray start" in comments
    assert "RAY_AUTH_MODE=token" in comments


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_no_deployment_file_turns_authentication_off_or_holds_a_secret(path):
    text = path.read_text()
    assert "disabled" not in text
    assert not SECRET.search(text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_manifest_holds_a_secret(folder):
    for manifest in build(K8S / folder):
        assert manifest["kind"] != "Secret"
        assert not SECRET.search(json.dumps(manifest))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_network_policy_covers_every_pod(folder):
    policies = [o["spec"] for o in build(K8S / folder) if o["kind"] == "NetworkPolicy"]
    (policy,) = [p for p in policies if p["policyTypes"] == ["Ingress", "Egress"]]
    wanted = policy["podSelector"]["matchLabels"]
    cluster = cluster_of(folder)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert wanted.items() <= group["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("port", [6379, 8265, 10001, 52365])
def test_only_ray_and_its_operator_reach_gcs_dashboard_and_agents(port):
    policies = [o["spec"] for o in build(K8S / "base") if o["kind"] == "NetworkPolicy"]
    for policy in policies:
        own = policy["podSelector"]["matchLabels"]
        for rule in policy.get("ingress", ()):
            assert rule.get("from"), "a rule for everybody"
            open_to = {p["port"] for p in rule.get("ports", ())}
            if open_to and port not in open_to:
                continue
            labels = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
            assert labels in ([own], [{"app.kubernetes.io/component": "kuberay-operator"}])


def test_prometheus_reaches_what_the_pod_monitor_scrapes():
    (monitor,) = build(K8S / "monitoring")
    wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    cluster = cluster_of("base")
    (group,) = cluster["workerGroupSpecs"]
    ports = group["template"]["spec"]["containers"][0]["ports"]
    numbers = {port["containerPort"] for port in ports if port["name"] in wanted}
    assert len(numbers) == len(wanted)
    policies = [o["spec"] for o in build(K8S / "base") if o["kind"] == "NetworkPolicy"]
    monitoring = [
        {port["port"] for port in rule["ports"]}
        for policy in policies
        for rule in policy.get("ingress", ())
        if "monitoring" in json.dumps(rule["from"])
    ]
    assert any(numbers <= found for found in monitoring)


# -- the package ------------------------------------------------------------------------------


def name_of(node):
    """A dotted name, or an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = name_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def offences(source):
    """What could run code from data, or a shell, in a module's text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules += [node.module or ""]
            for module in modules:
                if module.partition(".")[0] in FORBIDDEN_MODULES or module.endswith("cloudpickle"):
                    yield node.lineno, f"imports {module}"
        elif isinstance(node, ast.Call):
            called = name_of(node.func)
            if called in FORBIDDEN_CALLS:
                yield node.lineno, f"calls {called}"
            for keyword in node.keywords:
                value = keyword.value
                safe = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not safe:
                    yield node.lineno, f"passes {keyword.arg}"
                if keyword.arg == "weights_only" and safe:
                    yield node.lineno, "passes weights_only=False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_runs_code_from_data_or_a_shell(path):
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from ray import cloudpickle",
        "from ray.cloudpickle import loads",
        "torch.load(path)",
        "eval(text)",
        "os.system(line)",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=given)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_each_of_them(source):
    assert list(offences(source))


def test_yaml_is_only_loaded_safely():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_of(node.func).startswith("yaml.load"):
                raise AssertionError(f"{path}:{node.lineno} calls {name_of(node.func)}")
