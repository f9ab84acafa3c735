"""Request bodies: what passes, what is refused, and which field the refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_serve.api.options import CHAT_OFF, COMPLETION_OFF
from dflash_serve.api.schema import Call, parse_chat, parse_completion
from dflash_serve.errors import RequestError

USER = {"role": "user", "content": "hi"}


def completion(**changes: Any) -> Call:
    return parse_completion({"model": "m", "prompt": "hi", **changes})


def chat(**changes: Any) -> Call:
    return parse_chat({"model": "m", "messages": [USER], **changes})


def without(name: str, **fields: Any) -> dict[str, Any]:
    return {k: v for k, v in {"model": "m", "prompt": "hi", **fields}.items() if k != name}


BOTH = [
    ({"temperature": -0.1}, "temperature", "-0.1; allowed: 0 to 100"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "above 0, at most 1"),
    ({"top_p": 1.01}, "top_p", "above 0, at most 1"),
    ({"top_p": -1}, "top_p", "above 0, at most 1"),
    ({"top_k": -2}, "top_k", "0 (off) or more"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 1.5}, "min_p", "0 to 1"),
    ({"n": 0}, "n", "n is 0; allowed: 1"),
    ({"n": -1}, "n", "n is -1; allowed: 1"),
    ({"n": 2}, "n", "n is 2; allowed: 1"),
    ({"n": 10**6}, "n", "allowed: 1"),
    ({"n": 1.0}, "n", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; allowed: >= 1"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: >= 1"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**40}, "max_tokens", "less than or equal"),
    ({"seed": -1}, "seed", "seed is -1; allowed: 0 to"),
    ({"seed": 2**63}, "seed", "allowed: 0 to"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "1 to 1024 characters"),
    ({"stop": ["a", 3]}, "stop", "a list of strings"),
    ({"stop": ["a"] * 17}, "stop", "17 strings; allowed: at most 16"),
    ({"stop": ["a"] * 10_000}, "stop", "at most 16"),
    ({"stop": "a" * 10**6}, "stop", "1 to 1024 characters"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "valid integer"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
    ({"ignore_eos": "yes"}, "ignore_eos", "valid boolean"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": []}, "stream_options", "an object"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "valid boolean",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "not supported",
    ),
    ({"model": 3}, "model", "valid string"),
    ({"model": None}, "model", "valid string"),
    ({"temprature": 0.5}, "temprature", "did you mean 'temperature'"),
    ({"zzz": 1}, "zzz", "not a known field"),
    ({"user": 5}, "user", "valid string"),
]


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(("changes", "param", "text"), BOTH)
def test_a_bad_value_is_refused_by_field_with_what_is_allowed(
    parse: Any, changes: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**changes)
    assert refused.value.param == param
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "empty"),
        ([], "empty"),
        ([""], "empty"),
        ([[]], "one prompt per request"),
        ([[1, 2]], "one prompt per request"),
        (["a", "b"], "a list of 2 prompts"),
        (["a", 1], "a list of 2 prompts"),
        ([1, True], "a text or a list of token ids"),
        ([1, -1], "integers from 0"),
        ([1.0], "a text or a list of token ids"),
        ([2**70], "a text or a list of token ids"),
        (7, "a text or a list of token ids"),
        (None, "a text or a list of token ids"),
        ({"text": "a"}, "a text or a list of token ids"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    [
        ([], "messages", "has 0 items; allowed: at least 1"),
        ([USER] * 100_000, "messages", "at most 4096"),
        (None, "messages", "valid list"),
        ("hi", "messages", "valid list"),
        ([3], "messages[0]", "an object"),
        ([{"content": "hi"}], "messages[0].role", "missing"),
        ([USER, {"role": "user"}], "messages[1].content", "missing"),
        ([{"role": "king", "content": "hi"}], "messages[0].role", "'user'"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role", "'user'"),
        ([{"role": "user", "content": None}], "messages[0].content", "valid string"),
        ([{"role": "user", "content": 3}], "messages[0].content", "valid string"),
        ([{**USER, "tool_calls": [{}]}], "messages[0].tool_calls", "not supported"),
        ([{**USER, "colour": "red"}], "messages[0].colour", "not a known field"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content",
            "image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "messages[0].content",
            "allowed: a string",
        ),
    ],
)
def test_bad_messages_are_refused_by_place(messages: Any, param: str, text: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(messages=messages)
    assert refused.value.param == param
    assert text in str(refused.value)


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is missing") as refused:
        parse_completion(without(name))
    assert refused.value.param == name


ASKED_FOR: dict[str, Any] = {
    "logit_bias": {"5": 1},
    "bad_words": ["x"],
    "response_format": {"type": "json_object"},
    "suffix": "tail",
    "tools": [{"type": "function"}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "modalities": ["audio"],
    "documents": [{}],
    "chat_template_kwargs": {"tokenize": True},
}
CASES = [
    (parse, name, values)
    for parse, off in ((completion, COMPLETION_OFF), (chat, CHAT_OFF))
    for name, values in off.items()
]


@pytest.mark.parametrize(("parse", "name", "off"), CASES)
def test_an_unsupported_option_is_refused_unless_it_is_off(
    parse: Any, name: str, off: tuple[Any, ...]
) -> None:
    for value in (None, *off):
        parse(**{name: value})
    asked = ASKED_FOR.get(name, not off[0] if off and isinstance(off[0], bool) else 2)
    with pytest.raises(RequestError, match="not supported") as refused:
        parse(**{name: asked})
    assert refused.value.param == name


def test_zero_logprobs_of_a_completion_still_ask_for_something() -> None:
    with pytest.raises(RequestError, match="logprobs is 0"):
        completion(logprobs=0)


def test_defaults_are_openais() -> None:
    params = completion().request.params
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, 16)
    assert chat().request.params.max_tokens == 0, "a chat goes on as long as it fits"


def test_every_field_reaches_the_request() -> None:
    call = completion(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=9,
        max_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        cache_salt="salt",
        user="someone",
    )
    params = call.request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 7, 0.1)
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (9, 3, (4,))
    assert params.ignore_eos
    assert (call.request.stop, call.request.cache_salt) == (("a", "b"), "salt")
    assert (call.stream, call.include_usage, call.return_token_ids) == (True, True, True)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {completion().request.params.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_request_ids_are_never_the_same() -> None:
    assert completion().request.request_id != completion().request.request_id


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_list_with_one_text_is_that_text(prompt: Any) -> None:
    assert completion(prompt=prompt).request.prompt == "hi"


def test_null_means_not_given() -> None:
    call = completion(**dict.fromkeys(["max_tokens", "temperature", "top_p", "n", "stop", "seed"]))
    assert call.request.params.max_tokens == 16
    assert call.request.stop == ()


def test_both_names_of_the_limit_work_and_must_agree() -> None:
    assert chat(max_tokens=5).request.params.max_tokens == 5
    assert chat(max_completion_tokens=6).request.params.max_tokens == 6
    assert chat(max_tokens=6, max_completion_tokens=6).request.params.max_tokens == 6
    with pytest.raises(RequestError, match="give one of them"):
        chat(max_tokens=5, max_completion_tokens=6)
    with pytest.raises(RequestError) as refused:
        chat(max_completion_tokens=0)
    assert refused.value.param == "max_completion_tokens"


def test_messages_reach_the_template_as_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": []}
    call = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "ann"},
            answer,
            USER,
        ]
    )
    assert call.request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "x"},
        USER,
    ]
