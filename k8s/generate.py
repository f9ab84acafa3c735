"""Write the RayService manifests from the deployment files.

    python -m k8s.generate            writes k8s/base and k8s/overlays
    python -m k8s.generate --check    fails when a file on disk differs

The Serve config goes in word for word, so what runs on Kubernetes is the file that
`serve deploy` takes; groups of pods and their sizes follow from its settings.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.serve.settings import ModelSettings, placement_bundles
from dflash_serve.serve.validate import ConfigReport, validate_config

ROOT = Path(__file__).resolve().parent
DEPLOYMENTS = ROOT.parent / "deployments"
RAY_VERSION = "2.60.0"
BASE = ("qwen3-8b-tp1.yaml", "base/rayservice.yaml")
OVERLAYS = (
    ("qwen3-8b-tp4.yaml", "overlays/tp4/rayservice.patch.yaml"),
    ("qwen3-8b-autoscaling.yaml", "overlays/autoscaling/rayservice.patch.yaml"),
    ("qwen3-two-models.yaml", "overlays/two-models/rayservice.patch.yaml"),
)

SPARE_CPUS = 2
"""For Ray's own processes, NCCL's helper threads, and a second ingress during a change."""
MEMORY_GI_PER_GPU = 32
SHM_GI_PER_GPU = 4
GRACE_OVER_DRAIN_S = 60


def read(name: str) -> tuple[str, ConfigReport]:
    """Text and settings of a deployment file; a file with mistakes is an error."""
    path = DEPLOYMENTS / name
    report = validate_config(path)
    report.require_valid()
    return path.read_text(), report


def models_of(report: ConfigReport) -> list[ModelSettings]:
    """Every model of a file, wherever its replicas are."""
    (settings,) = report.applications.values()
    return [*settings.hosted, *report.models.values()]


def pods(report: ConfigReport) -> list[tuple[int, int, int]]:
    """First, fewest and most replicas of each model, each with a pod for each of its hosts."""
    ranges = []
    for model in models_of(report):
        least, most = model.replica_range
        first = model.replicas if model.autoscaling is None else model.autoscaling.first_replicas
        ranges.append((first, least, most))
    if not any(least for _, least, _ in ranges):
        # The ingress runs on these pods, so one stays when all models sleep.
        first, _, most = ranges[0]
        ranges[0] = (max(first, 1), 1, most)
    return ranges


def drain_s(report: ConfigReport) -> int:
    """Seconds a pod's replicas may need to finish what they have begun."""
    (settings,) = report.applications.values()
    every = [settings, *models_of(report)]
    return math.ceil(max(s.graceful_shutdown_timeout_s for s in every))


def groups(report: ConfigReport) -> str:
    """The worker groups: one for each model, a pod for each host of its replicas."""
    (settings,) = report.applications.values()
    ingress = settings.ingress_cpus * settings.ingress_replicas
    template = (ROOT / "workergroup.template.yaml").read_text().partition("\n")[2]
    models = models_of(report)
    texts = []
    for model, (first, least, most) in zip(models, pods(report), strict=True):
        gpus = model.engine.tensor_parallel_size // model.hosts
        bundles = [bundle["CPU"] for bundle in placement_bundles(model, gpu=True)]
        of_pod = sum(bundles) if model.hosts == 1 else max(bundles)
        name = re.sub(r"[^a-z0-9]+", "-", model.model.lower()).strip("-")
        values = {
            "GROUP": "gpu" if len(models) == 1 else name,
            "REPLICAS": first,
            "MIN": least,
            "MAX": most,
            "HOSTS": model.hosts,
            "GPUS": gpus,
            "CPUS": math.ceil(of_pod + ingress) + SPARE_CPUS,
            "MEMORY_GI": MEMORY_GI_PER_GPU * gpus,
            "SHM_GI": SHM_GI_PER_GPU * gpus,
            "GRACE_S": drain_s(report) + GRACE_OVER_DRAIN_S,
        }
        texts.append(fill(template, values).rstrip())
    return "\n".join(texts)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """A template with its @NAMES@ replaced."""
    for key, value in values.items():
        template = template.replace(f"@{key}@", str(value))
    return template


def render(name: str) -> str:
    """The RayService of a deployment file."""
    config, report = read(name)
    values = {
        "RAY_VERSION": RAY_VERSION,
        "AUTOSCALING": str(any(least != most for _, least, most in pods(report))).lower(),
        "DRAIN_S": drain_s(report),
        "WORKER_GROUPS": groups(report),
        "SERVE_CONFIG": textwrap.indent(config.rstrip(), "    "),
    }
    text = fill((ROOT / "rayservice.template.yaml").read_text(), values)
    return _generated_from(name) + text.partition("\n")[2]


def render_patch(name: str) -> str:
    """A JSON patch that turns the base's RayService into the one of another deployment file."""
    base, other = (yaml.safe_load(render(n)) for n in (BASE[0], name))
    patch = list(_differences(base, other, ""))
    return _generated_from(name) + yaml.dump(patch, Dumper=_Readable, sort_keys=False)


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def outputs() -> dict[Path, str]:
    """Every generated file and its text."""
    files = {ROOT / BASE[1]: render(BASE[0])}
    files.update({ROOT / target: render_patch(name) for name, target in OVERLAYS})
    return files


def _generated_from(name: str) -> str:
    return f"# Generated by k8s/generate.py from deployments/{name}; edit that, or the template.\n"


def _differences(base: Any, other: Any, path: str) -> Any:
    if isinstance(base, dict) and isinstance(other, dict) and base.keys() == other.keys():
        for key in base:
            yield from _differences(base[key], other[key], f"{path}/{_escape(key)}")
    elif isinstance(base, list) and isinstance(other, list) and len(base) == len(other):
        for number, (one, two) in enumerate(zip(base, other, strict=True)):
            yield from _differences(one, two, f"{path}/{number}")
    elif base != other:
        yield {"op": "replace", "path": path, "value": other}


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def main() -> int:
    """Write or check the generated files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 on a difference")
    only_check = parser.parse_args().check
    stale = [p for p, text in outputs().items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{'differs' if only_check else 'wrote'} {path.relative_to(ROOT.parent)}")
        if not only_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(outputs()[path])
    return 1 if stale and only_check else 0


if __name__ == "__main__":
    sys.exit(main())
