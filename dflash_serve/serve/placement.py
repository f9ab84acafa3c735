"""Where the ranks of a gang go: a bundle each on one host, a bundle per host on several."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dflash_serve.config import EngineConfig
from dflash_serve.errors import EngineDeadError
from dflash_serve.serve.settings import gpu_share, placement_strategy, rank_bundles

__all__ = ["Placement"]

_TIMEOUT_S = 120.0
_NODE = "ray.io/node-id"
"""The label by which Ray knows a node."""


class Placement:
    """The placement group of one gang.

    Inside a Serve replica that is the replica's own; the replica stands in its first bundle, so
    that the first ranks share its host. Elsewhere a group is made, and removed by `remove`.

    Args:
        config: the engine configuration.
        hosts: over how many hosts the ranks are spread, equally many on each.
        rank_cpus: CPUs reserved per rank.

    Raises:
        EngineDeadError: no room for a group of our own.
    """

    def __init__(self, config: EngineConfig, *, hosts: int, rank_cpus: float) -> None:
        self._ranks = config.tensor_parallel_size
        self._hosts = hosts
        self.gpus_per_rank = gpu_share(config) if config.device == "cuda" else 0.0
        self._own: PlacementGroup | None = None
        self._group = ray.util.get_current_placement_group() or self._make(rank_cpus)

    def strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        """The place of a rank, or of what shall run on its host."""
        bundle = rank if self._hosts == 1 else rank * self._hosts // self._ranks
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)

    def remove(self) -> None:
        """Give back a group of our own. Idempotent."""
        if self._own is not None:
            ray.util.remove_placement_group(self._own)
            self._own = None

    def _make(self, rank_cpus: float) -> PlacementGroup:
        need: Mapping[str, float] = {"CPU": rank_cpus} | (
            {"GPU": self.gpus_per_rank} if self.gpus_per_rank else {}
        )
        bundles = rank_bundles(need, self._ranks, self._hosts)
        # Rank 0 shares a run folder with this process.
        here = {_NODE: ray.get_runtime_context().get_node_id()}
        self._own = ray.util.placement_group(
            bundles,
            strategy=placement_strategy(self._hosts),
            bundle_label_selector=[here] + [{} for _ in bundles[1:]],
        )
        if not self._own.wait(_TIMEOUT_S):
            group = self._own
            self.remove()
            raise EngineDeadError(
                f"Ray found no {'node' if self._hosts == 1 else f'{self._hosts} nodes'} with "
                f"{group.bundle_specs} free within {_TIMEOUT_S:.0f} s; "
                f"the cluster has {ray.available_resources()} free"
            )
        return self._own
