"""Running engines in tests: one call from prompts to ids, and drafters with known behaviour."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.drafters import DecodeBlock
from dflash_serve.engine.inproc import InprocExecutor
from dflash_serve.engine.messages import EngineStats, Submit, TokenEvent
from dflash_serve.engine.mp import MpExecutor
from dflash_serve.engine.rank import OnReady
from dflash_serve.engine.runner import Runner
from dflash_serve.sampling import SamplingParams

__all__ = ["Outcome", "ScriptedDrafter", "ids_of", "requests", "run", "start"]


def start(config: EngineConfig, on_ready: OnReady | None = None) -> EngineClient:
    """A ready engine under the executor that `config` names."""
    executor = InprocExecutor if config.executor == "inproc" else MpExecutor
    return EngineClient(executor(config, on_ready), hang_timeout_s=config.hang_timeout_s)


def requests(
    prompts: Sequence[list[int]], *, max_tokens: int = 48, first_seed: int = 1000, **params: object
) -> list[Submit]:
    """One request per prompt, each with its own seed; ends only at its length."""
    fields = {"temperature": 0.0, "ignore_eos": True} | params
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, seed=first_seed + i, **fields),  # type: ignore[arg-type]
        )
        for i, prompt in enumerate(prompts)
    ]


def ids_of(events: Sequence[TokenEvent]) -> list[int]:
    """Output ids of one request."""
    return [token for event in events for token in event.token_ids]


@dataclasses.dataclass
class Outcome:
    """Ids per request, in the order submitted, and what the engine counted."""

    ids: list[list[int]]
    events: list[list[TokenEvent]]
    stats: EngineStats


def run(
    config: EngineConfig, submits: Sequence[Submit], on_ready: OnReady | None = None
) -> Outcome:
    """Start an engine, run requests together, stop it."""
    engine = start(config, on_ready)
    try:
        by_id = engine.collect(submits)
        events = [by_id[s.request_id] for s in submits]
        return Outcome([ids_of(e) for e in events], events, engine.stats)
    finally:
        engine.shutdown()


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes the known continuation of each request, spoiled with a given chance.

    Requests are told apart by their seed. Picklable: `ScriptedDrafter(...).install` is an OnReady.

    Attributes:
        tokens: seed → prompt and continuation.
        wrong: chance that a proposal is another id (0 perfect, 0.5 half-right, 1 random).
        valid: ids below it may be proposed.
    """

    tokens: dict[int, list[int]]
    wrong: float
    valid: int

    def install(self, runner: Runner) -> None:
        """Replace the runner's drafter."""
        runner.drafter = self

    def propose(self, block: DecodeBlock) -> Tensor:
        """[B, g − 1] ids."""
        rows = block.sampling.per_row()
        ids = [
            self._proposal(seed, position)
            for seed, position in zip(rows.seed.tolist(), rows.position.tolist(), strict=True)
        ]
        return torch.tensor(ids, device=block.anchor.device).view(block.slots.shape[0], -1)

    def _proposal(self, seed: int, position: int) -> int:
        known = self.tokens[seed]
        right = known[position] if position < len(known) else 0
        # A fixed hash, so that every rank and every batch spoils the same proposals.
        chance = ((seed * 1_000_003 + position) * 2_654_435_761 % 2**32) / 2**32
        return (right + 1 + position % 7) % self.valid if chance < self.wrong else right
