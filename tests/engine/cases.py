"""The cases of the losslessness matrix, and a subset that covers every pair of choices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = [
    "SAMPLINGS",
    "Case",
    "EngineKey",
    "by_engine",
    "matrix",
    "pairwise",
    "pairwise_of",
    "rank_cases",
]

T = TypeVar("T")

SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "mixed": {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.05},
}


@dataclasses.dataclass(frozen=True)
class EngineKey:
    """What needs an engine of its own."""

    family: str
    block: int
    chunk: int
    small_pool: bool
    tp: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of a batch of requests."""

    engine: EngineKey
    sampling: str
    drafter: str
    batch: int
    warm: bool

    @property
    def name(self) -> str:
        """Readable and unique; also the salt that keeps the case's pages to itself."""
        e = self.engine
        pool = "small" if e.small_pool else "large"
        return (
            f"{e.family}-tp{e.tp}-block{e.block}-chunk{e.chunk}-{pool}-"
            f"{self.sampling}-{self.drafter}-batch{self.batch}-{'warm' if self.warm else 'cold'}"
        )


_CHOICES: dict[str, tuple[object, ...]] = {
    "family": ("qwen3", "llama"),
    "block": (8, 2, 16),
    "chunk": (4, 64),
    "small_pool": (False, True),
    "sampling": tuple(SAMPLINGS),
    "drafter": ("real", "perfect", "half", "random"),
    "batch": (1, 7),
    "warm": (False, True),
}


def matrix(tp: int) -> Iterator[Case]:
    """Every case of one width. One request alone never runs out of pages: left out."""
    for values in itertools.product(*_CHOICES.values()):
        chosen = dict(zip(_CHOICES, values, strict=True))
        if chosen["small_pool"] and chosen["batch"] == 1:
            continue
        names = ("family", "block", "chunk", "small_pool")
        key = EngineKey(**{n: chosen.pop(n) for n in names}, tp=tp)  # type: ignore[arg-type]
        yield Case(engine=key, **chosen)  # type: ignore[arg-type]


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """A small subset in which every pair of choices that occurs in `cases` occurs too."""
    return pairwise_of(cases, _fields)


def rank_cases(tp: int) -> list[Case]:
    """The pairwise cases of several ranks; prompts in small chunks are left to one rank where
    every step costs many waits of processes for each other."""
    return pairwise(case for case in matrix(tp) if tp == 2 or case.engine.chunk > 4)


def pairwise_of(cases: Iterable[T], fields: Callable[[T], dict[str, object]]) -> list[T]:
    """The same for anything whose choices `fields` tells."""
    left = {case: set(itertools.combinations(fields(case).items(), 2)) for case in cases}
    open_pairs = set().union(*left.values())
    chosen: list[T] = []
    while open_pairs:
        best = max(left, key=lambda case: len(left[case] & open_pairs))
        open_pairs -= left.pop(best)
        chosen.append(best)
    return chosen


def _fields(case: Case) -> dict[str, object]:
    fields = {**dataclasses.asdict(case.engine), **dataclasses.asdict(case)}
    del fields["engine"]
    return fields


def by_engine(cases: Iterable[Case]) -> dict[EngineKey, list[Case]]:
    """Cases grouped by the engine they need."""
    groups: dict[EngineKey, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.engine, []).append(case)
    return groups
