"""Token ids to text, as they come: whole characters only, equal to decoding everything at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["Decode", "Detokenizer"]

Decode = Callable[[list[int]], str]
"""Decodes ids to text, special tokens skipped."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_SILENT = 16


class Detokenizer:
    """The text of one growing list of ids.

    A token's text can depend on the tokens before it (spaces, bytes of one character), so new ids
    are decoded together with the last finished piece, whose text is then taken off again. While
    the text ends in a replacement character more bytes may complete it, and nothing is returned.

    Args:
        decode: decodes a list of ids; None (a model without tokenizer) makes every text empty.
        before: ids whose text the client already has.
    """

    def __init__(self, decode: Decode | None, before: Iterable[int] = ()) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._open: list[int] = []
        for token_id in before:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Add one id; returns the text it completes, which may be empty."""
        if self._decode is None:
            return ""
        self._open.append(token_id)
        text = self._decode(self._context + self._open)
        if len(text) <= len(self._context_text):
            self._forget_silent_ids()
            return ""
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        """Text of what is still open once no more ids come: an unfinished character."""
        if self._decode is None or not self._open:
            return ""
        return self._advance(self._decode(self._context + self._open))

    def _forget_silent_ids(self) -> None:
        """Keep a run of special tokens from making every later decode longer."""
        if len(self._open) > _MAX_SILENT:
            self._open = []

    def _advance(self, text: str) -> str:
        assert self._decode is not None, "only a detokenizer that decodes advances"
        new = text[len(self._context_text) :]
        self._context, self._open = self._open, []
        self._context_text = self._decode(self._context)
        return new
