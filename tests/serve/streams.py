"""Reading a streamed completion in the background."""

from __future__ import annotations

import json
import threading

import httpx


class StreamReader(threading.Thread):
    """Streams one completion to its end; `begun` is set by the first event."""

    def __init__(self, url: str, body: dict) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = body | {"stream": True}
        self._lines: list[str] = []
        self.begun = threading.Event()
        self.start()

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
