"""A Redis for the head's state, its restarts, and the end and return of the head's GCS.

Ray keeps the GCS's tables in Redis when RAY_REDIS_ADDRESS names one. A GCS that was killed is not
started again by Ray itself: on a cluster the head's supervisor does that, here `return_gcs`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_serve.serve.local import free_port

__all__ = [
    "find_redis",
    "gcs_mib",
    "gcs_pid",
    "kill_gcs",
    "redis_server",
    "restart_redis",
    "return_gcs",
]

_SERVER = "redis-server"
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0


def find_redis() -> str:
    """Path of the redis-server program.

    Raises:
        FileNotFoundError: there is none; says how to get it.
    """
    found = shutil.which(_SERVER)
    if found is None:
        raise FileNotFoundError(
            f"no {_SERVER} on PATH: the GCS faults keep the head's state in one; install it "
            "(Debian, Ubuntu: apt-get install redis-server) or choose other faults with --faults"
        )
    return found


class _Redis:
    """A server that writes every change to a folder, and finds it there when it starts again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port("127.0.0.1", 29_000 + os.getpid() % 3_000)
        self._command = [find_redis(), "--bind", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--dir", str(folder), "--appendonly", "yes", "--save", ""]
        self._command += ["--appendfsync", "everysec"]
        self._log = (folder / "redis.log").open("ab")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        _await_port(self.port, self._process)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_STOP_TIMEOUT_S)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_STOP_TIMEOUT_S)
        self._log.close()


_current: list[_Redis] = []
"""The one that runs; Ray's variable knows of one, too."""


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis that writes every change to `folder`, and have Ray use it; gives its address.

    Raises:
        FileNotFoundError: redis-server is not installed.
        TimeoutError: it did not start.
    """
    redis = _Redis(folder)
    _current.append(redis)
    address = f"127.0.0.1:{redis.port}"
    os.environ["RAY_REDIS_ADDRESS"] = address
    try:
        yield address
    finally:
        del os.environ["RAY_REDIS_ADDRESS"]
        _current.remove(redis)
        redis.close()


def restart_redis(away_s: float) -> None:
    """Kill the Redis (SIGKILL) and start it again on what it had written."""
    (redis,) = _current
    redis.kill()
    time.sleep(away_s)
    redis.start()


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"redis-server did not listen on port {port}; exit code {process.poll()}")


def _node():  # type: ignore[no-untyped-def]
    # Ray has no public way to start a GCS alone; its own fault tolerance tests use this object.
    from ray._private import worker

    return worker._global_node


def gcs_pid() -> int:
    """Process of the head's GCS."""
    (process,) = _node().all_processes["gcs_server"]
    pid: int = process.process.pid
    return pid


def gcs_mib() -> int:
    """Memory of the head's GCS, MiB."""
    status = Path(f"/proc/{gcs_pid()}/status").read_text()
    (resident,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(resident.split()[1]) >> 10


def kill_gcs() -> int:
    """Kill the GCS as a crash would (SIGKILL); returns the process that was."""
    pid = gcs_pid()
    os.kill(pid, signal.SIGKILL)
    return pid


def return_gcs() -> None:
    """Start a GCS on the same port, and wait until it answers with what Redis has kept."""
    import ray

    node = _node()
    node.kill_gcs_server(check_alive=False)  # forgets the dead one
    node.start_gcs_server()
    if not any(entry["Alive"] for entry in ray.nodes()):
        raise RuntimeError("the GCS came back without the node it had: Redis kept nothing")
