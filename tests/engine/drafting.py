"""Drafters with known behaviour: switched by a file, recording, and replaying target scores."""

from __future__ import annotations

import collections
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.engine.drafters import DecodeBlock, Drafter
from dflash_serve.engine.runner import Runner
from dflash_serve.parallel.pick import pick

__all__ = ["Recorder", "Replay", "Switched", "read_records"]

_GOLDEN = 2_654_435_761


def _mixed(*numbers: int) -> int:
    """A fixed 32-bit hash: the same proposals on every rank and in every batch."""
    value = 0
    for number in numbers:
        value = (value ^ number) * _GOLDEN % 2**32
        value ^= value >> 15
    return value


class Switched:
    """Does what a file says: "real", "perfect", "half" or "random". `install` is an OnReady.

    "half" is right up to a row that moves by one from block to block, so that every accepted
    length comes up equally often.

    Args:
        known: seed → prompt and continuation.
        valid: ids below it may be proposed.
        control: file that holds the behaviour; written while the engine is idle.
    """

    def __init__(self, known: dict[int, list[int]], valid: int, control: Path) -> None:
        self._known = known
        self._valid = valid
        self._control = control
        self._blocks: collections.Counter[int] = collections.Counter()
        self._real: Drafter | None = None

    def install(self, runner: Runner) -> None:
        """Step in front of the runner's drafter."""
        self._real = runner.drafter
        runner.drafter = self

    def propose(self, block: DecodeBlock) -> Tensor:
        """[B, g − 1] ids."""
        behaviour = self._control.read_text()
        if behaviour == "real":
            assert self._real is not None
            return self._real.propose(block)
        batch = block.slots.shape[0]
        seeds = block.sampling.seed.tolist()
        positions = block.sampling.per_row().position.view(batch, -1).tolist()
        rows = [self._row(behaviour, s, p) for s, p in zip(seeds, positions, strict=True)]
        return torch.tensor(rows, device=block.anchor.device)

    def _row(self, behaviour: str, seed: int, positions: list[int]) -> list[int]:
        if behaviour == "random":
            return [_mixed(seed, p, 1) % self._valid for p in positions]
        known = self._known[seed]
        right = [known[p] if p < len(known) else 0 for p in positions]
        if behaviour == "perfect":
            return right
        self._blocks[seed] += 1
        wrong = (self._blocks[seed] + seed) % (len(positions) + 1)
        if wrong < len(right):
            right[wrong] = (right[wrong] + 1) % self._valid
        return right


class Recorder:
    """Passes on another drafter's proposals and keeps them, with the draft's context pages.

    Each rank writes `rank<r>.pt` in `folder` after every step. Requests are told apart by seed.
    """

    def __init__(self, folder: Path, inner: Switched | None = None) -> None:
        self._folder = folder
        self._inner = inner
        self._proposals: dict[int, dict[int, list[int]]] = collections.defaultdict(dict)
        self._context: dict[int, Tensor] = {}

    def install(self, runner: Runner) -> None:
        """Step in front of the runner's drafter."""
        if self._inner is not None:
            self._inner.install(runner)
        assert runner.drafter is not None
        self._drafter, self._pair = runner.drafter, runner.pair
        runner.drafter = self

    def propose(self, block: DecodeBlock) -> Tensor:
        """[B, g − 1] ids of the drafter behind."""
        for i, seed in enumerate(self._seeds(block)):
            self._context[seed] = self._read(block, i)
        drafted = self._drafter.propose(block)
        for seed, start, ids in zip(
            self._seeds(block), block.batch.start.tolist(), drafted.tolist(), strict=True
        ):
            self._proposals[seed][start] = ids
        torch.save(
            (dict(self._proposals), self._context),
            self._folder / f"rank{self._pair.group.rank}.pt",
        )
        return drafted

    def _seeds(self, block: DecodeBlock) -> list[int]:
        seeds: list[int] = block.sampling.seed.tolist()
        return seeds

    def _read(self, block: DecodeBlock, i: int) -> Tensor:
        """[2 · layers, start, heads, width] keys and values of committed positions."""
        assert self._pair.draft_kv is not None
        length, size = int(block.batch.start[i]), self._pair.page_size
        table = block.batch.page_table[i, : -(-length // size)]
        parts = [p for layer in self._pair.draft_kv.layers for p in layer]
        return torch.stack([p[table].flatten(0, 1)[:length].clone() for p in parts])


def read_records(
    folder: Path, ranks: int
) -> tuple[dict[int, dict[int, list[int]]], dict[int, Tensor]]:
    """seed → start → proposals, and seed → context of all heads, from a `Recorder`'s files."""
    files = [torch.load(folder / f"rank{r}.pt") for r in range(ranks)]
    proposals = files[0][0]
    assert all(f[0] == proposals for f in files), "ranks proposed different ids"
    context = {seed: torch.cat([f[1][seed] for f in files], dim=2) for seed in files[0][1]}
    return proposals, context


class Replay:
    """A drafter whose row scores are recorded target logits, sent through the target's pick.

    Args:
        logits: seed → (first position, [n, vocabulary] logits of that position and the next ones).
    """

    def __init__(self, logits: dict[int, tuple[int, Tensor]]) -> None:
        self._logits = logits

    def install(self, runner: Runner) -> None:
        """Replace the runner's drafter."""
        self._shard, self._group = runner.pair.target.head.shard, runner.pair.group
        runner.drafter = self

    def propose(self, block: DecodeBlock) -> Tensor:
        """[B, g − 1] ids."""
        each = block.sampling.per_row()
        rows = zip(each.seed.tolist(), each.position.tolist(), strict=True)
        mine = slice(self._shard.first, self._shard.first + self._shard.rows)
        logits = torch.stack([self._row(seed, position)[mine] for seed, position in rows])
        drafted, _ = pick(logits, block.sampling, self._shard, self._group, noise=block.noise)
        return drafted.view(block.slots.shape[0], -1)

    def _row(self, seed: int, position: int) -> Tensor:
        first, rows = self._logits[seed]
        return rows[position - first]
