"""What surrounds the steps of a rank, the same on rank 0 and on followers.

Pulse and watchdog, the checksum of what was committed, the flight recorder, the profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dflash_serve.config import EngineConfig
from dflash_serve.engine.consensus import Echo, checksum
from dflash_serve.engine.pulse import Board, Pulse
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.recorder import Recorder
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.trace import Tracer
from dflash_serve.engine.watchdog import Watchdog, leave
from dflash_serve.scheduler.plan import StepPlan, StepResult

__all__ = ["Guard"]


class Guard:
    """Launches and reads back a rank's steps under its watchdog; a context manager.

    Args:
        config: `hang_timeout_s` is the age of the last completed step, while work is pending,
            that ends the rank.
        board: see `Watchdog`.
        on_trip: what ends the rank; the default ends the process.

    Attributes:
        pulse: to be told when the loop rests.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        board: Board | None = None,
        on_trip: Callable[[str], None] = leave,
    ) -> None:
        self.runner = runner
        self.pulse = Pulse()
        self._rank = runner.pair.group.rank
        self._recorder = Recorder(
            config,
            self._rank,
            runner.pair.group.size,
            max_model_len=runner.pair.settings.max_model_len,
            page_size=runner.pair.page_size,
        )
        self._tracer = Tracer(self._rank, runner.pair.device, self.pulse)
        self._watchdog = Watchdog(
            self.pulse,
            config.hang_timeout_s,
            rank=self._rank,
            board=board,
            record=self._recorder.dump,
            on_trip=on_trip,
        )

    def __enter__(self) -> Guard:
        self._watchdog.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.__exit__(kind, error, trace)

    def launch(self, plan: StepPlan) -> Pending:
        """Queue a plan on the device."""
        self.pulse.begin(plan.step)
        self._recorder.launched(plan)
        self._tracer.before(plan)
        return self.runner.launch(plan)

    def settle(self, pending: Pending) -> tuple[StepResult, Echo]:
        """Wait for a step; returns its outcome and what rank 0 is to hear of it."""
        step, result = pending.plan.step, pending.result()
        echo = Echo(self._rank, step, checksum(step, result), self._tracer.after(step))
        self._recorder.settled(step, result, echo.checksum)
        self.pulse.complete(step)
        return result, echo
