"""The deployment under test: its start, its processes, its state, and its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import yaml

from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.serve.local import free_port
from dflash_serve.serve.processes import descendants, is_running
from dflash_serve.serve.stopping import stop
from tests.tiny import TinyPair

from .rank import prepare_orders

__all__ = ["HANG_TIMEOUT_S", "MODEL", "TP", "Cluster", "Process", "tiny_engine", "until"]

APPLICATION = "dflash"
MODEL = "tiny"
TP = 2
HANG_TIMEOUT_S = 3.0
_LOGICAL_CPUS = 16
_OBJECT_STORE_BYTES = 100_000_000
_START_TIMEOUT_S = 240.0
_APPLY_TIMEOUT_S = 60.0
_CHUNKS = (512, 256)
"""Values of the setting that a rollout changes; tokens."""
_STATUS_TIMEOUT_S = 10.0
_TITLES = {
    "rank": "ray::RankActor",
    "replica": f"ray::ServeReplica:{APPLICATION}:Replica",
    "ingress": f"ray::ServeReplica:{APPLICATION}:Ingress",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}
"""How Ray names the processes of each kind."""
_SHIPPED = Path(__file__).resolve().parents[2] / "deployments" / "demo.yaml"
"""Where the controller's options come from: what is tried here is what is shipped."""

T = TypeVar("T")


class Process(NamedTuple):
    """A process of the deployment."""

    pid: int
    kind: str


def until(condition: Callable[[], T], what: str, timeout_s: float, poll_s: float = 0.05) -> T:
    """The first true value of `condition`.

    Raises:
        TimeoutError: it stayed false.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(poll_s)
    return value


def tiny_engine(pair: TinyPair, tp: int) -> dict[str, Any]:
    """Engine settings of a tiny pair, a thread a rank, in which ids are exact."""
    return {
        "target": pair.target,
        "draft": pair.draft,
        "tensor_parallel_size": tp,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 512,
    }


class Cluster:
    """A Ray of its own with one deployment of a tiny pair; a context manager.

    Args:
        pair: with a tokenizer beside the target.
        folder: for orders to the ranks; TMPDIR should be in it or be it.
    """

    def __init__(self, pair: TinyPair, folder: Path) -> None:
        self._pair = pair
        self._folder = folder
        self._backend: Any = None
        self._loop = asyncio.new_event_loop()
        self._chunk = _CHUNKS[0]
        self._options: dict[str, Any] = {}
        self._first = self.replicas = 0
        self.url = ""

    def __enter__(self) -> Cluster:
        import ray
        from ray import serve

        prepare_orders(self._folder / "orders")
        threading.Thread(target=self._loop.run_forever, name="asks", daemon=True).start()
        ray.init(
            num_cpus=_LOGICAL_CPUS,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
        )
        port = free_port("127.0.0.1", 18_000 + os.getpid() % 10_000)
        self._options = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "logging_config": {"log_level": "ERROR", "enable_access_log": False},
            "controller_options": yaml.safe_load(_SHIPPED.read_text())["controller_options"],
        }
        serve.start(**self._options)
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_error: object) -> None:
        stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # -- deploy -----------------------------------------------------------------------------

    def deploy(self, replicas: int) -> None:
        """Put this many replicas behind one ingress; those of another number go first."""
        from ray import serve

        from dflash_serve.serve.ingress import HandleBackend
        from dflash_serve.serve.journal import ResumeLimits

        if self.replicas:
            serve.delete(APPLICATION)
        self._first = self.replicas = replicas
        self._apply()
        until(self._deployed, "the application runs", _START_TIMEOUT_S)
        handle = serve.get_deployment_handle("Replica", APPLICATION)
        limits = ResumeLimits(attempts=1, wait_s=1.0, total_s=1.0)
        self._backend = HandleBackend({MODEL: handle}, limits)
        until(lambda: self.missing() is None, "the deployment runs", _START_TIMEOUT_S)

    def change(self) -> None:
        """Give ingress and replicas a new version, as a changed engine setting does; no waiting."""
        self._chunk = _CHUNKS[self._chunk == _CHUNKS[0]]
        self._apply()

    def scale(self, replicas: int) -> None:
        """Change the number of replicas and nothing else; no waiting."""
        self.replicas = replicas
        self._apply()

    def _apply(self) -> None:
        """Hand a deployment file to Serve's own command line, as an operator does."""
        import ray

        path = self._folder / "deployment.yaml"
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": "tests.chaos.app:build",
            "args": self._arguments(),
            # Not in `args`, where it would be a new version of everything.
            "deployments": [{"name": "Replica", "num_replicas": self.replicas}],
        }
        path.write_text(yaml.safe_dump(self._options | {"applications": [application]}))
        command = [str(Path(sys.executable).with_name("serve")), "run", "--non-blocking", str(path)]
        address = ray.get_runtime_context().gcs_address
        done = subprocess.run(
            command,
            env=os.environ | {"RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=_APPLY_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"serve run refused {path}: {done.stdout}{done.stderr}")

    @staticmethod
    def _deployed() -> bool:
        from ray import serve

        application = serve.status().applications.get(APPLICATION)
        return application is not None and application.status == "RUNNING"

    def _arguments(self) -> dict[str, Any]:
        engine = tiny_engine(self._pair, TP) | {
            "prefill_chunk": self._chunk,
            "hang_timeout_s": HANG_TIMEOUT_S,
            "start_timeout_s": 120.0,
            "record_dir": str(self._folder / "records"),
        }
        return {
            "model": MODEL,
            "engine": engine,
            "replicas": self._first,
            "rank_cpus": 0.5,
            "graceful_shutdown_timeout_s": 60.0,
            "resume_attempts": 10,
        }

    # -- look -------------------------------------------------------------------------------

    def statuses(self) -> list[ReplicaStatus]:
        """What the replicas that can be reached say; asked past ingress and proxy."""
        found: list[ReplicaStatus] = self._ask(self._backend.status())
        return found

    def busiest(self) -> ReplicaStatus:
        """The replica with most requests."""
        return max(self.statuses(), key=lambda s: s.outstanding)

    def processes(self, *kinds: str) -> list[Process]:
        """Living processes of these kinds, among those started from here."""
        found = []
        for pid in descendants(os.getpid()):
            title = _title(pid)
            for kind in kinds:
                if title.startswith(_TITLES[kind]) and is_running(pid):
                    found.append(Process(pid, kind))
        return sorted(found)

    def one(self, kind: str) -> int:
        """The process there is one of."""
        (process,) = until(lambda: self.processes(kind), f"a process: {kind}", 30.0)
        return process.pid

    def missing(self) -> str | None:
        """What the deployment lacks to be whole, or None."""
        for kind in ("controller", "proxy", "ingress"):
            if len(self.processes(kind)) != 1:
                return f"{len(self.processes(kind))} processes: {kind}"
        try:
            statuses = self.statuses()
            state = httpx.get(f"{self.url}/ready", timeout=5.0, trust_env=False).status_code
        except (httpx.HTTPError, TimeoutError) as error:
            return f"no answer: {type(error).__name__}"
        serving = [s for s in statuses if s.state == "serving"]
        if len(serving) != self.replicas or len(statuses) != self.replicas:
            return f"{len(serving)} of {self.replicas} replicas serve"
        ranks = [rank["pid"] for s in statuses for rank in s.config["ranks"]]
        if not all(is_running(pid) for pid in ranks):
            return "a rank is dead"
        return None if state == 200 else f"/ready answers {state}"

    def resumed(self) -> int:
        """How often the ingress has seen a request go on after its engine had failed."""
        page = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False).text
        lines = [x for x in page.splitlines() if x.startswith("dflash_requests_resumed_total{")]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(_STATUS_TIMEOUT_S)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
