"""The sizes the scheduler works within, and the requests that fit them (no torch)."""

from __future__ import annotations

import dataclasses

from dflash_serve.engine.messages import Submit
from dflash_serve.errors import RequestError

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of one engine.

    Attributes:
        verify_rows: g, most rows verified per decode step.
        root: digest of the model pair and dtype, the start of every page key.
    """

    max_running: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefill_chunk: int
    verify_rows: int
    vocab_size: int
    eos: frozenset[int]
    prefix_cache: bool = True
    root: bytes = b""

    def check(self, submit: Submit) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: names the field, the value and what is allowed.
        """
        if not submit.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        for token in (*submit.prompt_ids, *submit.emitted_ids):
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"token id {token} is out of range; allowed: 0 to {self.vocab_size - 1}",
                    "prompt",
                )
        if len(submit.prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(submit.prompt_ids)} tokens; the context holds "
                f"{self.max_model_len} with at least one of output",
                "prompt",
            )
        submit.params.validate()
