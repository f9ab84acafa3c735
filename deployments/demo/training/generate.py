"""Conversations out of the target itself: sampled user turns, greedy answers.

Every slot of a large batch walks through the chat template on the device: the fixed prefix, an
opening, a sampled user turn, the template's bridge to the answer, then the greedy answer. A slot
that is done is harvested and given a new opening; the prefix's keys and values stay in place, so
there is no prefill. One step for all slots is one replay of a CUDA graph.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .fused import add_norm, gate
from .kernels import attend, pick, rope_write
from .ops import rms_norm
from .prompts import CHAT, CODE, CODE_WRAPPER, MATHS, draw
from .settings import SEED, DataSettings
from .target import Target

USER, BRIDGE, ANSWER, DONE = 0, 1, 2, 3
STEPS_PER_HARVEST = 8


@dataclass
class Template:
    """Token ids of the chat template around a user turn, and where sampled turns end."""

    prefix: list[int]
    bridges: list[list[int]]
    closers: Tensor

    @classmethod
    def read(cls, tokenizer: Any, vocabulary: int, eos: int) -> Template:
        """Take the pieces out of the tokenizer's own template."""

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "\0"}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split("\0")
        bridge = after.removeprefix(tokenizer.convert_ids_to_tokens(eos))
        closers = torch.zeros(3, vocabulary, dtype=torch.bool)
        closers[:, eos] = True
        for token in range(vocabulary):
            piece = tokenizer.decode([token])
            closers[CODE, token] |= '"""' in piece and '("""' not in piece
            closers[MATHS, token] |= piece.endswith("?")
        bridges = [encode(bridge), encode("\n```" + after), encode(after)]
        return cls(encode(before), bridges, closers)


class Generator:
    """Runs the slots."""

    def __init__(self, target: Target, tokenizer: Any, settings: DataSettings) -> None:
        self.target, self.settings = target, settings
        self.template = Template.read(tokenizer, target.embedding.shape[0], target.eos)
        self.encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        self.rng = random.Random(SEED)
        device, slots = target.device, settings.slots
        shape = (slots, target.kv_heads, settings.max_length, target.head_dim)
        self.keys = [torch.zeros(shape, device=device, dtype=target.dtype) for _ in target.layers]
        self.values = [torch.zeros_like(k) for k in self.keys]
        integer: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.tokens = torch.zeros(slots, settings.max_length, **integer)
        self.position = torch.zeros(slots, **integer)
        self.forced = torch.zeros(slots, **integer)
        self.kind = torch.zeros(slots, **integer)
        self.phase = torch.zeros(slots, **integer)
        self.bridge_at = torch.zeros(slots, **integer)
        self.answer_at = torch.zeros(slots, **integer)
        self.good = torch.zeros(slots, dtype=torch.bool, device=device)
        self.seed = torch.zeros((), dtype=torch.int32, device=device)
        self.closers = self.template.closers.to(device)
        longest = max(map(len, self.template.bridges))
        self.bridges = torch.tensor(
            [b + [0] * (longest - len(b)) for b in self.template.bridges], **integer
        )
        self.bridge_length = torch.tensor([len(b) for b in self.template.bridges], **integer)
        self.rows = torch.arange(slots, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pool: list[tuple[list[int], int]] = []
        self.refill(list(range(slots)), first=True)

    def stock(self, count: int) -> None:
        """Tokenise openings ahead of their use, up to ``count`` of them."""
        prefix, shares = self.template.prefix, self.settings.kind_shares
        while len(self.pool) < count:
            opening = draw(self.rng, shares)
            self.pool.append((prefix + self.encode(opening.text), opening.kind))

    def refill(self, slots: list[int], first: bool = False) -> None:
        """Give ``slots`` new openings; the prefix stays cached after the first time."""
        self.stock(len(slots))
        rows = self.pool[: len(slots)]
        del self.pool[: len(slots)]
        width = max(len(row) for row, _ in rows)
        packed = torch.tensor(
            [
                [*row, *([0] * (width - len(row))), len(row), kind, slot]
                for (row, kind), slot in zip(rows, slots, strict=True)
            ]
        ).to(self.target.device)
        index = packed[:, -1]
        self.tokens[index, :width] = packed[:, :width]
        self.forced[index] = packed[:, width]
        self.kind[index] = packed[:, width + 1]
        self.position[index] = 0 if first else len(self.template.prefix) - 1
        self.phase[index] = USER
        self.bridge_at[index] = 0
        self.answer_at[index] = 0

    def decode(self) -> Tensor:
        """Run the current token of every slot and return float32 logits."""
        target, position = self.target, self.position
        heads = target.heads + 2 * target.kv_heads
        x = F.embedding(self.tokens[self.rows, position], target.embedding)
        normed = rms_norm(x, target.layers[0].norm_in, target.eps)
        for index, layer in enumerate(target.layers):
            qkv = F.linear(normed, layer.qkv).view(-1, heads, target.head_dim)
            keys, values = self.keys[index], self.values[index]
            query = rope_write(qkv, (target.cos, target.sin), position, keys, values)
            mixed = F.linear(attend(query, keys, values, position).flatten(1), layer.out)
            normed, x = add_norm(mixed, x, layer.norm_post, target.eps)
            mlp = F.linear(gate(F.linear(normed, layer.gate_up)), layer.down)
            last = index + 1 == len(target.layers)
            weight = target.norm if last else target.layers[index + 1].norm_in
            normed, x = add_norm(mlp, x, weight, target.eps)
        if normed.is_cuda:
            return torch.mm(normed, target.embedding.t(), out_dtype=torch.float32)
        return F.linear(normed, target.embedding).float()

    def step(self) -> None:
        """Advance every slot by one token."""
        settings, phase = self.settings, self.phase
        following = self.position + 1
        opening = following < self.forced
        sampling = (phase == USER) & ~opening
        temperature = torch.where(sampling, settings.user_temperature, 0.0)
        picked = pick(self.decode(), temperature, settings.user_min_p, self.seed)
        bridging = phase == BRIDGE
        column = self.bridge_at.clamp(max=self.bridges.shape[1] - 1)
        token = torch.where(bridging, self.bridges[self.kind, column], picked)
        room = following.clamp(max=settings.max_length - 1)
        token = torch.where(opening, self.tokens[self.rows, room], token)

        closing = sampling & self.closers[self.kind, token]
        ended = sampling & (token == self.target.eos)
        kind = torch.where(ended, CHAT, self.kind)
        self.bridge_at.copy_(torch.where(bridging, self.bridge_at + 1, self.bridge_at))
        crossed = bridging & (self.bridge_at >= self.bridge_length[kind])
        answered = following - self.answer_at + 1
        stop = (phase == ANSWER) & (
            (token == self.target.eos) | (answered >= settings.max_answer_tokens)
        )
        reserve = settings.max_length - settings.max_answer_tokens - self.bridges.shape[1] - 1
        too_long = sampling & (
            (following - self.forced >= settings.max_user_tokens) | (following >= reserve)
        )
        empty = closing & (following - self.forced < settings.min_user_tokens)
        active = phase != DONE
        self.tokens[self.rows, room] = torch.where(active, token, self.tokens[self.rows, room])
        self.answer_at.copy_(torch.where(crossed, following + 1, self.answer_at))
        self.good.copy_(torch.where(active, stop, self.good))
        updated = torch.where(closing, BRIDGE, phase)
        updated = torch.where(crossed, ANSWER, updated)
        updated = torch.where(stop | empty | (too_long & ~closing), DONE, updated)
        self.kind.copy_(kind)
        self.phase.copy_(updated)
        self.position.copy_(torch.where(active, room, self.position))
        self.seed.add_(1)

    def capture(self) -> None:
        """Record one step as a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def advance(self, steps: int) -> None:
        """Run ``steps`` steps."""
        for _ in range(steps):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()

    def harvest(self) -> list[tuple[np.ndarray, int, int]]:
        """Collect finished conversations as (tokens, answer start, kind) and refill their slots."""
        done = (self.phase == DONE).nonzero().squeeze(1)
        if not len(done):
            return []
        columns = (self.position, self.answer_at, self.kind, self.good.long())
        facts = torch.stack([c[done] for c in columns], dim=1).cpu().tolist()
        tokens = self.tokens[done].to(torch.int32).cpu().numpy()
        self.refill(done.cpu().tolist())
        return [
            (tokens[row, : last + 1].astype(np.uint16), start, kind)
            for row, (last, start, kind, good) in enumerate(facts)
            if good
        ]


def repeats(tokens: np.ndarray, window: int = 32, gram: int = 8) -> bool:
    """Tell whether the last ``window`` tokens hold the same ``gram`` twice."""
    tail = tokens[-window:].tolist()
    grams = [tuple(tail[i : i + gram]) for i in range(len(tail) - gram + 1)]
    return len(set(grams)) < len(grams)


class Corpus:
    """Accepted conversations, deduplicated by prompt and free of evaluation prompts."""

    def __init__(
        self, settings: DataSettings, prefix: int, wrapper: list[int], held_out: list[list[int]]
    ) -> None:
        self.settings, self.prefix, self.wrapper = settings, prefix, wrapper
        self.gram = settings.held_out_gram
        counts = Counter(g for row in held_out for g in set(self._grams(row)))
        self.held_out = {gram for gram, rows in counts.items() if rows <= 3}
        self.overlaps = 0
        self.rows: list[np.ndarray] = []
        self.starts: list[int] = []
        self.kinds: list[int] = []
        self.seen: set[int] = set()
        self.answer_tokens = 0
        self.rng = random.Random(SEED + 1)

    def _grams(self, row: list[int]) -> list[tuple[int, ...]]:
        body = self.prefix + len(self.wrapper)
        first = body if row[self.prefix : body] == self.wrapper else self.prefix
        return [tuple(row[i : i + self.gram]) for i in range(first, len(row) - self.gram + 1)]

    def add(self, tokens: np.ndarray, start: int, kind: int) -> None:
        """Keep a conversation unless it is short, a duplicate, held out or (mostly) a loop."""
        answer = len(tokens) - start
        key = hash(tokens[:start].tobytes())
        if answer < self.settings.min_answer_tokens or key in self.seen:
            return
        self.seen.add(key)
        if self.held_out and not self.held_out.isdisjoint(self._grams(tokens[:start].tolist())):
            self.overlaps += 1
            return
        if repeats(tokens[start:]) and self.rng.random() > self.settings.keep_looping:
            return
        self.rows.append(tokens)
        self.starts.append(start)
        self.kinds.append(kind)
        self.answer_tokens += answer

    def save(self, path: Path) -> None:
        """Write everything as one archive, under its final name only when whole."""
        lengths = np.array([len(r) for r in self.rows], dtype=np.int32)
        partial = path.with_name(f"partial-{path.name}")
        np.savez(
            partial,
            tokens=np.concatenate(self.rows),
            lengths=lengths,
            starts=np.array(self.starts, dtype=np.int32),
            kinds=np.array(self.kinds, dtype=np.int8),
        )
        partial.replace(path)


def generate(
    target: Target,
    tokenizer: Any,
    settings: DataSettings,
    seconds: float,
    path: Path,
    held_out: list[list[int]],
) -> Corpus:
    """Make conversations for ``seconds``, none that shares a long run with ``held_out``."""
    torch.manual_seed(SEED)
    generator = Generator(target, tokenizer, settings)
    if target.device.type == "cuda":
        generator.capture()
    wrapper = generator.encode(CODE_WRAPPER)[:-1]
    corpus = Corpus(settings, len(generator.template.prefix), wrapper, held_out)
    began = time.monotonic()
    reported, steps, raw = 0.0, 0, 0
    harvested: list[tuple[np.ndarray, int, int]] = []
    while (elapsed := time.monotonic() - began) < seconds:
        generator.advance(STEPS_PER_HARVEST)
        steps += STEPS_PER_HARVEST
        generator.stock(settings.slots // 8)
        for tokens, start, kind in harvested:
            raw += 1
            corpus.add(tokens, start, kind)
        harvested = generator.harvest()
        if elapsed - reported > 15:
            reported = elapsed
            print(
                f"data: {elapsed:5.0f} s, {steps} steps, {raw} finished, {len(corpus.rows)} kept, "
                f"{corpus.answer_tokens / 1e6:.2f} M answer tokens, {corpus.overlaps} held out",
                flush=True,
            )
    corpus.save(path)
    return corpus
