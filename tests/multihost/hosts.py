"""Hosts on one machine: network namespaces on a bridge, each with its own address (Linux, root).

The first namespace holds the bridge, Ray's head and the clients; the others are the hosts that can
be cut off. All see the same file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["HEAD_ADDRESS", "Hosts", "make_hosts", "require_namespaces"]

_NETWORK = "10.77.0."
HEAD_ADDRESS = f"{_NETWORK}1"
_NAMED = Path("/var/run/netns")


def require_namespaces() -> None:
    """Whether this machine lets us make network namespaces.

    Raises:
        PermissionError: it does not; says why and what would help.
    """
    if shutil.which("ip") is None:
        raise PermissionError("no `ip` on PATH: install iproute2 (apt-get install iproute2)")
    name = f"dfm{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        raise PermissionError(
            f"network namespaces are not allowed here ({made.stderr.strip()}): run as root, in a "
            "container with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
    subprocess.run(["ip", "netns", "del", name], check=True)


class Hosts:
    """The namespaces of one run, by number; 0 is the head.

    Args:
        prefix: of the namespaces' names.
        count: hosts beside the head.
    """

    def __init__(self, prefix: str, count: int) -> None:
        self.prefix = prefix
        self.numbers = range(1, count + 1)

    def name(self, number: int) -> str:
        """A host's namespace."""
        return f"{self.prefix}-{number}"

    def address(self, number: int) -> str:
        """A host's own address."""
        return f"{_NETWORK}{number + 1}"

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """A command line that runs `command` on a host."""
        return ["ip", "netns", "exec", self.name(number), *command]

    def host_of(self, pid: int) -> int | None:
        """On which host a process runs; None when it is gone or on none of them."""
        try:
            space = os.stat(f"/proc/{pid}/ns/net").st_ino
        except FileNotFoundError:
            return None
        every = (0, *self.numbers)
        return next((n for n in every if (_NAMED / self.name(n)).stat().st_ino == space), None)

    def cut(self, number: int) -> None:
        """Let nothing through to or from a host: no reset either, as with a pulled cable."""
        _ip("-n", self.name(0), "link", "set", f"to-{number}", "down")

    def mend(self, number: int) -> None:
        """Plug the cable in again."""
        _ip("-n", self.name(0), "link", "set", f"to-{number}", "up")


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Set up a head and `count` hosts; removed at the end.

    Raises:
        PermissionError: as `require_namespaces`.
        RuntimeError: a command of `ip` failed.
    """
    require_namespaces()
    hosts = Hosts(f"dfm{os.getpid()}", count)
    try:
        head = hosts.name(0)
        _ip("netns", "add", head)
        _ip("-n", head, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", head, "addr", "add", f"{HEAD_ADDRESS}/24", "dev", "bridge0")
        for link in ("lo", "bridge0"):
            _ip("-n", head, "link", "set", link, "up")
        for number in hosts.numbers:
            _plug(hosts, number)
        yield hosts
    finally:
        for number in (0, *hosts.numbers):
            subprocess.run(["ip", "netns", "del", hosts.name(number)], capture_output=True)


def _plug(hosts: Hosts, number: int) -> None:
    head, name = hosts.name(0), hosts.name(number)
    _ip("netns", "add", name)
    port = ("link", "add", f"to-{number}", "netns", head, "type", "veth")
    _ip(*port, "peer", "name", "eth0", "netns", name)
    _ip("-n", head, "link", "set", f"to-{number}", "master", "bridge0", "up")
    _ip("-n", name, "addr", "add", f"{hosts.address(number)}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip("-n", name, "link", "set", link, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
