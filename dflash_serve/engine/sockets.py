"""ZMQ sockets of one direction, on ipc files or, keyed, on TCP between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Key", "Socket", "local_endpoint", "make_key"]

_LINGER_MS = 500
_KEEPALIVE_IDLE_S = 60


class Key(NamedTuple):
    """A CURVE key pair that every rank of one gang holds, and nobody else.

    A client's first message can only be made with the server's public key, and a server's answer
    only with the secret one: handed to the ranks alone, the pair keeps everyone else out at both
    ends, and what travels is encrypted (CurveZMQ, RFC 26).
    """

    public: bytes
    secret: bytes


def make_key() -> Key:
    """A new key pair.

    Raises:
        zmq.ZMQError: pyzmq was built without CURVE; its own wheels have it.
    """
    import zmq

    return Key(*zmq.curve_keypair())


def local_endpoint(run_dir: str, name: str) -> str:
    """Address of a socket file in an engine's run folder."""
    return f"ipc://{Path(run_dir) / name}"


class Socket:
    """A ZMQ socket for one direction: unlimited queue, nothing lingers on close.

    PAIR, one peer each side, unless another kind is named. The end that sends connects and the
    end that receives binds: a connecting socket queues what it is given, while a binding one
    blocks as long as its peer is not there, or no longer.

    Args:
        endpoint: `ipc://` or `tcp://`; a bound TCP port may be `*`.
        key: the gang's; needed on TCP, where whoever reaches the port could else speak.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        ValueError: TCP without a key.
    """

    def __init__(
        self, endpoint: str, *, bind: bool, kind: str = "PAIR", key: Key | None = None
    ) -> None:
        import zmq

        if key is None and not endpoint.startswith("ipc:"):
            raise ValueError(f"a socket at {endpoint} needs the gang's key")
        self._context = zmq.Context()
        self._socket = self._context.socket(getattr(zmq.SocketType, kind))
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if key is not None:
            self._lock(key, server=bind)
        if bind:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def _lock(self, key: Key, *, server: bool) -> None:
        import zmq

        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        if server:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)

    @property
    def endpoint(self) -> str:
        """The address as bound, with the port that the system picked."""
        import zmq

        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def send(self, data: bytes) -> None:
        """Queue a message; never blocks on a connecting socket."""
        self._socket.send(data)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Next message, or None after `timeout_s` (None waits for ever)."""
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        if not self._socket.poll(timeout_ms):
            return None
        data: bytes = self._socket.recv()
        return data

    def close(self) -> None:
        """Release the socket. Idempotent."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()
