"""Taking down a Ray that was started here: requests first, then Serve, then every process."""

from __future__ import annotations

import os
import sys

from dflash_serve.serve.processes import await_exit, descendants, kill

__all__ = ["drain", "stop"]

_STOP_TIMEOUT_S = 15.0


def drain(application: str, grace_s: float) -> int:
    """Have the ingress refuse new requests (503) and wait for those under way.

    Args:
        application: the one with the ingress.
        grace_s: what is not done by then ends with an error event.

    Returns:
        How many ended so; 0 as well where there is no ingress to ask.

    Raises:
        KeyboardInterrupt: a signal while it waits; nothing more is waited for.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        call = serve.get_app_handle(application).broadcast("drain", grace_s)
        return sum(call.results(timeout_s=grace_s + _STOP_TIMEOUT_S))
    except (RayError, RayServeException, TimeoutError):
        return 0  # it never came up, or is gone: nobody's request waits there


def stop() -> None:
    """Take Serve and Ray down, and wait until every process started for them is gone."""
    ray = sys.modules.get("ray")
    if ray is None:
        return
    processes = descendants(os.getpid())
    started = ray.is_initialized()
    if started:
        _delete_application()
    ray.shutdown()
    # Processes of a Ray that was interrupted while it started do not know that they should go.
    processes |= descendants(os.getpid())
    kill(await_exit(processes, _STOP_TIMEOUT_S if started else 1.0))


def _delete_application() -> None:
    """Let replicas finish and end their ranks; the rest of Serve goes with Ray.

    `serve.shutdown` would take five seconds more and print a failure that is none.
    """
    from ray import serve

    for name in serve.status().applications:
        serve.delete(name)
