"""OpenAI request bodies: strict models and their translation to `GenerationRequest`.

Defaults are OpenAI's (temperature 1, top_p 1, 16 completion tokens); a checkpoint's
generation_config is not consulted, so the same body means the same on every model.
"""

from __future__ import annotations

import dataclasses
import difflib
import secrets
import uuid
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dflash_serve.api.options import (
    CHAT_OFF,
    COMPLETION_OFF,
    MESSAGE_OFF,
    STREAM_OFF,
    drop_options_that_are_off,
    shown,
)
from dflash_serve.api.protocol import GenerationRequest
from dflash_serve.errors import RequestError
from dflash_serve.sampling import SamplingParams

__all__ = ["Call", "ChatRequest", "CompletionRequest", "parse_chat", "parse_completion"]

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_MESSAGES = 4096

MAX_INT = 2**31 - 1
"""Largest count or token id taken; far above any model, small enough for every encoding."""

_SEED_RANGE = 2**63


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A parsed request: what to generate, and how to shape the answer.

    Attributes:
        request: what goes to the backend.
        stream: answer as server-sent events.
        include_usage: end the stream with a usage chunk.
        return_token_ids: put the token ids beside the text.
    """

    request: GenerationRequest
    stream: bool
    include_usage: bool
    return_token_ids: bool


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be read as placeholders of the template.
    return PydanticCustomError("request", "{text}", {"text": message})


def _one_prompt(value: Any) -> Any:
    """A text or a list of ids; a list holding one text counts as that text."""
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        if len(value) != 1 or not isinstance(value[0], str):
            raise _wrong(
                f"a list of {len(value)} prompts; allowed: one prompt per request, "
                "as a text or a list of token ids"
            )
        value = value[0]
    if isinstance(value, str):
        allowed = True
    else:
        allowed = isinstance(value, list) and all(map(_is_token_id, value))
    if not allowed:
        raise _wrong(f"{shown(value)}; allowed: a text or a list of token ids (integers from 0)")
    if len(value) == 0:
        raise _wrong("empty; allowed: a text or a list of token ids, at least one long")
    return value


def _is_token_id(item: Any) -> bool:
    return type(item) is int and 0 <= item <= MAX_INT


def _joined_parts(value: Any) -> Any:
    """Message content as one text; text parts are joined by newlines, as vLLM does."""
    if not isinstance(value, list):
        return value
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _wrong(f"a list with a part of type {shown(kind)}; allowed: only type 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"a list with a text part whose text is {shown(text)}; allowed: a string")
    return text


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong(f"{shown(value)}; allowed: a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _wrong(f"a list of {len(stops)} strings; allowed: at most {MAX_STOPS}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        lengths = [len(stop) for stop in stops]
        raise _wrong(f"of length {lengths}; allowed: strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


_Bounded = Annotated[int, Field(le=MAX_INT)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None


class ChatMessage(_Strict):
    """One message; content may be given as text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it; "developer" is OpenAI's newer word for "system"."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class _GenerationBody(_Strict):
    """The fields that both endpoints share. None means "not given" everywhere."""

    model: str
    max_tokens: _Bounded | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Bounded | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = []
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    # Accepted because they say nothing about the output.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> Self:
        """What the types alone do not say.

        Raises:
            RequestError: names the field.
        """
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}; allowed: 1", "n")
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given but stream is not true; allowed: only with stream true",
                "stream_options",
            )
        return self

    def sampling(self, max_tokens: int | None, field: str, default: int) -> SamplingParams:
        """Sampling parameters, with a seed drawn when the client gave none.

        Args:
            max_tokens: the limit the client gave.
            field: the name of the field it was given in.
            default: the limit without one; 0 is "whatever fits".

        Raises:
            RequestError: a value out of range.
        """
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"{field} is {max_tokens}; allowed: >= 1", field)
        params = SamplingParams(
            max_tokens=default if max_tokens is None else max_tokens,
            seed=secrets.randbelow(_SEED_RANGE) if self.seed is None else self.seed,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            # vLLM's clients turn top-k off with -1.
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            top_p=1.0 if self.top_p is None else float(self.top_p),
            min_p=0.0 if self.min_p is None else float(self.min_p),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )
        _check_ranges(params)
        return params

    def call(self, request: GenerationRequest) -> Call:
        """The request together with how its answer is shaped."""
        options = self.stream_options or StreamOptions()
        return Call(
            request=request,
            stream=bool(self.stream),
            include_usage=bool(options.include_usage),
            return_token_ids=bool(self.return_token_ids),
        )


class CompletionRequest(_GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]


class ChatRequest(_GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Bounded | None = None

    def limit(self) -> tuple[int | None, str]:
        """The most tokens to generate and the field that says so.

        Raises:
            RequestError: both fields are given and differ.
        """
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise RequestError(
                f"max_tokens is {self.max_tokens} but max_completion_tokens is "
                f"{self.max_completion_tokens}; give one of them",
                "max_tokens",
            )
        return self.max_completion_tokens, "max_completion_tokens"


def parse_completion(body: dict[str, Any]) -> Call:
    """Check the body of POST /v1/completions.

    Raises:
        RequestError: names the field, its value and what is allowed.
    """
    fields = drop_options_that_are_off(body, COMPLETION_OFF)
    given = _validate(CompletionRequest, _checked_stream_options(fields))
    params = given.sampling(given.max_tokens, "max_tokens", DEFAULT_COMPLETION_TOKENS)
    return given.call(
        GenerationRequest(
            request_id=f"cmpl-{uuid.uuid4().hex}",
            model=given.model,
            params=params,
            prompt=given.prompt,
            stop=tuple(given.stop),
            cache_salt=given.cache_salt or "",
            session=given.user or "",
        )
    )


def parse_chat(body: dict[str, Any]) -> Call:
    """Check the body of POST /v1/chat/completions.

    Raises:
        RequestError: names the field, its value and what is allowed.
    """
    fields = _checked_stream_options(drop_options_that_are_off(body, CHAT_OFF))
    given = _validate(ChatRequest, _checked_messages(fields))
    params = given.sampling(*given.limit(), 0)
    return given.call(
        GenerationRequest(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=given.model,
            params=params,
            messages=[message.for_template() for message in given.messages],
            stop=tuple(given.stop),
            cache_salt=given.cache_salt or "",
            session=given.user or "",
        )
    )


def _checked_stream_options(fields: dict[str, Any]) -> dict[str, Any]:
    options = fields.get("stream_options")
    if not isinstance(options, dict):
        return fields
    kept = drop_options_that_are_off(options, STREAM_OFF, "stream_options.")
    return {**fields, "stream_options": kept}


def _checked_messages(fields: dict[str, Any]) -> dict[str, Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        return fields
    kept = [
        drop_options_that_are_off(message, MESSAGE_OFF, f"messages[{i}].")
        if isinstance(message, dict)
        else message
        for i, message in enumerate(messages)
    ]
    return {**fields, "messages": kept}


def _check_ranges(params: SamplingParams) -> None:
    """Range checks, with a stand-in for a limit that only the replica can fill in."""
    msgspec.structs.replace(params, max_tokens=params.max_tokens or 1).validate()


_Model = TypeVar("_Model", bound=_GenerationBody)


def _validate(model: type[_Model], fields: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(fields).check()
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0], model) from error


def _request_error(first: ErrorDetails, model: type[BaseModel]) -> RequestError:
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "missing":
        return RequestError(f"{param} is missing; it is required", param)
    if kind == "extra_forbidden":
        return RequestError(f"{param} is not a known field{_nearest(param, model)}", param)
    if kind == "request":
        return RequestError(f"{param} is {first['msg']}", param)
    if kind in ("too_short", "too_long"):
        bound = "at least" if kind == "too_short" else "at most"
        limit = first["ctx"]["min_length" if kind == "too_short" else "max_length"]
        length = first["ctx"]["actual_length"]
        return RequestError(f"{param} has {length} items; allowed: {bound} {limit}", param)
    if kind == "model_type":
        return RequestError(f"{param} is {shown(first['input'])}; allowed: an object", param)
    allowed = first["msg"].removeprefix("Input should be ")
    return RequestError(f"{param} is {shown(first['input'])}; allowed: {allowed}", param)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _nearest(param: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(param, [] if "." in param else model.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; leave it out"
