"""A Redis for the head's state, and the end and return of the head's GCS.

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

__all__ = ["find_redis", "gcs_pid", "kill_gcs", "redis_server", "return_gcs"]

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


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis that writes every change to `folder`, and have Ray use it; gives its address.

    Raises:
        FileNotFoundError: redis-server is not installed.
        TimeoutError: it did not start.
    """
    program = find_redis()
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port("127.0.0.1", 29_000 + os.getpid() % 3_000)
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    persistence = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    log = (folder / "redis.log").open("wb")
    process = subprocess.Popen([*command, *persistence], stdout=log, stderr=log)
    address = f"127.0.0.1:{port}"
    os.environ["RAY_REDIS_ADDRESS"] = address
    try:
        _await_port(port, process)
        yield address
    finally:
        del os.environ["RAY_REDIS_ADDRESS"]
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)
        log.close()


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
