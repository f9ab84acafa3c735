"""Channels: front end ↔ rank 0 (commands, reports) and rank 0 ↔ followers (plans, echoes).

Between processes they are ZMQ sockets on ipc files in the engine's private run folder, carrying
msgpack; within one process they are queues. Nothing here is pickled.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Protocol

import msgspec

from dflash_serve.engine.consensus import Echo
from dflash_serve.engine.messages import (
    Command,
    Report,
    decode_commands,
    decode_report,
    encode,
)
from dflash_serve.scheduler.plan import StepPlan

__all__ = [
    "EchoReceiver",
    "EchoSender",
    "Mailbox",
    "NoFollowers",
    "PlanReceiver",
    "PlanSender",
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


def _endpoint(run_dir: str, name: str) -> str:
    return f"ipc://{Path(run_dir) / name}"


class _Socket:
    """A ZMQ socket for one direction: unlimited queue, nothing lingers on close.

    PAIR, one peer each side, unless another kind is named. The end that sends connects and the
    end that receives binds: a connecting socket queues what it is given, while a binding one
    blocks as long as its peer is not there, or no longer.
    """

    def __init__(self, endpoint: str, *, bind: bool, kind: str = "PAIR") -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(getattr(zmq.SocketType, kind))
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Next message, or None after `timeout_s` (None waits for ever)."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        if not self._socket.poll(timeout_ms):
            return None
        data: bytes = self._socket.recv()
        return data

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


class ZmqPort:
    """Front end's end; rank 0 may come later, or die.

    Sending happens on whatever thread submits, receiving on one reader thread. ZMQ sockets belong
    to one thread, hence one socket per direction and a lock around the sending one.
    """

    def __init__(self, run_dir: str) -> None:
        import threading

        self._lock = threading.Lock()
        self._out = _Socket(_endpoint(run_dir, "front"), bind=False)
        self._in = _Socket(_endpoint(run_dir, "back"), bind=True)

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
        self._in = _Socket(_endpoint(run_dir, "front"), bind=True)
        self._out = _Socket(_endpoint(run_dir, "back"), bind=False)

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


class PlanSender:
    """Rank 0's end of the plan channel: one socket for each follower."""

    def __init__(self, run_dir: str, world_size: int) -> None:
        self._sockets = [
            _Socket(_endpoint(run_dir, f"plan-{rank}"), bind=False) for rank in range(1, world_size)
        ]

    def send(self, plan: StepPlan) -> None:
        data = msgspec.msgpack.encode(plan)
        for socket in self._sockets:
            socket.send(data)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


class PlanReceiver:
    """A follower's end of the plan channel."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._socket = _Socket(_endpoint(run_dir, f"plan-{rank}"), bind=True)
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def receive(self) -> StepPlan:
        """Wait for the next plan, however long the engine is idle."""
        data = self._socket.receive(None)
        assert data is not None, "a wait without limit ended without a message"
        return self._decoder.decode(data)

    def close(self) -> None:
        self._socket.close()


class EchoSender:
    """A follower's end of the channel on which it answers rank 0."""

    def __init__(self, run_dir: str) -> None:
        self._socket = _Socket(_endpoint(run_dir, "echo"), bind=False, kind="PUSH")

    def send(self, echo: Echo) -> None:
        """Tell rank 0 what came of a step; never blocks."""
        self._socket.send(msgspec.msgpack.encode(echo))

    def close(self) -> None:
        self._socket.close()


class EchoReceiver:
    """Rank 0's end: one socket for all followers (an `Echoes`)."""

    def __init__(self, run_dir: str) -> None:
        self._socket = _Socket(_endpoint(run_dir, "echo"), bind=True, kind="PULL")
        self._decoder = msgspec.msgpack.Decoder(Echo)

    def receive(self, timeout_s: float) -> list[Echo]:
        found: list[Echo] = []
        data = self._socket.receive(timeout_s)
        while data is not None:
            found.append(self._decoder.decode(data))
            data = self._socket.receive(0)
        return found

    def close(self) -> None:
        self._socket.close()
