"""Reading a streamed completion in the background."""

from __future__ import annotations

import json
import threading
from typing import NamedTuple

import httpx


class Answer(NamedTuple):
    """A whole completion, as a client puts it together; equal ones cannot be told apart."""

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: dict | None


class StreamReader(threading.Thread):
    """Streams one completion to its end; `begun` is set by the first event."""

    def __init__(self, url: str, body: dict) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = body | {"stream": True}
        self._lines: list[str] = []
        self.begun = threading.Event()
        self.start()

    @property
    def lines_read(self) -> int:
        """Lines that have come so far; two to an event."""
        return len(self._lines)

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as stream:
            for line in stream.iter_lines():
                self._lines.append(line)
                self.begun.set()

    def events(self, timeout_s: float) -> list[dict]:
        """Every event, once the stream has ended."""
        self.join(timeout=timeout_s)
        assert not self.is_alive(), "the stream did not end"
        return [json.loads(line[6:]) for line in self._lines if line.startswith("data: {")]

    def answer(self, timeout_s: float) -> Answer:
        """What the client got, once the stream has ended well."""
        events = self.events(timeout_s)
        failed = [event["error"] for event in events if "error" in event]
        assert not failed, failed
        choices = [event["choices"][0] for event in events if event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices]
        assert [reason is not None for reason in reasons].count(True) == 1
        return Answer(
            text="".join(choice["text"] for choice in choices),
            token_ids=[i for choice in choices for i in choice.get("token_ids", [])],
            finish_reason=reasons[-1],
            usage=events[-1].get("usage"),
        )
