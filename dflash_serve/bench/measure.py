"""Timing one engine on a set of prompts: step times, tokens per step, tokens per second."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.engine.inproc import InprocExecutor
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.plan import StepPlan, StepResult

__all__ = ["Measurement", "StepTimer", "greedy_requests", "measure", "start_timed"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a run showed. Prefill is left out of the rates.

    Attributes:
        steps: steps run, prefill included.
        step_ms: durations of the steps without prefill in milliseconds, ascending; where rank 0
            runs in another process, only the mean over all steps.
        tokens: ids emitted after each request's first.
        seconds: from the last first token of a batch to its last token, summed over batches.
        tokens_per_step: ids emitted per verified block, over all requests.
        ids: output ids of each request, in the order submitted.
        finish_reasons: why each ended.
    """

    steps: int
    step_ms: tuple[float, ...]
    tokens: int
    seconds: float
    tokens_per_step: float
    ids: tuple[list[int], ...]
    finish_reasons: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput of the whole batch."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def percentile(self, share: float) -> float:
        """Step time in milliseconds below which `share` of the steps lie."""
        if not self.step_ms:
            return float("nan")
        return self.step_ms[min(len(self.step_ms) - 1, int(share * len(self.step_ms)))]


class StepTimer:
    """Records how long each pure decode step takes inside rank 0's process.

    A step lasts from its launch, or from the end of the step before it if that came later, until
    its results are read.
    """

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self._ended = 0.0

    def install(self, runner: Runner) -> None:
        """Wrap a runner's `launch`; an `OnReady`."""
        launch = runner.launch

        def timed(plan: StepPlan) -> Pending:
            began = time.perf_counter()
            pending = launch(plan)
            wait = pending.result

            def result() -> StepResult:
                outcome = wait()
                ended = time.perf_counter()
                if plan.decode and not plan.prefill:
                    self.milliseconds.append((ended - max(began, self._ended)) * 1e3)
                self._ended = ended
                return outcome

            pending.result = result  # type: ignore[method-assign]
            return pending

        runner.launch = timed  # type: ignore[method-assign]


def start_timed(config: EngineConfig, timer: StepTimer) -> EngineClient:
    """Start an engine with its steps timed where rank 0 runs in this process."""
    executor = InprocExecutor(config, timer.install) if config.executor == "inproc" else None
    return start_engine(config, executor)


def greedy_requests(
    prompts: Sequence[list[int]], max_tokens: int, *, ignore_eos: bool = False
) -> list[Submit]:
    """One greedy request per prompt."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    return [
        Submit(request_id=f"bench-{i}", prompt_ids=list(prompt), params=params)
        for i, prompt in enumerate(prompts)
    ]


def measure(
    engine: EngineClient, timer: StepTimer, submits: Sequence[Submit], batch: int
) -> Measurement:
    """Run requests `batch` at a time and time their decode phase."""
    timer.milliseconds.clear()
    before = (engine.stats.steps, engine.stats.step_seconds)
    emitted = blocks = tokens = 0
    seconds = 0.0
    outputs: list[list[TokenEvent]] = []
    for first in range(0, len(submits), batch):
        some = submits[first : first + batch]
        clock = _Clock(len(some))
        collected = engine.collect(some, clock.note)
        tokens += clock.tokens
        seconds += clock.seconds
        outputs.extend(collected.values())
        for per_request in collected.values():
            emitted += sum(len(event.token_ids) for event in per_request[1:])
            blocks += len(per_request) - 1
    step_ms = sorted(timer.milliseconds)
    if not step_ms and engine.stats.steps > before[0]:  # rank 0 is another process: the mean
        spent = engine.stats.step_seconds - before[1]
        step_ms = [spent / (engine.stats.steps - before[0]) * 1e3]
    return Measurement(
        steps=engine.stats.steps - before[0],
        step_ms=tuple(step_ms),
        tokens=tokens,
        seconds=seconds,
        tokens_per_step=emitted / blocks if blocks else 0.0,
        ids=tuple([i for event in events for i in event.token_ids] for events in outputs),
        finish_reasons=tuple(events[-1].finish_reason or "" for events in outputs),
    )


class _Clock:
    """Counts the tokens of a batch once every request of it has its first."""

    def __init__(self, requests: int) -> None:
        self._waiting = requests
        self._seen: set[str] = set()
        self._began = self._ended = 0.0
        self.tokens = 0

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    def note(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        if event.request_id not in self._seen:
            self._seen.add(event.request_id)
            self._began = self._ended = now
            if len(self._seen) == self._waiting:
                self.tokens = 0
            return
        if len(self._seen) == self._waiting:
            self.tokens += len(event.token_ids)
            self._ended = now
