"""Text to ids and back, with a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from dflash_serve.api.detokenize import Detokenizer
from dflash_serve.errors import CheckpointError, RequestError

__all__ = ["TextCodec"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template, which is data from the checkpoint, can raise while it renders."""


class TextCodec:
    """Encodes prompts, renders chats and makes detokenizers.

    Args:
        tokenizer: a transformers tokenizer, or None for a checkpoint without one: prompts are
            then token ids, and every text is empty.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str) -> TextCodec:
        """Read the tokenizer of a checkpoint folder; runs no code from it and needs no network.

        Raises:
            CheckpointError: tokenizer files are there but cannot be read.
        """
        if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
            return cls(None)
        # transformers takes seconds to import, which a model without tokenizer need not pay.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the tokenizers library raises plain Exceptions
            raise CheckpointError(
                f"the tokenizer in {folder} cannot be read ({error}); "
                "give a folder with a tokenizer.json, or remove its tokenizer files to serve "
                "token-id prompts only"
            ) from error
        return cls(tokenizer)

    @property
    def size(self) -> int | None:
        """Number of ids the tokenizer knows, or None without a tokenizer."""
        return None if self._tokenizer is None else len(self._tokenizer)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._tokenizer is not None and bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a completion prompt, with the special tokens the tokenizer puts around it.

        Raises:
            RequestError: there is no tokenizer.
        """
        return self._ids(text, param="prompt", add_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of a chat, up to where the assistant's answer begins.

        Raises:
            RequestError: there is no chat template, it does not take these messages, or one of
                them holds a control token.
        """
        self._refuse_control_tokens(messages)
        # The template writes the special tokens itself.
        return self._ids(self.render(messages), param="messages", add_special_tokens=False)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """A chat as the template writes it; rendered in transformers' immutable sandbox.

        Raises:
            RequestError: there is no chat template, or it does not take these messages.
        """
        if self._tokenizer is None or not self.has_chat_template:
            raise RequestError(
                "messages are given, but this model has no chat template; "
                "use /v1/completions with a prompt",
                "messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"messages do not fit the model's chat template: {error}", "messages"
            ) from error
        return str(text)

    def _refuse_control_tokens(self, messages: list[dict[str, Any]]) -> None:
        """A control token in a message would end it and begin another speaker's turn."""
        if self._tokenizer is None:
            return
        added = self._tokenizer.added_tokens_decoder.values()
        control = sorted(token.content for token in added if token.special)
        for number, message in enumerate(messages):
            for field, value in message.items():
                found = next((t for t in control if isinstance(value, str) and t in value), None)
                if found is not None:
                    raise RequestError(
                        f"messages[{number}].{field} holds {found!r}, a control token of this "
                        "model; remove it",
                        f"messages[{number}].{field}",
                    )

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids, special tokens skipped; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def detokenizer(self, before: list[int]) -> Detokenizer:
        """A detokenizer for one choice.

        Args:
            before: output ids whose text the client already has.
        """
        return Detokenizer(self.decode if self.has_tokenizer else None, before)

    def _ids(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "text is given, but this model has no tokenizer; "
                "use /v1/completions with a list of token ids as prompt",
                param,
            )
        # verbose off: the length is checked against the engine's limit, not the tokenizer's.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])
