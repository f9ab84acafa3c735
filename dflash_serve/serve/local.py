"""Serve a deployment file on this machine, from nothing to a first answer, until a signal.

    python -m dflash_serve.serve.local --tp 1 --port 8000

Starts a Ray of its own (without the dashboard, whose processes cost about a gigabyte), deploys,
waits until the server is ready, prints how to talk to it, and takes everything down again: on
Ctrl-C or SIGTERM new requests are refused and those under way may finish.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_serve.errors import ConfigError, DFlashError, EngineDeadError
from dflash_serve.serve.settings import ModelSettings, ServeSettings, placement_bundles
from dflash_serve.serve.stopping import drain, stop
from dflash_serve.serve.token import ensure_token

__all__ = ["main", "serve_locally"]

_ROOT = Path(__file__).resolve().parents[2]
_CONFIG = _ROOT / "deployments" / "demo.yaml"
_PREPARE = "deployments.demo.prepare"
_APPLICATION = "dflash"
_OBJECT_STORE_BYTES = 100_000_000  # nothing large goes through Ray's object store
_HOST = "127.0.0.1"
_PORTS_TRIED = 100


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What to start: the file's settings after the command line's changes.

    Attributes:
        settings: of the application with the ingress.
        applications: of the models that are applications of their own, by application name.
    """

    settings: ServeSettings
    applications: dict[str, ModelSettings]
    http: dict[str, Any]
    controller: dict[str, Any] | None

    @property
    def models(self) -> list[ModelSettings]:
        """Every model there will be replicas of."""
        return [*self.settings.hosted, *self.applications.values()]


def serve_locally(config: Path, *, tp: int | None, port: int | None) -> None:
    """Serve a deployment file until interrupted.

    Args:
        config: the deployment file.
        tp: tensor-parallel size in place of the file's.
        port: HTTP port in place of the file's; the next free one when it is taken.

    Raises:
        ConfigError: the file cannot be served.
        EngineDeadError: the application did not start; the text says why.
    """
    config = config.resolve()
    if config == _CONFIG:
        os.chdir(_ROOT)  # the demo file's relative paths start there
    _set_environment()
    plan = _plan(config, tp, port)
    for model in plan.models:
        _prepare_target(model, config)
    started = time.monotonic()
    try:
        _start_ray(plan)
        _deploy(plan)
        _wait_until_running(started)
        _introduce(plan, time.monotonic() - started)
        _say("press Ctrl-C to stop")
        try:
            threading.Event().wait()
        finally:
            _finish_requests(plan.settings.graceful_shutdown_timeout_s)
    finally:
        _ignore_signals()
        _say("stopping")
        stop()
        _say("stopped")


# -- the plan --------------------------------------------------------------------------------


def _plan(config: Path, tp: int | None, port: int | None) -> _Plan:
    from dflash_serve.serve.validate import load_config, validate_config

    report = validate_config(config)
    report.require_valid()
    if len(report.applications) != 1:
        raise ConfigError(
            f"{config} holds {len(report.applications)} dflash-serve applications; "
            "allowed here: one. Use `serve deploy` for more"
        )
    (settings,) = report.applications.values()
    if tp is not None:
        settings = _with_tp(settings, tp)
    raw = load_config(config)
    http = dict(raw.get("http_options") or {})
    wanted = port or int(http.get("port", 8000))
    http["port"] = free_port(http.setdefault("host", _HOST), wanted)
    if http["port"] != wanted:
        _say(f"port {wanted} is taken; using {http['port']}")
    return _Plan(settings, report.models, http, raw.get("controller_options"))


def _with_tp(settings: ServeSettings, tp: int) -> ServeSettings:
    """The settings with another tensor-parallel size of their one model.

    Raises:
        ConfigError: there are several models, or the engine refuses the size.
    """
    if len(settings.models) != 1 or not settings.hosted:
        names = ", ".join(entry.model for entry in settings.models)
        raise ConfigError(
            f"--tp {tp} for {names}; allowed: one model in one application. Set "
            "tensor_parallel_size in the file instead"
        )
    (model,) = settings.hosted
    engine = dataclasses.replace(model.engine, tensor_parallel_size=tp)
    return settings.model_copy(update={"models": (model.model_copy(update={"engine": engine}),)})


def free_port(host: str, wanted: int) -> int:
    """`wanted`, or the next port above it that nobody listens on.

    Raises:
        ConfigError: none of the next hundred is free.
    """
    for port in range(wanted, min(wanted + _PORTS_TRIED, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"ports {wanted} to {wanted + _PORTS_TRIED - 1} on {host} are taken; give --port"
    )


def _prepare_target(settings: ModelSettings, config: Path) -> None:
    """Make the demo target on the first run; every other target must be there."""
    target = Path(settings.engine.target)
    if (target / "config.json").is_file():
        return
    if config.resolve() != _CONFIG:
        raise ConfigError(f"target {target} holds no config.json; give the folder of a checkpoint")
    _say(f"preparing the demo model in {target} (once)")
    command = [sys.executable, "-m", _PREPARE, "--output", str(target)]
    done = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"the demo target could not be prepared: {last}; run `make demo`")


# -- start -----------------------------------------------------------------------------------


def _set_environment() -> None:
    """What Ray reads from the environment, once, when it is imported."""
    if "ray" in sys.modules:
        return  # too late: its native part keeps what it found, and a change would split the two
    # A token in the user's home is that of every Ray of this user, so `serve status` and the
    # like of the same user can talk to this one.
    os.environ["RAY_AUTH_MODE"] = "token"
    ensure_token()
    # Ray's own switch, made for desktop systems: the loopback address is the node's, and neither
    # GCS nor raylets nor agents listen on any other.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _start_ray(plan: _Plan) -> None:
    import ray

    _say("starting Ray")
    ray.init(
        num_cpus=_logical_cpus(plan),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="WARNING",
    )
    _raise_on_signals()  # ray.init has put handlers of its own


def _logical_cpus(plan: _Plan) -> int:
    """Ray's CPU count is bookkeeping: ranks share the cores there are, however few."""
    replicas = sum(
        model.replica_range[1] * bundle["CPU"]
        for model in plan.models
        for bundle in placement_bundles(model, gpu=False)
    )
    ingresses = plan.settings.ingress_replicas * plan.settings.ingress_cpus
    return max(os.cpu_count() or 1, math.ceil(replicas + ingresses))


def _deploy(plan: _Plan) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from dflash_serve.serve.app import build_app, build_model

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(
        proxy_location="HeadOnly",
        http_options=plan.http,
        controller_options=plan.controller,
        logging_config=quiet,
    )
    targets = [
        serve.RunTarget(build_model(model), name, route_prefix=None, logging_config=quiet)
        for name, model in plan.applications.items()
    ]
    targets.append(
        serve.RunTarget(build_app(plan.settings), _APPLICATION, "/", logging_config=quiet)
    )
    serve.run_many(
        targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def _wait_until_running(started: float) -> None:
    from ray import serve

    with _progress("loading", started) as show:
        while True:
            found = serve.status().applications.values()
            if found and all(application.status == "RUNNING" for application in found):
                return
            for application in found:
                if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                    deployments = application.deployments.values()
                    texts = [reason(d.message) for d in deployments if d.message]
                    raise EngineDeadError(
                        "\n".join(texts) or application.message or application.status
                    )
            show(", ".join(_states(found)))
            time.sleep(0.25)


def _states(applications: Iterable[Any]) -> Iterator[str]:
    for application in applications:
        for name, deployment in application.deployments.items():
            yield f"{name} {deployment.status.value}"


def reason(message: str) -> str:
    """The last error of a traceback that Serve put into a status message."""
    lines = message.rstrip().splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return "\n".join(lines[starts[-1] :]) if starts else message


# -- what the user sees ----------------------------------------------------------------------


def _introduce(plan: _Plan, seconds: float) -> None:
    from dflash_serve.serve.sample import ask, curl_line

    url = f"http://{plan.http['host']}:{plan.http['port']}"
    served = (f"{m.model} (tp {m.engine.tensor_parallel_size})" for m in plan.models)
    verb = "is" if len(plan.models) == 1 else "are"
    _say(f"{', '.join(served)} {verb} ready after {seconds:.0f} s: {url}/v1")
    first = plan.settings.models[0].model
    print(f"\n{curl_line(url, first)}\n", flush=True)
    try:
        answer = ask(url, first)
    except OSError as error:
        # The server stays up: a model without a chat template still serves completions.
        detail = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
        _say(f"no sample answer: {detail}")
        return
    print(f"user       {answer.question}\nassistant  {answer.text}\n", flush=True)
    _say(answer.figures())


@contextlib.contextmanager
def _progress(what: str, started: float) -> Iterator[Any]:
    """Show what is going on: one line rewritten on a terminal, a line when it changes if not."""
    terminal = sys.stderr.isatty()
    shown = ""

    def show(state: str) -> None:
        nonlocal shown
        if terminal:
            line = f"{what}: {time.monotonic() - started:4.0f} s  {state}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif state != shown:
            _say(f"{what}: {state}")
        shown = state

    try:
        yield show
    finally:
        if terminal and shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)


# -- stop ------------------------------------------------------------------------------------


def _finish_requests(grace_s: float) -> None:
    _say(f"new requests are refused, those under way get {grace_s:g} s; Ctrl-C again ends them")
    ended = drain(_APPLICATION, grace_s)
    if ended:
        _say(f"{ended} requests took longer and ended with an error")


def _raise_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def _ignore_signals() -> None:
    """Stopping takes seconds; a second Ctrl-C must not leave half of it running."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> int:
    """Command line of `make serve`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=_CONFIG, help="deployment file")
    parser.add_argument("--tp", type=int, help="tensor-parallel size in place of the file's")
    parser.add_argument("--port", type=int, help="HTTP port; the next free one if it is taken")
    arguments = parser.parse_args()
    _raise_on_signals()
    try:
        serve_locally(arguments.config.resolve(), tp=arguments.tp, port=arguments.port)
    except KeyboardInterrupt:
        return 0
    except (DFlashError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
