"""OpenAI response objects, as plain dicts ready for JSON."""

from __future__ import annotations

import abc
import time
from typing import Any, ClassVar

from dflash_serve.api.protocol import Delta
from dflash_serve.api.schema import Call

__all__ = ["ChatShape", "CompletionShape", "Shape", "merge"]

Json = dict[str, Any]


def merge(total: Delta, delta: Delta) -> Delta:
    """`total`, extended in place to say what both say in a row; `delta` stays as it is."""
    total.text += delta.text
    total.token_ids += delta.token_ids
    total.finish_reason = delta.finish_reason or total.finish_reason
    if total.prompt_ids is None:
        total.prompt_ids = delta.prompt_ids
    if total.cached_tokens is None:
        total.cached_tokens = delta.cached_tokens
    total.drafted += delta.drafted
    total.accepted += delta.accepted
    return total


class Usage:
    """Counts what a stream of deltas delivered."""

    def __init__(self) -> None:
        self._completion = self._prompt = self._cached = 0
        self._drafted = self._accepted = 0

    def add(self, delta: Delta) -> None:
        """Count a delta."""
        self._completion += len(delta.token_ids)
        self._prompt += len(delta.prompt_ids or ())
        self._cached += delta.cached_tokens or 0
        self._drafted += delta.drafted
        self._accepted += delta.accepted

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._prompt

    def openai(self) -> Json:
        """The `usage` object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def speculation(self) -> Json:
        """Draft statistics, apart from OpenAI's prediction counts, which mean another thing.

        Accepted tokens that a stop string cut off again are not among the delivered ones.
        """
        accepted = min(self._accepted, self._completion)
        return {"drafted_tokens": self._drafted, "accepted_tokens": accepted}


class Shape(abc.ABC):
    """Makes the objects of one answer; a subclass per endpoint.

    Args:
        call: the request that is answered.
    """

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self.usage = Usage()
        self._call = call
        self._head: Json = {
            "id": call.request.request_id,
            "created": int(time.time()),
            "model": call.request.model,
        }

    @property
    def request_id(self) -> str:
        """Id of the answer, under which the log has it."""
        return self._call.request.request_id

    # -- not streamed -----------------------------------------------------------------------

    def whole(self, total: Delta) -> Json:
        """The answer to a request that does not stream."""
        self.usage.add(total)
        choice = self._whole_choice(total)
        answer = {"object": self.object_name, **self._head, "choices": [choice]}
        self._add_ids(choice, total)
        if self._call.return_token_ids:
            answer["prompt_token_ids"] = total.prompt_ids or []
        return {**answer, "usage": self.usage.openai(), "dflash": self.usage.speculation()}

    # -- streamed ---------------------------------------------------------------------------

    def opening(self) -> list[Json]:
        """Chunks before the first text."""
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        """Chunks of one delta: text, then the end."""
        self.usage.add(delta)
        made = []
        wants_ids = self._call.return_token_ids and delta.token_ids
        if delta.text or wants_ids:
            choice = self._chunk_choice(delta.text, None)
            self._add_ids(choice, delta)
            made.append(self._chunk([choice]))
        if delta.finish_reason is not None:
            made.append(self._chunk([self._chunk_choice("", delta.finish_reason)]))
        if made and self._call.return_token_ids and delta.prompt_ids is not None:
            made[0]["prompt_token_ids"] = delta.prompt_ids
        return made

    def closing(self) -> list[Json]:
        """Chunks after the end: the usage, when asked for."""
        if not self._call.include_usage:
            return []
        chunk = self._chunk([])
        return [{**chunk, "usage": self.usage.openai(), "dflash": self.usage.speculation()}]

    # -- parts ------------------------------------------------------------------------------

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {"object": self.chunk_name, **self._head, "choices": choices}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _add_ids(self, choice: Json, delta: Delta) -> None:
        if self._call.return_token_ids:
            choice["token_ids"] = delta.token_ids

    @abc.abstractmethod
    def _whole_choice(self, total: Delta) -> Json:
        """The choice of an answer that is not streamed."""

    @abc.abstractmethod
    def _chunk_choice(self, text: str, finish_reason: str | None) -> Json:
        """The choice of one chunk."""


class CompletionShape(Shape):
    """Objects of /v1/completions."""

    object_name = chunk_name = "text_completion"

    def _whole_choice(self, total: Delta) -> Json:
        return self._chunk_choice(total.text, total.finish_reason)

    def _chunk_choice(self, text: str, finish_reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatShape(Shape):
    """Objects of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """The chunk that says who speaks."""
        return [self._chunk([_chat_choice({"role": "assistant", "content": ""}, None)])]

    def _whole_choice(self, total: Delta) -> Json:
        message = {"role": "assistant", "content": total.text, "refusal": None}
        return {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": total.finish_reason,
        }

    def _chunk_choice(self, text: str, finish_reason: str | None) -> Json:
        return _chat_choice({"content": text} if finish_reason is None else {}, finish_reason)


def _chat_choice(delta: Json, finish_reason: str | None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
