"""Tokens per step of a draft on the target's own greedy answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .draft import Draft
from .generate import repeats
from .target import Target


@dataclass(frozen=True)
class Walk:
    """What one reply costs: tokens emitted by verify steps, steps, and whether it loops."""

    emitted: int
    steps: int
    looping: bool


def walk(hits: list[int], answer: int) -> tuple[int, int]:
    """Count (emitted, steps) when the block at token ``s`` has ``hits[s]`` right drafts."""
    at, steps = 0, 0
    while at < answer - 1:
        at += min(hits[at] + 1, answer - 1 - at)
        steps += 1
    return max(answer - 1, 0), steps


@torch.no_grad()
def hits_everywhere(
    target: Target, draft: Draft, rows: list[tuple[list[int], list[int]]]
) -> list[list[int]]:
    """Count the leading right drafts for a block at every answer token of each (prompt, answer)."""
    size, device = draft.settings.block_size, target.device
    blocks = max(len(answer) for _, answer in rows)
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), length + size, dtype=torch.int64)
    for index, (prompt, answer) in enumerate(rows):
        ids[index, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    starts = torch.tensor([len(prompt) for prompt, _ in rows])[:, None]
    ends = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])[:, None]
    anchors = torch.minimum(starts + torch.arange(blocks), ends - 1).to(device)
    ids, ends = ids.to(device), ends.to(device)
    features = target.features(ids[:, :length], draft.settings.target_layer_ids)
    hidden = draft(features, target.embedding, ids.gather(1, anchors), anchors)
    places = anchors[..., None] + torch.arange(1, size, device=device)
    labels = ids.gather(1, places.flatten(1)).view_as(places)
    guesses = _argmax(hidden[:, :, 1:].flatten(0, 2), target.embedding).view_as(places)
    right = (guesses == labels) & (places < ends[..., None])
    counts = right.int().cumprod(-1).sum(-1).cpu().tolist()
    return [row[: len(answer)] for row, (_, answer) in zip(counts, rows, strict=True)]


def _argmax(hidden: Tensor, head: Tensor, rows: int = 8192) -> Tensor:
    return torch.cat([F.linear(part, head).argmax(-1) for part in hidden.split(rows)])


def measure(
    target: Target,
    draft: Draft,
    prompts: list[list[int]],
    answers: list[list[int]],
    batch: int = 16,
) -> list[Walk]:
    """Walk every reply; long prompts are batched together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    training = draft.training
    draft.eval()
    walks: dict[int, Walk] = {}
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        rows = [(prompts[i], answers[i]) for i in chosen]
        for index, hits in zip(chosen, hits_everywhere(target, draft, rows), strict=True):
            answer = answers[index]
            walks[index] = Walk(*walk(hits, len(answer)), looping=repeats_list(answer))
    draft.train(training)
    return [walks[i] for i in range(len(prompts))]


def repeats_list(answer: list[int]) -> bool:
    """Tell whether the last 32 tokens of ``answer`` hold the same 8-gram twice."""
    return repeats(torch.tensor(answer, dtype=torch.int32).numpy())


def tokens_per_step(walks: list[Walk]) -> float:
    """Pool: tokens emitted by verify steps over verify steps."""
    return sum(w.emitted for w in walks) / max(1, sum(w.steps for w in walks))
