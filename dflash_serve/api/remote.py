"""Asking a server that runs for a trace, over HTTP."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from dflash_serve.api.protocol import TraceFiles, TraceRequest
from dflash_serve.errors import ConfigError, DFlashError

__all__ = ["trace_paths"]

# Neither a proxy nor another scheme: the server is one that the caller named.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ANSWER_S = 30.0
"""Beyond the trace's own time."""


def trace_paths(url: str, steps: int, timeout_s: float, folder: Path | None) -> list[str]:
    """Profile the next steps of a server's busiest replica; returns a path for every rank.

    Args:
        url: of the server, "http://host:port", with its route prefix if it has one.
        timeout_s: how long to wait for so many steps and for the files.
        folder: where the files are copied to; None leaves them on the replica's host.

    Raises:
        ConfigError: the address is not one of HTTP.
        DFlashError: what the server answered, or that it cannot be reached or copied from.
    """
    files = _order(url, TraceRequest(steps=steps, timeout_s=timeout_s))
    return files.paths if folder is None else _copy(files, folder)


def _order(url: str, order: TraceRequest) -> TraceFiles:
    """POST /admin/trace, waiting for the files."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; allowed: http://host:port or https://host:port")
    request = urllib.request.Request(
        f"{url.rstrip('/')}/admin/trace",
        data=msgspec.json.encode(order),
        headers={"content-type": "application/json"},
        method="POST",
    )
    try:
        with _OPENER.open(request, timeout=order.timeout_s + _ANSWER_S) as answer:
            return msgspec.json.decode(answer.read(), type=TraceFiles)
    except urllib.error.HTTPError as error:
        raise DFlashError(_message(error.read(), error.code)) from error
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise DFlashError(f"no trace from {url}: {error}; is it a dflash-serve server?") from error


def _message(body: bytes, status: int) -> str:
    """What an OpenAI error object says, or the status where it is none."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered with status {status}"


def _copy(files: TraceFiles, folder: Path) -> list[str]:
    """Copy traces that lie on this host."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for path in files.paths:
        try:
            copies.append(str(shutil.copy(path, folder)))
        except OSError as error:
            raise DFlashError(
                f"{path} on host {files.host} cannot be copied to {folder}: {error}; leave "
                "--output out and fetch it from there"
            ) from error
    return copies
