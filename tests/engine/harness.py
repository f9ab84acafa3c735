"""Runs losslessness cases: references once, one engine for many cases, counts on the way."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path

from dflash_serve.cache.paged import page_bytes
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.sampling import SamplingParams
from tests.engine.cases import SAMPLINGS, Case, EngineKey, by_engine
from tests.engine.drafting import Switched
from tests.engine.neartie import count_difference
from tests.engines import ids_of, run, start
from tests.tiny import VOCAB, TinyPair

__all__ = ["Harness", "Tally", "accepted_lengths", "engine_config", "prompts", "small_pool_gib"]

PAGE = 8
MAX_LEN = 256
SHORT, LONG = 40, 150
_SPARE = 17  # known ids past the longest output, for blocks that reach over its end


def prompts(count: int = 7, seed: int = 5) -> list[list[int]]:
    """Random prompts whose lengths lie around page and chunk boundaries."""
    generator = random.Random(seed)
    lengths = [1, 16, 25, 3, 40, 31, 9]
    return [
        [generator.randrange(2, 290) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def small_pool_gib(layers: int, pages: float, kv_heads: int = 4) -> float:
    """Memory of so many pages of the tiny models."""
    return pages * page_bytes(layers, PAGE, kv_heads, 16, 4) / 2**30


def engine_config(
    pair: TinyPair, *, tp: int = 1, draft: bool = True, pages: int | None = None, **fields: object
) -> EngineConfig:
    """A tiny pair's engine; `pages` bounds the pool, which otherwise holds all it could need."""
    kv_heads = max(1, 4 // tp)
    settings = {
        "target": pair.target,
        "draft": pair.draft if draft else None,
        "tensor_parallel_size": tp,
        "executor": "inproc" if tp == 1 else "mp",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "page_size": PAGE,
        "threads": 1,
        "hang_timeout_s": 300.0,
    } | fields
    if pages is not None:
        settings["kv_cache_gib"] = small_pool_gib(6 if draft else 4, pages + 0.5, kv_heads)
    return EngineConfig(**settings)  # type: ignore[arg-type]


def accepted_lengths(events: Iterable[TokenEvent]) -> list[int]:
    """Accepted drafts of every decode step that was not cut short by the request's end."""
    return [e.accepted for e in events if e.drafted and e.finish_reason is None]


@dataclasses.dataclass
class Tally:
    """What a set of cases brought.

    Attributes:
        accepted: block → accepted length → times.
        near_ties: outputs that differ where the scores of both ids are within rounding.
    """

    cases: int = 0
    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    accepted: dict[int, collections.Counter[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )

    def rare(self, least: int) -> dict[int, list[int]]:
        """Block → accepted lengths seen fewer than `least` times."""
        return {
            block: missing
            for block, seen in self.accepted.items()
            if (missing := [a for a in range(block) if seen[a] < least])
        }

    def text(self) -> str:
        """A summary to print."""
        lines = [
            f"{self.cases} cases, {self.requests} requests, {self.tokens} tokens, "
            f"{self.preemptions} preemptions, {self.cached_tokens} cached prompt tokens, "
            f"{self.near_ties} near ties"
        ]
        for block, seen in sorted(self.accepted.items()):
            counts = " ".join(f"{a}:{seen[a]}" for a in range(block))
            lines.append(f"block {block:2d}, accepted length:times  {counts}")
        return "\n".join(lines)


class Harness:
    """Plain decoding once per family and sampling, then any number of cases against it."""

    def __init__(self, pairs: dict[str, TinyPair], folder: Path) -> None:
        self._pairs = pairs
        self.control = folder / "behaviour"
        self._plain: dict[str, dict[str, list[int]]] = {}
        self.prompts = prompts()
        self.tally = Tally()

    def submits(self, sampling: str, max_tokens: int, salt: str = "") -> list[Submit]:
        """One request per prompt; the seed tells sampling and prompt."""
        index = list(SAMPLINGS).index(sampling)
        return [
            Submit(
                request_id=f"{sampling}-{i}",
                prompt_ids=prompt,
                params=SamplingParams(
                    max_tokens=max_tokens,
                    seed=1000 * index + i,
                    ignore_eos=True,
                    **SAMPLINGS[sampling],  # type: ignore[arg-type]
                ),
                cache_salt=salt,
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def plain(self, family: str) -> dict[str, list[int]]:
        """Request id → ids of an engine without a draft."""
        if family not in self._plain:
            submits = [s for name in SAMPLINGS for s in self.submits(name, LONG + _SPARE)]
            config = engine_config(self._pairs[family], draft=False, max_running=28)
            outcome = run(config, submits)
            self._plain[family] = {
                s.request_id: ids for s, ids in zip(submits, outcome.ids, strict=True)
            }
        return self._plain[family]

    def run(self, cases: Iterable[Case]) -> Tally:
        """Run cases, grouped so that each engine starts once; returns the tally so far."""
        for key, group in by_engine(cases).items():
            engine = self.start(key)
            try:
                before = self.tally.cached_tokens
                for case in group:
                    self._run_case(engine, case)
                if key.small_pool:
                    assert engine.stats.preemptions > 0, f"{key} never ran out of pages"
                elif any(case.warm for case in group):
                    assert self.tally.cached_tokens > before
                assert engine.stats.pages_used == 0
                self.tally.preemptions += engine.stats.preemptions
            finally:
                engine.shutdown()
        return self.tally

    def start(self, key: EngineKey) -> EngineClient:
        """The engine of some cases."""
        plain = self.plain(key.family)
        known = {
            s.params.seed: s.prompt_ids + plain[s.request_id]
            for name in SAMPLINGS
            for s in self.submits(name, 1)
        }
        config = engine_config(
            self._pairs[key.family],
            tp=key.tp,
            pages=-(-(MAX_LEN + 16) // PAGE) + 1 if key.small_pool else None,
            prefill_chunk=key.chunk,
            block_size=key.block,
        )
        return start(config, Switched(known, VOCAB, self.control).install)

    def _run_case(self, engine: EngineClient, case: Case) -> None:
        self.control.write_text(case.drafter)
        short = SHORT if case.engine.tp == 1 else SHORT // 2
        max_tokens = LONG if case.drafter == "half" else short
        submits = self.submits(case.sampling, max_tokens, salt=case.name)
        if case.warm:
            engine.collect(self.submits(case.sampling, 1, salt=case.name))
        if case.batch == 1:
            some = submits[2:4]
            events = {k: v for s in some for k, v in engine.collect([s]).items()}
        else:
            events = engine.collect(submits)
        self._count(case, submits, events)

    def _count(
        self, case: Case, submits: list[Submit], events: dict[str, list[TokenEvent]]
    ) -> None:
        tally, plain = self.tally, self.plain(case.engine.family)
        tally.cases += 1
        for submit in (s for s in submits if s.request_id in events):
            mine = events[submit.request_id]
            expected = plain[submit.request_id][: submit.params.max_tokens]
            got = ids_of(mine)
            assert mine[-1].finish_reason == "length", f"{case.name}: {mine[-1]}"
            folder = self._pairs[case.engine.family].target
            tally.near_ties += count_difference(folder, submit, expected, got)
            tally.requests += 1
            tally.tokens += len(got)
            tally.cached_tokens += mine[0].cached_tokens or 0
            tally.accepted[case.engine.block].update(accepted_lengths(mine))
            if case.drafter == "perfect" and got == expected:
                assert set(accepted_lengths(mine)) <= {case.engine.block - 1}
