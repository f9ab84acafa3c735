"""Channels between ranks: rank 0's plans to every follower, their echoes back.

On one host they are ZMQ sockets on ipc files in the engine's run folder; over several hosts they
are keyed TCP sockets, bound before the ranks load so that each knows where the others listen.
Everything is msgpack; nothing is pickled.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dflash_serve.engine.consensus import Echo
from dflash_serve.engine.sockets import Key, Socket, local_endpoint
from dflash_serve.scheduler.plan import StepPlan

__all__ = [
    "EchoReceiver",
    "EchoSender",
    "Inbox",
    "Lines",
    "PlanReceiver",
    "PlanSender",
    "local_lines",
]


class Lines(NamedTuple):
    """Where the ranks of one gang listen.

    Attributes:
        plans: each follower's address, rank 1 first.
        echo: rank 0's address.
        key: what the sockets are locked with; None on ipc files.
    """

    plans: tuple[str, ...]
    echo: str
    key: Key | None = None


def local_lines(run_dir: str, world_size: int) -> Lines:
    """Lines of ranks that share a run folder."""
    plans = tuple(local_endpoint(run_dir, f"plan-{rank}") for rank in range(1, world_size))
    return Lines(plans, local_endpoint(run_dir, "echo"))


class Inbox:
    """A rank's receiving socket on TCP, bound before anyone knows its port.

    Args:
        host: this host's address, on which alone it listens.

    Attributes:
        endpoint: where to send to.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, host: str, key: Key) -> None:
        where = f"[{host}]" if ":" in host else host
        self.socket = Socket(f"tcp://{where}:*", bind=True, kind="PULL", key=key)
        self.endpoint = self.socket.endpoint


class PlanSender:
    """Rank 0's end of the plan channel (a `Plans`): one socket for each follower."""

    def __init__(self, lines: Lines) -> None:
        self._sockets = [
            Socket(plan, bind=False, kind="PUSH", key=lines.key) for plan in lines.plans
        ]

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to every follower; never blocks."""
        data = msgspec.msgpack.encode(plan)
        for socket in self._sockets:
            socket.send(data)

    def close(self) -> None:
        """Release the sockets."""
        for socket in self._sockets:
            socket.close()


class PlanReceiver:
    """A follower's end of the plan channel.

    Args:
        inbox: what was bound for it; None binds the file that `lines` names.
    """

    def __init__(self, lines: Lines, rank: int, inbox: Inbox | None = None) -> None:
        self._socket = _receiving(lines.plans[rank - 1], inbox)
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def receive(self) -> StepPlan:
        """Wait for the next plan, however long the engine is idle."""
        data = self._socket.receive(None)
        assert data is not None, "a wait without limit ended without a message"
        return self._decoder.decode(data)

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()


class EchoSender:
    """A follower's end of the channel on which it answers rank 0."""

    def __init__(self, lines: Lines) -> None:
        self._socket = Socket(lines.echo, bind=False, kind="PUSH", key=lines.key)

    def send(self, echo: Echo) -> None:
        """Tell rank 0 what came of a step; never blocks."""
        self._socket.send(msgspec.msgpack.encode(echo))

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()


class EchoReceiver:
    """Rank 0's end: one socket for all followers (an `Echoes`).

    Args:
        inbox: what was bound for it; None binds the file that `lines` names.
    """

    def __init__(self, lines: Lines, inbox: Inbox | None = None) -> None:
        self._socket = _receiving(lines.echo, inbox)
        self._decoder = msgspec.msgpack.Decoder(Echo)

    def receive(self, timeout_s: float) -> list[Echo]:
        """Echoes that have arrived; waits up to `timeout_s` for the first."""
        found: list[Echo] = []
        data = self._socket.receive(timeout_s)
        while data is not None:
            found.append(self._decoder.decode(data))
            data = self._socket.receive(0)
        return found

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()


def _receiving(endpoint: str, inbox: Inbox | None) -> Socket:
    return inbox.socket if inbox is not None else Socket(endpoint, bind=True, kind="PULL")
