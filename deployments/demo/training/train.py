"""The training loop of the draft."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .accept import measure, tokens_per_step
from .draft import Draft, initialise, save_draft
from .loss import HeadLoss, row_weights
from .optim import Optimiser
from .settings import SEED, TrainSettings
from .target import Target


class Conversations:
    """All conversations on the device, drawn in batches of one length class."""

    def __init__(self, path: Path, settings: TrainSettings, device: torch.device) -> None:
        data = np.load(path)
        lengths = data["lengths"]
        self.settings, self.device = settings, device
        self.tokens = torch.from_numpy(data["tokens"].astype(np.int32)).to(device)
        self.lengths = torch.from_numpy(lengths.astype(np.int64)).to(device)
        self.starts = torch.from_numpy(data["starts"].astype(np.int64)).to(device)
        self.offsets = torch.cumsum(self.lengths, 0) - self.lengths
        self.generator = torch.Generator(device=device).manual_seed(SEED)
        self.host = np.random.default_rng(SEED)
        floors = (0, *settings.lengths[:-1])
        self.members = [
            torch.from_numpy(((lengths > low) & (lengths <= high)).nonzero()[0]).to(device)
            for low, high in zip(floors, settings.lengths, strict=True)
        ]
        sizes = np.array([len(m) for m in self.members], dtype=float)
        self.shares = sizes / sizes.sum()
        self.orders = [m[:0] for m in self.members]

    def _next(self, bucket: int) -> Tensor:
        """Return the next members of a bucket, reshuffled after every pass."""
        count, members = self.settings.conversations, self.members[bucket]
        while len(self.orders[bucket]) < count:
            order = torch.randperm(len(members), generator=self.generator, device=self.device)
            self.orders[bucket] = torch.cat((self.orders[bucket], members[order]))
        chosen, self.orders[bucket] = (
            self.orders[bucket][:count],
            self.orders[bucket][count:],
        )
        return chosen

    def batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids ``[N, L]``, anchors ``[N, A]``, labels and validity ``[N, A, B - 1]``."""
        settings = self.settings
        size, blocks = settings.draft.block_size, settings.anchors
        bucket = int(self.host.choice(len(self.shares), p=self.shares))
        length = settings.lengths[bucket]
        chosen = self._next(bucket)
        lengths, starts = self.lengths[chosen], self.starts[chosen]
        column = torch.arange(length + size, device=self.device)
        inside = column < lengths[:, None]
        place = self.offsets[chosen][:, None] + torch.where(inside, column, 0)
        ids = torch.where(inside, self.tokens[place].long(), 0)
        noise = torch.rand(len(chosen), blocks, generator=self.generator, device=self.device)
        steps = (torch.arange(blocks, device=self.device) + noise) / blocks
        span = (lengths - 1 - starts)[:, None]
        anchors = starts[:, None] + (steps * span).long().clamp(max=span - 1)
        places = anchors[..., None] + torch.arange(1, size, device=self.device)
        labels = ids.gather(1, places.flatten(1)).view_as(places)
        return ids[:, :length], anchors, labels, places < lengths[:, None, None]


@dataclass
class Benchmark:
    """Prompts and greedy answers of one evaluation set, as token ids."""

    name: str
    prompts: list[list[int]]
    answers: list[list[int]]


def schedule(progress: float, warmup: float) -> float:
    """Warm up, stay, then fall linearly to zero over the last half."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, max(0.0, (1.0 - progress) / 0.5))


class Trainer:
    """Holds the draft, its optimiser and its data."""

    def __init__(
        self,
        target: Target,
        data: Conversations,
        settings: TrainSettings,
        steps: int,
        seconds: float = 0,
    ) -> None:
        torch.manual_seed(SEED)
        self.target, self.data, self.settings, self.steps = target, data, settings, steps
        self.draft = Draft(target, settings.draft)
        self.draft.to(target.device)
        ids = data.batch()[0]
        sample = target.features(ids, settings.draft.target_layer_ids)[:, 32:160].flatten(0, 1)
        initialise(self.draft, target, sample)
        self.optimiser = Optimiser(
            self.draft,
            settings.optimizer,
            settings.learning_rate,
            settings.adam_learning_rate,
            settings.weight_decay,
        )
        rows = settings.draft.block_size - 1
        self.weights = row_weights(rows, settings.gamma, target.device)
        self.done, self.seconds, self.began = 0, seconds, time.monotonic()

    def step(self) -> tuple[Tensor, Tensor]:
        """Train on one batch; return loss and mean accepted drafts."""
        settings = self.settings
        ids, anchors, labels, valid = self.data.batch()
        features = self.target.features(ids, settings.draft.target_layer_ids)
        hidden = self.draft(features, self.target.embedding, ids.gather(1, anchors), anchors)
        loss, accepted = HeadLoss.apply(
            hidden[:, :, 1:].flatten(0, 1),
            self.target.embedding,
            labels.flatten(0, 1),
            valid.flatten(0, 1),
            self.weights,
            settings.reach,
        )
        loss.backward()
        progress = self.progress()
        self.optimiser.step(schedule(progress, settings.warmup), progress)
        self.done += 1
        return loss.detach(), accepted.mean()

    def progress(self) -> float:
        """Return the share of the steps, or of the seconds, that is used up."""
        if self.seconds:
            return min(1.0, (time.monotonic() - self.began) / self.seconds)
        return self.done / self.steps

    def figures(self, benchmarks: list[Benchmark]) -> dict[str, float]:
        """Return tokens per step for each evaluation set."""
        return {
            b.name: round(
                tokens_per_step(measure(self.target, self.draft, b.prompts, b.answers)), 4
            )
            for b in benchmarks
        }


def train(
    trainer: Trainer,
    benchmarks: list[Benchmark],
    folder: Path,
    evaluate_every: int,
) -> list[dict[str, float]]:
    """Run all steps, saving and evaluating regularly; return the log."""
    log: list[dict[str, float]] = []
    began = time.monotonic()
    sums: list[tuple[Tensor, Tensor]] = []
    finished = False
    while not finished:
        sums.append(trainer.step())
        finished = trainer.progress() >= 1.0
        if finished or trainer.done % evaluate_every == 0:
            loss, accepted = (float(torch.stack(s).mean()) for s in zip(*sums, strict=True))
            sums = []
            entry = {
                "step": trainer.done,
                "seconds": round(time.monotonic() - began, 1),
                "loss": round(loss, 4),
                "train_tokens_per_step": round(1 + accepted, 4),
                **trainer.figures(benchmarks),
            }
            log.append(entry)
            print("train:", json.dumps(entry), flush=True)
            save_draft(trainer.draft, trainer.target, folder)
            (folder / "log.json").write_text(json.dumps(log, indent=1))
    return log
