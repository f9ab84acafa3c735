"""Tens of thousands of sampled decode steps with every index checked and memory recorded."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from typing import Any

import torch

from dflash_serve.bench.engines import running, variant
from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.engine.readback import Pending
from dflash_serve.engine.runner import Runner
from dflash_serve.sampling import SamplingParams
from dflash_serve.scheduler.plan import StepPlan, StepResult

__all__ = ["Watch", "soak"]


def soak(
    config: EngineConfig,
    mode: str,
    *,
    steps: int,
    prompt_lengths: tuple[int, int],
    max_tokens: int,
    sample_every: int,
    settled_after: int,
    progress: Callable[[str], None],
    wave: int = 64,
) -> dict[str, Any]:
    """Decode requests of random lengths at temperature 1, in waves that run dry.

    A wave fills the batch and then empties it, so that every batch size comes up.

    Args:
        mode: verify length, see `engines.variant`.
        steps: decode steps to run at least.
        max_tokens: most output tokens of a request.
        sample_every: steps between two records of memory.
        settled_after: steps after which allocated memory must not grow.
        wave: requests that are submitted together.
    """
    watch = Watch(sample_every)
    rng = random.Random(0)
    requests = finished = tokens = 0
    with running(variant(config, mode), watch.install) as engine:

        def note(event: TokenEvent) -> None:
            nonlocal finished, tokens
            tokens += len(event.token_ids)
            finished += event.finish_reason in ("stop", "length")
            watch.check_ids(event.token_ids)

        while watch.steps < steps:
            vocab = engine.info.vocab_size
            submits = [
                _request(f"soak-{requests + i}", rng, vocab, prompt_lengths, max_tokens)
                for i in range(wave)
            ]
            engine.collect(submits, note)
            requests += wave
            progress(f"{watch.steps} steps, {tokens} tokens, {watch.faults} faults")
        stats = engine.stats
    return {
        "mode": mode,
        "steps": watch.steps,
        "requests": requests,
        "finished": finished,
        "tokens": tokens,
        "preemptions": stats.preemptions,
        "faults": watch.faults,
        "first_faults": watch.first_faults,
        "checked": watch.checked,
        "batches": dict(sorted(watch.batches.items())),
        "memory": watch.memory,
        "growth_bytes": watch.growth(settled_after),
    }


def _request(
    name: str, rng: random.Random, vocab: int, lengths: tuple[int, int], max_tokens: int
) -> Submit:
    """A request at temperature 1; every other one truncates its distribution."""
    truncates = rng.random() < 0.5
    params = SamplingParams(
        max_tokens=rng.randint(1, max_tokens),
        seed=rng.randrange(2**63),
        temperature=1.0,
        top_k=rng.choice((0, 20, 200)) if truncates else 0,
        top_p=rng.choice((0.9, 1.0)) if truncates else 1.0,
    )
    prompt = rng.choices(range(vocab), k=rng.randint(*lengths))
    return Submit(request_id=name, prompt_ids=prompt, params=params)


class Watch:
    """Checks what goes into every step and what comes out; finds are counted, not raised.

    Attributes:
        steps: decode steps seen.
        faults: values out of bounds.
        first_faults: what the first of them were.
        checked: values looked at.
        batches: how often each batch size was decoded.
        memory: a record every `sample_every` steps.
    """

    def __init__(self, sample_every: int) -> None:
        self._every = sample_every
        self._tables: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        self.steps = self.faults = self.checked = 0
        self.first_faults: list[str] = []
        self.batches: dict[int, int] = {}
        self.memory: list[dict[str, int]] = []

    def install(self, runner: Runner) -> None:
        """Wrap a runner's `launch`; an `OnReady`."""
        self._runner, pair = runner, runner.pair
        settings, geometry = pair.settings, pair.settings.geometry
        self._valid = settings.valid_vocab
        self._vocab = settings.target.vocab_size
        self._slots = runner.state.page_table.shape[0] - 1
        self._pages, self._page_size = pair.num_pages, pair.page_size
        self._model_len, self._block = settings.max_model_len, geometry.verify_rows
        launch = runner.launch

        def watched(plan: StepPlan) -> Pending:
            self._check_plan(plan)
            # A slot may have gone to another request by the time the result is read.
            owners = dict(self._tables)
            pending = launch(plan)
            wait = pending.result

            def result() -> StepResult:
                outcome = wait()
                self._check_result(plan, outcome, owners)
                return outcome

            pending.result = result  # type: ignore[method-assign]
            return pending

        runner.launch = watched  # type: ignore[method-assign]

    def check_ids(self, ids: list[int]) -> None:
        """Ids that a request was given."""
        self._within("emitted id", ids, 0, self._valid)

    def growth(self, settled_after: int) -> int | None:
        """Most bytes allocated later on above the first record from `settled_after` steps on."""
        late = [m["allocated"] for m in self.memory if m["steps"] >= settled_after]
        return max(late) - late[0] if late else None

    def _within(self, what: str, values: list[int], least: int, limit: int) -> None:
        self.checked += len(values)
        for value in values:
            if not least <= value < limit:
                self._fault(f"{what} {value} is not in {least}…{limit - 1}")

    def _fault(self, text: str) -> None:
        self.faults += 1
        if len(self.first_faults) < 20:
            self.first_faults.append(f"step {self.steps}: {text}")

    def _check_plan(self, plan: StepPlan) -> None:
        for setup in plan.setups:
            self._within("slot", [setup.slot], 0, self._slots)
            self._tables[setup.slot] = []
            self._committed[setup.slot] = setup.start
        width = self._runner.state.page_table.shape[1]
        for slot, first, pages in plan.pages:
            self._within("page", pages, 1, self._pages)
            self._within("place in a page table", [first, first + len(pages) - 1], 0, width)
            if first != len(self._tables[slot]):
                self._fault(f"slot {slot} has {len(self._tables[slot])} pages, not {first}")
            self._tables[slot].extend(pages)
        for chunk in plan.prefill:
            self._within("prompt id", chunk.token_ids, 0, self._vocab)
            self._covered(chunk.slot, chunk.start + len(chunk.token_ids))
        self._within("slot", plan.decode, 0, self._slots)
        self._within("rows", [plan.rows], 1, self._block + 1)
        for slot in plan.decode:
            self._covered(slot, self._committed.get(slot, 0) + plan.rows)
        active = [*plan.decode, *{chunk.slot for chunk in plan.prefill} - {*plan.decode}]
        owned = [page for slot in active for page in self._tables.get(slot, [])]
        if len(set(owned)) < len(owned):
            self._fault("two slots share a page, or a slot comes twice")

    def _covered(self, slot: int, length: int) -> None:
        """Positions below `length` must have pages and lie within the context."""
        longest = self._model_len + self._block
        self._within("position", [length - 1], 0, longest + self._block)
        if len(self._tables.get(slot, [])) * self._page_size < min(length, longest):
            self._fault(f"slot {slot} has no page for position {length - 1}")

    def _check_result(
        self, plan: StepPlan, outcome: StepResult, owners: dict[int, list[int]]
    ) -> None:
        for chunk, token in zip(plan.prefill, outcome.sampled, strict=True):
            self._within("sampled id", [] if token is None else [token], 0, self._valid)
            if self._tables[chunk.slot] is owners[chunk.slot]:
                self._committed[chunk.slot] = chunk.start + len(chunk.token_ids)
        for slot, decoded in zip(plan.decode, outcome.decoded, strict=True):
            self._within("picked id", decoded.picked, 0, self._valid)
            self._within("accepted count", [decoded.accepted], 0, plan.rows)
            if self._tables[slot] is owners[slot]:
                self._committed[slot] += decoded.accepted + 1
            if decoded.fault:
                self._fault(f"slot {slot} has NaN logits")
        if plan.decode:
            self.steps += 1
            batch = len(plan.decode)
            self.batches[batch] = self.batches.get(batch, 0) + 1
            if self.steps % self._every == 0:
                self._record()

    def _record(self) -> None:
        """Memory in bytes, and what the device's own tables hold."""
        state, cuda = self._runner.state, self._runner.pair.device.type == "cuda"
        longest = self._model_len + 2 * self._block
        self._within("start on the device", state.start.tolist(), 0, longest + 1)
        pages = [int(state.page_table.min()), int(state.page_table.max())]
        self._within("page on the device", pages, 0, self._pages)
        self.memory.append(
            {
                "steps": self.steps,
                "allocated": torch.cuda.memory_allocated() if cuda else 0,
                "reserved": torch.cuda.memory_reserved() if cuda else 0,
                "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
