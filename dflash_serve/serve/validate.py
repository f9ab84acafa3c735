"""Strict validation of a whole Ray Serve config file.

Serve drops unknown keys silently at the top, application and deployment level, and a misspelt
placement strategy only fails once a replica starts. Both are errors here, with the path to the
key and the nearest known one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml
from ray.serve.schema import ServeDeploySchema

from dflash_serve.errors import ConfigError
from dflash_serve.serve.knobs import SoftKnobs
from dflash_serve.serve.settings import (
    REPLICA,
    ModelSettings,
    ServeSettings,
    describe_unknown_key,
    placement_bundles,
    placement_strategy,
    replica_names,
)

__all__ = ["BUILDER", "MODEL_BUILDER", "ConfigReport", "validate_config"]

BUILDER = "dflash_serve.serve.app:build_app"
"""The import path whose `args` are a `ServeSettings`."""
MODEL_BUILDER = "dflash_serve.serve.app:build_model"
"""The import path whose `args` are a `ModelSettings`."""

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_INGRESS = "Ingress"


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigReport:
    """What a config file holds.

    Attributes:
        path: the file.
        problems: errors, one line each; the file must not be deployed unless this is empty.
        warnings: what may be right on another machine (a folder that is not on this one).
        applications: typed settings by application name, for those that validate.
        models: the same of the applications that are one model's replicas.
    """

    path: Path
    problems: list[str]
    warnings: list[str]
    applications: dict[str, ServeSettings]
    models: dict[str, ModelSettings]

    def require_valid(self) -> None:
        """Raise when there is a problem.

        Raises:
            ConfigError: every problem, one a line.
        """
        if self.problems:
            raise ConfigError(f"{self.path} cannot be served:\n" + "\n".join(self.problems))


def validate_config(path: str | Path) -> ConfigReport:
    """Check a Serve config file without starting anything.

    Raises:
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    path = Path(path)
    config = load_config(path)
    report = ConfigReport(path, [], [], {}, {})
    report.problems.extend(_unknown_keys(config, ServeDeploySchema, "the top level"))
    if not report.problems:
        report.problems.extend(_schema_errors(config))
    for number, application in enumerate(_applications(config)):
        _check_application(application, f"applications[{number}]", report)
    report.problems.extend(_reference_problems(config, report))
    return report


def load_config(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: no such file, no YAML, or no mapping.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; a Serve config is a mapping")
    return config


def _applications(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = config.get("applications")
    return [a for a in found if isinstance(a, dict)] if isinstance(found, list) else []


def _schema_errors(config: Mapping[str, Any]) -> Iterator[str]:
    try:
        ServeDeploySchema.model_validate(config)
    except pydantic.ValidationError as error:
        yield from _lines(error, "")


def _check_application(application: Mapping[str, Any], where: str, report: ConfigReport) -> None:
    for deployment in application.get("deployments") or ():
        report.problems.extend(_strategy_problems(deployment, where))
    name = str(application.get("name", "default"))
    args = application.get("args") or {}
    replicas: Mapping[str, ModelSettings]
    known: tuple[str, ...]
    try:
        if application.get("import_path") == BUILDER:
            settings = report.applications[name] = ServeSettings.model_validate(args)
            deployments = replica_names(settings)
            replicas = {deployments[model.model]: model for model in settings.hosted}
            known = (_INGRESS, *replicas)
        elif application.get("import_path") == MODEL_BUILDER:
            report.models[name] = ModelSettings.model_validate(args)
            replicas, known = {REPLICA: report.models[name]}, (REPLICA,)
        else:
            return  # another application in the same file; its args are its own
    except pydantic.ValidationError as error:
        report.problems.extend(_lines(error, f"{where}.args"))
        return
    except ConfigError as error:
        report.problems.append(f"{where}.args: {error}")
        return
    report.problems.extend(_override_problems(application, replicas, known, where))
    for model in replicas.values():
        report.warnings.extend(_missing_folders(model, where))


def _reference_problems(config: Mapping[str, Any], report: ConfigReport) -> Iterator[str]:
    """Models that an ingress looks for in applications that are not there, or are others."""
    for name, settings in report.applications.items():
        for wanted in settings.referenced:
            found = report.models.get(wanted.application)
            where = f"application {name}: model {wanted.model!r}"
            if found is None:
                yield (
                    f"{where} is to be served by application {wanted.application!r}; "
                    f"applications here that {MODEL_BUILDER} builds: "
                    f"{', '.join(report.models) or 'none'}"
                )
            elif found.model != wanted.model:
                yield f"{where}, but application {wanted.application!r} serves {found.model!r}"
            elif found.may_sleep != wanted.may_sleep:
                yield (
                    f"{where}: may_sleep is {wanted.may_sleep}, but application "
                    f"{wanted.application!r} keeps at least {found.replica_range[0]} replicas"
                )
    for application in _applications(config):
        prefix = application.get("route_prefix", "/")
        if application.get("import_path") == MODEL_BUILDER and prefix is not None:
            yield (
                f"application {application.get('name', 'default')}: route_prefix is {prefix!r}; "
                "allowed: null, since an ingress in another application takes the requests"
            )


def _strategy_problems(deployment: Mapping[str, Any], where: str) -> Iterator[str]:
    strategy = deployment.get("placement_group_strategy")
    if strategy is not None and strategy not in _STRATEGIES:
        yield (
            f"{where}.deployments[{deployment.get('name')}].placement_group_strategy is "
            f"{strategy!r}; allowed: {', '.join(_STRATEGIES)}"
        )


def _override_problems(
    application: Mapping[str, Any],
    replicas: Mapping[str, ModelSettings],
    known: tuple[str, ...],
    where: str,
) -> Iterator[str]:
    """Overrides that would contradict what the builder computes."""
    for deployment in application.get("deployments") or ():
        name = str(deployment.get("name"))
        if name not in known:
            yield f"{where}: " + describe_unknown_key(name, known, "deployments")
        if name not in replicas:
            continue
        model = replicas[name]
        try:
            SoftKnobs.parse(deployment.get("user_config"))
        except ConfigError as error:
            yield f"{where}.deployments[{name}].{error}"
        strategy = deployment.get("placement_group_strategy")
        wanted = placement_strategy(model.hosts)
        if strategy in _STRATEGIES and strategy != wanted:
            yield (
                f"{where}.deployments[{name}].placement_group_strategy is {strategy!r}, and hosts "
                f"is {model.hosts}: use {wanted} or leave it out"
            )
        need = placement_bundles(model, gpu=model.engine.device == "cuda")
        bundles = deployment.get("placement_group_bundles")
        if bundles is not None and len(bundles) != len(need):
            yield (
                f"{where}.deployments[{name}] has {len(bundles)} placement_group_bundles, but "
                f"tensor_parallel_size {model.engine.tensor_parallel_size} on {model.hosts} hosts "
                f"needs {len(need)}; leave them out"
            )


def _missing_folders(settings: ModelSettings, where: str) -> Iterator[str]:
    for key in ("target", "draft"):
        folder = getattr(settings.engine, key)
        if folder is not None and not Path(folder).is_dir():
            yield f"{where}.args.engine.{key}: {folder} is not a folder on this machine"


# -- unknown keys ----------------------------------------------------------------------------


def _unknown_keys(value: Any, annotation: Any, where: str) -> Iterator[str]:
    """Keys of a YAML value that the schema's models have no field for, at any depth."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            for inner in _item_types(annotation):
                yield from _unknown_keys(item, inner, f"{where}[{number}]")
        return
    model = _model_of(annotation)
    if model is None or not isinstance(value, dict):
        return
    fields = _fields(model)
    for key, item in value.items():
        if key not in fields:
            yield describe_unknown_key(str(key), fields, where)
        else:
            inner_where = key if where == "the top level" else f"{where}.{key}"
            yield from _unknown_keys(item, fields[key], inner_where)


def _fields(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    names = {field.alias or name: field for name, field in model.model_fields.items()}
    return {name: field.annotation for name, field in names.items()}


def _model_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model inside an annotation, if a mapping given for it is read as that model."""
    options = typing.get_args(annotation) or (annotation,)
    if typing.get_origin(annotation) in (list, dict):
        return None
    for option in options:
        if isinstance(option, type) and issubclass(option, pydantic.BaseModel):
            return option
    return None


def _item_types(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is list:
        yield from typing.get_args(annotation)
        return
    for option in typing.get_args(annotation):
        yield from _item_types(option)


def _lines(error: pydantic.ValidationError, where: str) -> Iterator[str]:
    for detail in error.errors():
        path = ".".join((*filter(None, (where,)), *_place(detail["loc"])))
        yield f"{path}: {detail['msg'].removeprefix('Value error, ')}"


def _place(location: tuple[str | int, ...]) -> Iterator[str]:
    """The path as the file writes it: without the kind of an entry of `models`."""
    if location[:1] == ("models",) and len(location) > 2:
        yield f"models[{location[1]}]"
        location = location[3:]
    yield from map(str, location)
