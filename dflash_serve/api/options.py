"""Request fields that are known but not supported, and the values that leave them off.

A client library often sends every field it knows with its neutral value. Those pass; any other
value is refused, because ignoring it would change the output without telling anyone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_serve.errors import RequestError

__all__ = [
    "CHAT_OFF",
    "COMPLETION_OFF",
    "MESSAGE_OFF",
    "STREAM_OFF",
    "drop_options_that_are_off",
    "shown",
]

_MAX_SHOWN = 60

_COMMON_OFF: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

COMPLETION_OFF: dict[str, tuple[Any, ...]] = {
    **_COMMON_OFF,
    "echo": (False,),
    "logprobs": (),  # 0 asks for the chosen token's log-probability, so it is not "off"
    "suffix": ("",),
}

CHAT_OFF: dict[str, tuple[Any, ...]] = {
    **_COMMON_OFF,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}

MESSAGE_OFF: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

STREAM_OFF: dict[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}


def drop_options_that_are_off(
    fields: Mapping[str, Any], off: Mapping[str, tuple[Any, ...]], where: str = ""
) -> dict[str, Any]:
    """The fields without the unsupported ones that are off.

    Args:
        fields: a JSON object of the request.
        off: unsupported field -> values that leave it off; null always does.
        where: path of the object inside the request, put before the field name in errors.

    Raises:
        RequestError: an unsupported field asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in off:
            kept[name] = value
        elif value is not None and not any(_same(value, allowed) for allowed in off[name]):
            raise RequestError(_refusal(where + name, value, off[name]), where + name)
    return kept


def shown(value: Any) -> str:
    """A value as JSON, cut to what fits an error text."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _refusal(name: str, value: Any, allowed: tuple[Any, ...]) -> str:
    choices = " or ".join(["null", *(shown(choice) for choice in allowed)])
    return f"{name} is {shown(value)}, which is not supported; leave it out or send {choices}"
