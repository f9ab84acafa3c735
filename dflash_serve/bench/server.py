"""A server of its own for a measurement: `make serve`'s code in a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.config import EngineConfig
from dflash_serve.errors import EngineDeadError

__all__ = ["counter", "deployment", "local_server"]

_DEMO = Path(__file__).resolve().parents[2] / "deployments" / "demo.yaml"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local
_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 60.0
_MODEL = "measured"


def deployment(config: EngineConfig) -> dict[str, Any]:
    """The demo's deployment file with another engine."""
    made: dict[str, Any] = yaml.safe_load(_DEMO.read_text(encoding="utf-8"))
    default = EngineConfig(target=config.target)
    engine = {
        name: getattr(config, name)
        for name in config.__dataclass_fields__
        if name != "executor" and getattr(config, name) != getattr(default, name)
    }
    args = made["applications"][0]["args"]
    args["engine"] = {**engine, "target": config.target}
    args["model"] = _MODEL
    return made


@contextlib.contextmanager
def local_server(
    config: EngineConfig, folder: Path, *, haproxy: bool = False
) -> Iterator[tuple[str, str]]:
    """Start a server and end it; gives its address and the model's name.

    Args:
        config: its engine.
        folder: for the deployment file and the server's log.
        haproxy: HAProxy in place of Serve's Python proxy.

    Raises:
        EngineDeadError: it did not start; the text is the end of its log.
    """
    port = _free_port()
    file, log = folder / f"serve-{port}.yaml", folder / f"serve-{port}.log"
    file.write_text(yaml.safe_dump(deployment(config)), encoding="utf-8")
    environment = os.environ | {"RAY_SERVE_ENABLE_HA_PROXY": str(int(haproxy))}
    command = [sys.executable, "-m", "dflash_serve.serve.local"]
    command += ["--config", str(file), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(process, log)
        yield url, _MODEL
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_STOP_TIMEOUT_S)


def counter(url: str, name: str) -> float:
    """The sum of a metric's series on a server's /metrics page."""
    with _OPENER.open(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.partition("{")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        # The sample request that follows a start is over when this is printed.
        if "Ctrl-C" in log.read_text(errors="replace"):
            return
        time.sleep(0.25)
    raise EngineDeadError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
