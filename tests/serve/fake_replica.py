"""The real replica over the stand-in ranks of `fake_rank`."""

from __future__ import annotations

from dflash_serve.config import EngineConfig
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.replica import Replica
from dflash_serve.serve.settings import ModelSettings

__all__ = ["FakeReplica"]


class FakeReplica(Replica):
    """A replica that needs no checkpoint."""

    def _check(self, config: EngineConfig) -> None:
        pass

    def _make_executor(self, settings: ModelSettings) -> RayExecutor:
        return RayExecutor(
            settings.engine,
            rank_cpus=settings.rank_cpus,
            hosts=settings.hosts,
            runner="tests.serve.fake_rank",
        )
