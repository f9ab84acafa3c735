"""Ends the requests of a front end that has died.

Ray does not tell an actor that the caller of one of its streams is gone: left alone, the requests
of a killed ingress would run to their end and hold their pages until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import ray
from ray.exceptions import RayError

from dflash_serve.log import get_logger

__all__ = ["Senders", "actor_is_gone", "own_actor_name"]

logger = get_logger(__name__)

_POLL_S = 0.5
_NAMESPACE = "serve"
"""Where Serve's actors have their names, whatever the namespace of the application's processes."""


class Senders:
    """Watches the front ends whose requests run here; to be used on one event loop.

    Args:
        is_gone: whether the front end of that name has died; called on another thread.
        poll_s: seconds between two looks, while there are requests.
    """

    def __init__(self, is_gone: Callable[[str], bool], poll_s: float = _POLL_S) -> None:
        self._is_gone = is_gone
        self._poll_s = poll_s
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}
        # A name that was never found is not taken for dead: it may only be unknown here.
        self._alive: set[str] = set()
        self._watcher: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watched(self, sender: str | None) -> Iterator[None]:
        """Cancel the task that runs the block when `sender` dies; None is not watched."""
        task = asyncio.current_task()
        if sender is None or task is None:
            yield
            return
        self._tasks.setdefault(sender, set()).add(task)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            if tasks := self._tasks.get(sender):
                tasks.discard(task)
                if not tasks:
                    del self._tasks[sender]

    async def _watch(self) -> None:
        while self._tasks:
            await asyncio.sleep(self._poll_s)
            for sender in list(self._tasks):
                if not await asyncio.to_thread(self._is_gone, sender):
                    self._alive.add(sender)
                elif sender in self._alive:
                    self._alive.discard(sender)
                    tasks = self._tasks.pop(sender, set())
                    logger.warning("%s has died; ending its %d requests", sender, len(tasks))
                    for task in tasks:
                        task.cancel()


def own_actor_name() -> str | None:
    """What `actor_is_gone` finds this process by; None outside an actor."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    name: str | None = context.get_actor_name()
    return name or None


def actor_is_gone(name: str) -> bool:
    """Whether no actor of Serve's bears the name any more; takes about a millisecond."""
    try:
        ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return True
    except RayError:
        return False  # Ray cannot say now
    return False
