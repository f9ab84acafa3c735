"""A scripted engine and a small real tokenizer for tests of the API and the metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_serve.api.protocol import Delta, GenerationRequest
from dflash_serve.engine.messages import EngineInfo, EngineStats, Submit, TokenEvent
from dflash_serve.errors import EngineDeadError
from dflash_serve.sampling import SamplingParams

MODEL = "tiny"
END_OF_TEXT = 0
MAX_MODEL_LEN = 256
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a small brown fox that liked its own fox hole.",
]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system messages come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: characters outside the corpus take one token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write the tokenizer files of a checkpoint."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[0],
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def engine_info(**changes: Any) -> EngineInfo:
    """What a small started engine says about itself."""
    fields: dict[str, Any] = {
        "model_type": "qwen3",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 320,
        "eos_token_ids": [END_OF_TEXT],
        "verify_length": 8,
        "block_size": 8,
        "tensor_parallel_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "executor": "inproc",
        "num_pages": 64,
        "page_size": 16,
        "max_running": 8,
        "weight_bytes": 1,
        "kv_bytes": 1,
        "load_seconds": 0.1,
    }
    return EngineInfo(**{**fields, **changes})


class FakeEngine:
    """Emits given ids in blocks, with an engine's own limits applied inside the block.

    Args:
        output: ids the "model" would produce for any prompt.
        block: ids per event.
        hang_after: events after which nothing comes any more.
        die_after: events after which the engine is dead.
        error_after: events after which the request fails on its own.
        info: what the engine says about itself.
    """

    def __init__(
        self,
        output: list[int],
        block: int = 8,
        *,
        hang_after: int | None = None,
        die_after: int | None = None,
        error_after: int | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        self.output, self.block = output, block
        self.hang_after, self.die_after, self.error_after = hang_after, die_after, error_after
        self.info = info or engine_info()
        self.stats = EngineStats()
        self.health: Exception | None = None
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.trace_files: list[str] = []
        self.step_age_s = 0.0

    @property
    def outstanding(self) -> int:
        return len(self.running)

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    def trace(self, steps: int, *, timeout_s: float) -> list[str]:
        """`trace_files`, or the order where there are none."""
        if self.health is not None:
            raise self.health
        return self.trace_files or [f"{steps} in {timeout_s:g} s"]

    async def stream(self, submit: Submit) -> AsyncIterator[TokenEvent]:
        assert submit.request_id not in self.running
        self.submitted.append(submit)
        self.running.add(submit.request_id)
        finished = False
        try:
            for index, event in enumerate(self._events(submit)):
                await self._misbehave(index)
                if index == self.error_after:
                    event = TokenEvent(
                        request_id=submit.request_id, finish_reason="error", error="NaN logits"
                    )
                finished = event.finish_reason is not None
                self.stats.generated_tokens += len(event.token_ids)
                yield event
                if finished:
                    return
        finally:
            self.running.discard(submit.request_id)
            if not finished:
                self.aborted.append(submit.request_id)

    async def _misbehave(self, index: int) -> None:
        await asyncio.sleep(0)
        if index == self.hang_after:
            await asyncio.Event().wait()
        if index == self.die_after:
            raise EngineDeadError("rank 1 died")

    def _events(self, submit: Submit) -> list[TokenEvent]:
        params = submit.params
        ids = self.output[len(submit.emitted_ids) :]
        reason = "length"
        for i, token in enumerate(ids):
            ends = not params.ignore_eos and token in self.info.eos_token_ids
            if ends or token in params.stop_token_ids:
                ids, reason = ids[: i + 1], "stop"
                break
        limit = params.max_tokens - len(submit.emitted_ids)
        if len(ids) > limit:
            ids, reason = ids[:limit], "length"
        blocks = [ids[i : i + self.block] for i in range(0, len(ids), self.block)]
        events = [
            TokenEvent(
                request_id=submit.request_id,
                token_ids=block,
                drafted=self.block - 1,
                accepted=len(block) - 1,
            )
            for block in blocks
        ]
        events[0].cached_tokens = 0
        events[-1].finish_reason = reason  # type: ignore[assignment]
        return events


def completion(prompt: str | list[int] = "The fox", **changes: Any) -> GenerationRequest:
    """A completion request to the text side; sampling fields go in by name."""
    names = ("stop", "emitted_ids", "model", "request_id")
    own = {name: changes.pop(name) for name in names if name in changes}
    params = SamplingParams(**{"max_tokens": 0, **changes})
    fields = {"request_id": "r", "model": MODEL, "prompt": prompt, "params": params, **own}
    return GenerationRequest(**fields)


async def gather(deltas: AsyncIterator[Delta]) -> list[Delta]:
    """All deltas of a stream."""
    return [delta async for delta in deltas]
