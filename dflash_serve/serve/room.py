"""What this process has heard of replicas that can take nothing.

Apart from the router that reads it, because Ray Serve pickles the router's module by value.
"""

from __future__ import annotations

import threading
import time

__all__ = ["ROOM", "Room"]

_BELIEVED_S = 1.0


class Room:
    """Which replicas said lately that they can take nothing.

    Args:
        believed_s: seconds until a replica is asked again.
    """

    def __init__(self, believed_s: float = _BELIEVED_S) -> None:
        self._believed_s = believed_s
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()  # routers run on another thread than the application

    def none_at(self, replica: str) -> None:
        """Note that a replica said it can take nothing."""
        now = time.monotonic()
        with self._lock:
            self._until = {name: until for name, until in self._until.items() if until > now}
            self._until[replica] = now + self._believed_s

    def maybe_at(self, replica: str) -> bool:
        """Whether a replica may have room, as far as is known."""
        with self._lock:
            return self._until.get(replica, 0.0) <= time.monotonic()


ROOM = Room()
"""Of this process: the application writes here, the routers of its handles read."""
