"""Prompts for the benchmarks: a file of the user's, or a few of our own."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_serve.api.codec import TextCodec
from dflash_serve.errors import ConfigError

__all__ = ["load_prompts"]

_OWN = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours? Show the steps.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a short e-mail to a colleague who helped you finish a project in time.",
    "Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?",
    "List the planets of the solar system with one fact about each.",
    "Write a Python class for a stack with push, pop and peek.",
)


def load_prompts(codec: TextCodec, path: Path | None, limit: int | None) -> list[list[int]]:
    """Prompts as ids, through the chat template where the checkpoint has one.

    Args:
        path: one JSON string, or object with a "prompt", per line; None takes a few of our own.
        limit: at most this many.

    Raises:
        ConfigError: an unreadable file or line.
    """
    texts = list(_OWN) if path is None else _read(path)
    texts = texts[:limit]
    if not codec.has_chat_template:
        return [codec.encode(text) for text in texts]
    return [codec.encode_chat([{"role": "user", "content": text}]) for text in texts]


def _read(path: Path) -> list[str]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a file with one JSON prompt per line")
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number} is not JSON: {error}") from error
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ConfigError(f'{path}:{number} holds no text; use "…" or {{"prompt": "…"}}')
        texts.append(text)
    return texts
