"""Profiling the steps of a live engine: a trace of the next N on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dflash_serve.engine.messages import Traced
from dflash_serve.engine.pulse import Pulse
from dflash_serve.log import get_logger
from dflash_serve.scheduler.plan import StepPlan

__all__ = ["Tracer"]

logger = get_logger(__name__)
_EXCUSE_S = 60.0
"""Starting the profiler and writing a file of many steps may take this long."""


class Tracer:
    """Takes the traces that plans ask for; start and end are on the thread that runs the steps.

    Args:
        pulse: told that a step may take longer while a profiler starts or a file is written.
    """

    def __init__(self, rank: int, device: torch.device, pulse: Pulse) -> None:
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._pulse = pulse
        self._profile: profile | None = None
        self._folder = ""
        self._left = 0
        self._last = -1

    def before(self, plan: StepPlan) -> None:
        """A plan is about to be launched; one order at a time, further ones are ignored."""
        if self._profile is None and plan.trace is not None:
            self._pulse.excuse(_EXCUSE_S)
            self._folder, self._left = plan.trace.folder, plan.trace.steps
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._pulse.excuse(0.0)
        if self._left > 0:
            self._left -= 1
            self._last = plan.step

    def after(self, step: int) -> Traced | None:
        """A step's results were read; returns the trace that ends with it, if one does."""
        if self._profile is None or self._left > 0 or step != self._last:
            return None
        finished, self._profile = self._profile, None
        self._pulse.excuse(_EXCUSE_S)
        try:
            return self._write(finished)
        except (OSError, RuntimeError) as error:
            logger.exception("the trace could not be written")
            return Traced(
                rank=self._rank, folder=self._folder, error=f"{type(error).__name__}: {error}"
            )
        finally:
            self._pulse.excuse(0.0)

    def _write(self, finished: profile) -> Traced:
        finished.stop()
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"trace-rank{self._rank}.json"
        finished.export_chrome_trace(str(path))
        return Traced(rank=self._rank, folder=self._folder, path=str(path))
