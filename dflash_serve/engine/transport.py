"""The channel between front end and rank 0: commands there, reports back.

Between processes it is two ZMQ sockets on ipc files in the engine's private run folder, carrying
msgpack; within one process it is two queues. Nothing here is pickled.
"""

from __future__ import annotations

import queue
from typing import Protocol

from dflash_serve.engine.messages import (
    Command,
    Report,
    decode_commands,
    decode_report,
    encode,
)
from dflash_serve.engine.sockets import Socket, local_endpoint
from dflash_serve.scheduler.plan import StepPlan

__all__ = [
    "Mailbox",
    "NoFollowers",
    "Plans",
    "QueueChannel",
    "ZmqMailbox",
    "ZmqPort",
]


class Mailbox(Protocol):
    """Rank 0's end of the channel to the front end."""

    def receive(self, timeout_s: float) -> list[Command]:
        """Commands that have arrived; waits up to `timeout_s` for the first."""

    def send(self, report: Report) -> None:
        """Send one report."""

    def close(self) -> None:
        """Release the channel."""


class Plans(Protocol):
    """Where rank 0 sends its plans."""

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to every follower."""

    def close(self) -> None:
        """Release the channel."""


class QueueChannel:
    """Both ends in one process; `mailbox` for the loop's thread, the rest is the Port."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.mailbox: Mailbox = _QueueMailbox(self._commands, self._reports)

    def send(self, commands: list[Command]) -> None:
        for command in commands:
            self._commands.put(command)

    def receive(self, timeout_s: float) -> Report | None:
        try:
            return decode_report(self._reports.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Queues need no closing."""


class _QueueMailbox:
    def __init__(
        self, commands: queue.SimpleQueue[Command], reports: queue.SimpleQueue[bytes]
    ) -> None:
        self._commands = commands
        self._reports = reports

    def receive(self, timeout_s: float) -> list[Command]:
        found: list[Command] = []
        try:
            found.append(
                self._commands.get(timeout=timeout_s)
                if timeout_s > 0
                else self._commands.get_nowait()
            )
            while True:
                found.append(self._commands.get_nowait())
        except queue.Empty:
            return found

    def send(self, report: Report) -> None:
        # Encoded here, so that the reader gets a snapshot and not the loop's own objects.
        self._reports.put(encode(report))

    def close(self) -> None:
        """Queues need no closing."""


class ZmqPort:
    """Front end's end; rank 0 may come later, or die.

    Sending happens on whatever thread submits, receiving on one reader thread. ZMQ sockets belong
    to one thread, hence one socket per direction and a lock around the sending one.
    """

    def __init__(self, run_dir: str) -> None:
        import threading

        self._lock = threading.Lock()
        self._out = Socket(local_endpoint(run_dir, "front"), bind=False)
        self._in = Socket(local_endpoint(run_dir, "back"), bind=True)

    @classmethod
    def bind(cls, run_dir: str) -> ZmqPort:
        """Open both sockets in an engine's run folder."""
        return cls(run_dir)

    def send(self, commands: list[Command]) -> None:
        data = encode(commands)
        with self._lock:
            self._out.send(data)

    def receive(self, timeout_s: float) -> Report | None:
        data = self._in.receive(timeout_s)
        return None if data is None else decode_report(data)

    def close(self) -> None:
        with self._lock:
            self._out.close()
        self._in.close()


class ZmqMailbox:
    """Rank 0's end, in another process than the front end."""

    def __init__(self, run_dir: str) -> None:
        self._in = Socket(local_endpoint(run_dir, "front"), bind=True)
        self._out = Socket(local_endpoint(run_dir, "back"), bind=False)

    def receive(self, timeout_s: float) -> list[Command]:
        found: list[Command] = []
        data = self._in.receive(timeout_s)
        while data is not None:
            found.extend(decode_commands(data))
            data = self._in.receive(0)
        return found

    def send(self, report: Report) -> None:
        self._out.send(encode(report))

    def close(self) -> None:
        self._in.close()
        self._out.close()


class NoFollowers:
    """Plans of an engine with one rank."""

    def send(self, plan: StepPlan) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to release."""
