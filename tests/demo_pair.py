"""Where the demo pair lies, and a few prompts for it."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoTokenizer

from tests.tiny import TinyPair

__all__ = ["demo_pair", "demo_prompts"]

_USER_TURNS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "A shop sells pens at 3 dollars each. How much do 14 pens cost? Think step by step.",
    "List five uses of a paper clip.",
]


def demo_pair() -> TinyPair:
    """Folders of the prepared demo target and its draft; `make demo` prepares the target."""
    default = Path.home() / ".cache" / "dflash-serve" / "smollm2-135m-instruct"
    target = Path(os.environ.get("DFLASH_DEMO_TARGET", default))
    draft = Path(__file__).parents[1] / "deployments" / "demo" / "draft"
    for folder in (target, draft):
        assert (folder / "config.json").is_file(), f"{folder} is not there; run `make demo` first"
    return TinyPair(str(target), str(draft))


def demo_prompts(count: int) -> list[list[int]]:
    """User turns in the target's chat template, as ids."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair().target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in _USER_TURNS[:count]
    ]
