"""Stop strings over a stream of ids and text, independent of how the stream is cut into blocks.

Rules:
- The match that ends first wins, of several that end together the longest, as if the text came
  one character at a time. The returned text ends where that match begins.
- Nothing that could still become part of a match is released, and text is released by whole
  tokens: the text released so far is always the decoded ids released so far.
- After a match the ids released are those up to and including the token in which the match
  begins. That token was generated and its text may reach into the answer, so it is counted;
  whatever the engine produced behind it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Released", "StopBuffer"]


class Released(NamedTuple):
    """Text and ids that may go to the client."""

    text: str
    token_ids: list[int]


class _Pattern:
    """Knuth-Morris-Pratt matcher: knows after each character how much of the stop has begun."""

    def __init__(self, stop: str) -> None:
        self.length = len(stop)
        self.begun = 0
        self._stop = stop
        self._fallback = _fallbacks(stop)

    def step(self, character: str) -> bool:
        """Take one character; whether the stop string ends with it."""
        while self.begun and self._stop[self.begun] != character:
            self.begun = self._fallback[self.begun - 1]
        if self._stop[self.begun] == character:
            self.begun += 1
        return self.begun == self.length


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of the stop, its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table


class StopBuffer:
    """Holds back text and ids of one choice until no stop string can begin in them.

    Args:
        stops: non-empty strings; without any, everything is released at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._text = ""
        self._start = 0  # position of _text[0] in the whole text
        self._ids: list[int] = []
        self._ends: list[int] = []  # position behind the text of each held id
        self._match_at: int | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string was found; what is pushed afterwards is dropped."""
        return self._match_at is not None

    def push(self, token_id: int, text: str) -> None:
        """Add an id and the text it completed."""
        if not self.matched:
            self.push_text(text)
            self._ids.append(token_id)
            self._ends.append(self._start + len(self._text))

    def push_text(self, text: str) -> None:
        """Add text that no further id brought: the end of an unfinished character."""
        if self.matched:
            return
        end = self._start + len(self._text)
        self._text += text
        for character in text if self._patterns else "":
            end += 1
            ended = [p.length for p in self._patterns if p.step(character)]
            if ended:
                self._match_at = end - max(ended)
                return

    def release(self) -> Released:
        """What is settled by now; after a match, all that is left."""
        if self._match_at is not None:
            return self._release_match(self._match_at)
        held = max((p.begun for p in self._patterns), default=0)
        safe = self._start + len(self._text) - held
        count = sum(1 for end in self._ends if end <= safe)
        boundary = self._ends[count - 1] if count else self._start
        return self._take(boundary, count)

    def flush(self) -> Released:
        """Everything left, once the stream has ended."""
        if self._match_at is not None:
            return self._release_match(self._match_at)
        return self._take(self._start + len(self._text), len(self._ids))

    def _release_match(self, position: int) -> Released:
        count = sum(1 for end in self._ends if end <= position) + 1
        released = self._take(max(position, self._start), min(count, len(self._ids)))
        self._text, self._ids, self._ends = "", [], []
        return released

    def _take(self, boundary: int, count: int) -> Released:
        size = boundary - self._start
        released = Released(self._text[:size], self._ids[:count])
        self._text = self._text[size:]
        self._start = boundary
        del self._ids[:count], self._ends[:count]
        return released
