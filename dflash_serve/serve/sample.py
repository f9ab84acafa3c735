"""One question to a running server, with what its answer cost; standard library only."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from typing import Any

__all__ = ["Answer", "ask", "curl_line"]

QUESTION = "Write a Python function that returns the n-th Fibonacci number."
_MAX_TOKENS = 96
_TIMEOUT_S = 300.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its figures.

    Attributes:
        steps: verify steps the answer took; 0 when the server decodes plainly.
        step_tokens: tokens those steps gave, the first token of the answer not among them.
    """

    question: str
    text: str
    tokens: int
    seconds: float
    steps: int
    step_tokens: int

    def figures(self) -> str:
        """One line of figures."""
        line = f"{self.tokens} tokens in {self.seconds:.1f} s ({self.tokens / self.seconds:.1f}/s)"
        if self.steps:
            per_step = self.step_tokens / self.steps
            line += f", {per_step:.2f} tokens per verify step over {self.steps} steps"
        return line


def curl_line(url: str, model: str) -> str:
    """A command that asks the same question from a shell."""
    body = json.dumps(_body(model) | {"stream": True})
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body}'"
    )


def ask(url: str, model: str) -> Answer:
    """Ask the sample question, greedily; the server must be otherwise idle for exact figures."""
    before = _step_counts(url)
    started = time.monotonic()
    reply = _call(f"{url}/v1/chat/completions", _body(model))
    seconds = time.monotonic() - started
    after = _step_counts(url)
    return Answer(
        question=QUESTION,
        text=reply["choices"][0]["message"]["content"],
        tokens=reply["usage"]["completion_tokens"],
        seconds=seconds,
        steps=after[0] - before[0],
        step_tokens=after[1] - before[1],
    )


def _body(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }


def _step_counts(url: str) -> tuple[int, int]:
    """Blocks verified and tokens they committed, over all replicas; plain steps left out."""
    replicas = _call(f"{url}/server_info")["replicas"]
    drafting = [
        counts
        for replica in replicas
        for rows, counts in replica["stats"]["by_length"].items()
        if int(rows) > 1
    ]
    return sum(c["drafts"] for c in drafting), sum(c["emitted"] for c in drafting)


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)
