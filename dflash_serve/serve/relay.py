"""Ranks on several hosts watch each other: one relay a host keeps its board like rank 0's.

The boards are files in each host's run folder. The replica asks every relay, several times a
second and through Ray, what its ranks do, and tells it what the others do. No relay takes part in
a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from dflash_serve import log
from dflash_serve.engine.pulse import Board
from dflash_serve.engine.tidings import Tidings, gather, spread
from dflash_serve.serve.processes import await_killed
from dflash_serve.serve.rundir import RunDir

__all__ = ["HostRelay", "Relays"]

logger = log.get_logger(__name__)

_TICK_S = 0.1
_OPEN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 15.0
_SILENT_S = 2.0
"""A relay that owes an answer for so long is not waited for when the gang ends."""


class HostRelay:
    """One host's run folder and board. Made a Ray actor by `Relays`.

    Args:
        ranks: that run on this host.
    """

    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        log.configure()
        self._ranks = tuple(ranks)
        self._run_dir = RunDir()
        self._board = Board(self.path(), world_size)

    def path(self) -> str:
        """The run folder of this host's ranks."""
        return str(self._run_dir.path)

    def exchange(self, others: Tidings) -> Tidings:
        """Write down what the other hosts' ranks do; returns what this host's do."""
        spread(self._board, others)
        return gather(self._board, self._ranks)

    def end(self, pids: Sequence[int]) -> list[int]:
        """Wait until killed ranks are gone and remove the folder; returns those that are not."""
        left = await_killed(pids)
        self._run_dir.remove()
        return sorted(left)


class Relays:
    """The relays of one gang, as the replica sees them.

    Args:
        create: makes an actor on the host of a rank: class, that rank, constructor arguments.
        hosts: the ranks on each host but the replica's, by Ray's name of the host.
        board: rank 0's.

    Raises:
        EngineDeadError: as `create`.
        RayError: a relay did not start.
    """

    def __init__(
        self,
        create: Callable[..., ActorHandle],
        hosts: Mapping[str, Sequence[int]],
        board: Board,
        world_size: int,
    ) -> None:
        self._board = board
        self._ranks = range(world_size)
        self._hosts = dict(hosts)
        self._actors = {
            node: create(HostRelay, ranks[0], list(ranks), world_size)
            for node, ranks in hosts.items()
        }
        paths = [actor.path.remote() for actor in self._actors.values()]
        found = ray.get(paths, timeout=_OPEN_TIMEOUT_S)
        self._folders = dict(zip(self._actors, found, strict=True))
        self._asked = dict.fromkeys(self._actors, time.monotonic())  # the last call to each
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gang-relays", daemon=True)
        self._thread.start()

    def folder(self, node: str) -> str | None:
        """The run folder of the ranks on a host; None on the replica's own."""
        return self._folders.get(node)

    def close(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Wait for the killed ranks of every host that answers, and end the relays.

        Args:
            pids: of the ranks, by host.
        """
        self._stopping.set()
        self._thread.join()
        late = time.monotonic() - _SILENT_S
        reached = [node for node, asked in self._asked.items() if asked > late]
        ends = {node: self._actors[node].end.remote(pids.get(node, ())) for node in reached}
        for node in self._actors:
            try:
                left = ray.get(ends[node], timeout=_END_TIMEOUT_S)
                if left:
                    logger.warning("rank processes %s on node %s outlived their kill", left, node)
            except (KeyError, GetTimeoutError, RayError):
                logger.warning("node %s does not say whether its ranks are gone", node)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)

    def _run(self) -> None:
        """One call to each relay at a time: a host that is cut off must not delay the others."""
        calls: dict[Any, str] = {}
        while not self._stopping.wait(_TICK_S):
            for node in self._asked.keys() - calls.values():
                others = gather(self._board, set(self._ranks) - set(self._hosts[node]))
                calls[self._actors[node].exchange.remote(others)] = node
                self._asked[node] = time.monotonic()
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_TICK_S)
            for answer in done:
                node = calls.pop(answer)
                try:
                    spread(self._board, ray.get(answer))
                except RayError as error:
                    self._lose(node, error)
            if not self._asked:
                return

    def _lose(self, node: str, error: RayError) -> None:
        """A relay ends only with its host or by a signal: its ranks are on their own."""
        del self._asked[node]
        ranks = ", ".join(map(str, self._hosts[node]))
        self._board.raise_alarm(
            f"the relay of ranks {ranks} on node {node} is gone: {type(error).__name__}"
        )
