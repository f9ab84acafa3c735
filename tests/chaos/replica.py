"""The real replica over the ranks of `tests.chaos.rank`."""

from __future__ import annotations

from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.replica import Replica
from dflash_serve.serve.settings import ModelSettings

__all__ = ["ChaosReplica"]


class ChaosReplica(Replica):
    """A replica whose ranks misbehave when told to."""

    def _make_executor(self, settings: ModelSettings) -> RayExecutor:
        return RayExecutor(
            settings.engine,
            rank_cpus=settings.rank_cpus,
            hosts=settings.hosts,
            runner="tests.chaos.rank",
        )
