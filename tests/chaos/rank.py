"""The real rank, with faults inside a step that a file asks for.

Stands in for `dflash_serve.engine.rank` in the gang of `replica.ChaosReplica`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_serve.engine import rank as real
from dflash_serve.engine.drafters import DecodeBlock, Drafter
from dflash_serve.engine.rank import RankSpec, rank_environment
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.scheduler.plan import StepPlan, StepResult

__all__ = ["ORDERS", "RankSpec", "order", "prepare_orders", "rank_environment", "run_rank"]

ORDERS = "DFLASH_CHAOS_ORDERS"
"""Variable with the folder of the orders; Ray's processes inherit it."""


def prepare_orders(folder: Path) -> None:
    """Make the folder that ranks started from now on look into."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[ORDERS] = str(folder)


def order(fault: str, pid: int) -> None:
    """Have a rank's process misbehave once: "raise" in a step, or "lie" about one."""
    (Path(os.environ[ORDERS]) / f"{fault}-{pid}").touch()


def run_rank(spec: RankSpec, store: Any = None, inbox: Any = None) -> None:
    """Run the real rank with both seams in place."""
    real.run_rank(spec, store, _install, inbox)


def _install(runner: Runner) -> None:
    if runner.drafter is None:
        raise ValueError("the faults sit in the drafter; serve a pair with a draft")
    runner.drafter = _RaisingDrafter(runner.drafter)
    launch = runner.launch

    def launch_and_lie(plan: StepPlan) -> Pending:
        pending = launch(plan)
        if not plan.empty and _ordered("lie"):
            read = pending.result
            pending.result = lambda: _altered(read())  # type: ignore[method-assign]
        return pending

    runner.launch = launch_and_lie  # type: ignore[method-assign]


class _RaisingDrafter:
    """Raises between draft and verification, where the other ranks wait for this one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, block: DecodeBlock) -> Tensor:
        if _ordered("raise"):
            raise RuntimeError("raised on purpose in the middle of a step")
        return self._drafter.propose(block)


def _ordered(fault: str) -> bool:
    try:
        os.unlink(f"{os.environ[ORDERS]}/{fault}-{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def _altered(result: StepResult) -> StepResult:
    if result.decoded:
        result.decoded[0].picked[0] ^= 1
    else:
        result.sampled[0] = 1 - (result.sampled[0] or 0)
    return result
