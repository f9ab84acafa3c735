"""A Ray over several hosts with one replica, on one of them or spread over two."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.serve.processes import await_exit, descendants, kill
from dflash_serve.serve.settings import ServeSettings
from tests.chaos.cluster import MODEL, tiny_engine, until
from tests.tiny import TinyPair

from .hosts import HEAD_ADDRESS, Hosts

__all__ = ["QUEUE_TIMEOUT_S", "HostCluster"]

QUEUE_TIMEOUT_S = 60.0
_RAY_PORT = 6379
_HTTP_PORT = 8000
_CPUS = {"head": 1, "host": 4}
"""Logical; a rank takes one and the replica half of one: what two ranks need fits on a host and
not on the head, and two replicas do not fit on one host."""
_ENGINE = ("ray::RankActor", "ray::ServeReplica:dflash:Replica")
_INGRESS = ("ray::ServeReplica:dflash:Ingress",)
_HANG_TIMEOUT_S = 3.0
_START_TIMEOUT_S = 240.0
_STATUS_TIMEOUT_S = 10.0


class HostCluster:
    """Ray's head in this process's namespace, one node on each host; a context manager.

    Args:
        pair: with a tokenizer beside the target.
        folder: for what Ray writes; with a short name.
        width: hosts the replica is spread over, two ranks on each.
    """

    def __init__(self, hosts: Hosts, pair: TinyPair, folder: Path, *, width: int = 1) -> None:
        self._hosts = hosts
        self._pair = pair
        self._folder = folder
        self._width = width
        self._backend: Any = None
        self._loop = asyncio.new_event_loop()
        self.url = f"http://127.0.0.1:{_HTTP_PORT}"

    def __enter__(self) -> HostCluster:
        threading.Thread(target=self._loop.run_forever, name="asks", daemon=True).start()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        import ray

        processes = descendants(os.getpid())
        ray.shutdown()
        kill(processes)
        await_exit(processes, _STATUS_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self) -> None:
        import ray
        from ray import serve

        address = f"{HEAD_ADDRESS}:{_RAY_PORT}"
        head = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false"]
        self._start_node(0, [*head, f"--num-cpus={_CPUS['head']}"])
        until(_listens, "Ray's head", _START_TIMEOUT_S)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": _HTTP_PORT},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )

    def deploy(self) -> None:
        """Put one replica behind an ingress that stands on the head."""
        from ray import serve

        from dflash_serve.serve.app import assemble
        from dflash_serve.serve.ingress import HandleBackend
        from dflash_serve.serve.journal import ResumeLimits

        application = assemble(self._settings())
        with ThreadPoolExecutor() as pool:
            run = pool.submit(serve.run, application, name="dflash", route_prefix="/")
            # The ingress holds the clients' connections. While there is no other host it can
            # only go to the head, which is never cut off.
            until(lambda: self._processes(_INGRESS, 0), "an ingress", _START_TIMEOUT_S)
            for number in self._hosts.numbers:
                self.join(number)
            run.result()
        nodes = len(self._hosts.numbers) + 1
        until(lambda: len(_alive()) == nodes, f"{nodes} nodes", _START_TIMEOUT_S)
        handle = serve.get_deployment_handle("Replica", "dflash")
        limits = ResumeLimits(attempts=1, wait_s=1.0, total_s=1.0)
        self._backend = HandleBackend({MODEL: handle}, limits)
        until(self.homes, "a replica serves", _START_TIMEOUT_S)

    def join(self, number: int) -> None:
        """Start a host's node; one that was cut off for long has ended itself."""
        options = [f"--address={HEAD_ADDRESS}:{_RAY_PORT}", f"--num-cpus={_CPUS['host']}"]
        self._start_node(number, options)

    def _settings(self) -> ServeSettings:
        return ServeSettings(
            model=MODEL,
            engine=tiny_engine(self._pair, 2 * self._width)  # type: ignore[arg-type]
            | {"hang_timeout_s": _HANG_TIMEOUT_S},
            hosts=self._width,
            rank_cpus=1.0,
            ingress_cpus=0.5,
            replica_cpus=0.5,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            graceful_shutdown_timeout_s=5.0,
            resume_attempts=10,
        )

    def homes(self) -> list[int]:
        """The hosts on which the serving replica's ranks run, rank 0's first; none without one."""
        try:
            statuses = self._statuses()
        except TimeoutError:
            return []
        pids = [rank["pid"] for s in statuses if s.state == "serving" for rank in s.config["ranks"]]
        found = [self._hosts.host_of(pid) for pid in pids]
        return list(dict.fromkeys(number for number in found if number is not None))

    def engine_processes(self, number: int) -> set[int]:
        """Processes of replicas and ranks on a host."""
        return self._processes(_ENGINE, number)

    def _processes(self, titles: tuple[str, ...], number: int) -> set[int]:
        found = (pid for pid in descendants(os.getpid()) if _title(pid).startswith(titles))
        return {pid for pid in found if self._hosts.host_of(pid) == number}

    def _statuses(self) -> list[ReplicaStatus]:
        call = self._backend.status()
        found = asyncio.run_coroutine_threadsafe(call, self._loop).result(_STATUS_TIMEOUT_S)
        return list(found)

    def _start_node(self, number: int, options: list[str]) -> None:
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={self._hosts.address(number)}",
            "--object-store-memory=100000000",
            f"--temp-dir={self._folder / f'n{number}'}",
            *options,
        ]
        log = (self._folder / f"node-{number}.log").open("wb")
        subprocess.Popen(self._hosts.inside(number, command), stdout=log, stderr=log)


def _listens() -> bool:
    try:
        with socket.create_connection((HEAD_ADDRESS, _RAY_PORT), timeout=1.0):
            return True
    except OSError:
        return False


def _alive() -> list[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
