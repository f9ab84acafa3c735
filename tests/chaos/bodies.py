"""What the clients ask, and what they get when nothing happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .clients import Answer, Load
from .cluster import MODEL, until

__all__ = ["make_bodies", "undisturbed"]

_LENGTH = 240
_PROMPTS = (
    [5, 17, 200, 9],
    [250, 3, 3, 3, 41, 77],
    [20] * 40,
    list(range(30, 95)),
    [7, 8],
)


def make_bodies(url: str) -> list[dict[str, Any]]:
    """Requests of every kind, long enough for a fault to fall into their middle.

    Greedy and sampled ones, truncated ones, chats, and two with stop strings: one that ends the
    text shortly before its length, one that begins in the middle, is held back, and comes to
    nothing.
    """
    greedy = [_body(prompt, temperature=0) for prompt in _PROMPTS[:3]]
    sampled = [_body(p, temperature=1.0, seed=11 + n) for n, p in enumerate(_PROMPTS)]
    truncated = _body(_PROMPTS[1], temperature=0.7, seed=21, top_p=0.9, top_k=40)
    first = undisturbed(url, [sampled[1]])[0].text.split()
    stops = [" ".join(first[-12:-9]), f"{first[_LENGTH // 2]} t0 t0"]
    stopped = sampled[1] | {"stop": stops}
    chats = [
        _chat("t5 t17 t200 t9", temperature=0),
        _chat("t41 t42 t43", temperature=0.9, seed=31),
    ]
    return [*greedy, *sampled, truncated, stopped, *chats]


def undisturbed(url: str, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """Every body's answer; all run at the same time.

    Raises:
        RuntimeError: one did not end well.
    """
    load = Load(url, bodies, clients=len(bodies))
    until(lambda: len(load.records) >= len(bodies), "every body is asked", 30.0, poll_s=0.001)
    answers = {}
    for record in load.finish():
        if record.answer is None:
            raise RuntimeError(f"without any fault: {record.end}, {record.detail}")
        answers[record.body] = record.answer
    return [answers[n] for n in range(len(bodies))]


def _body(prompt: list[int], **changes: Any) -> dict[str, Any]:
    return _common() | {"prompt": prompt} | changes


def _chat(content: str, **changes: Any) -> dict[str, Any]:
    return _common() | {"messages": [{"role": "user", "content": content}]} | changes


def _common() -> dict[str, Any]:
    fields = {"model": MODEL, "max_tokens": _LENGTH, "ignore_eos": True}
    return fields | {"return_token_ids": True}
