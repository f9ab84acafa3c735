"""One request inside the engine (no torch)."""

from __future__ import annotations

import dataclasses
import enum

from dflash_serve.cache.pages import PageKey, page_key
from dflash_serve.engine.messages import FinishReason, Submit
from dflash_serve.sampling import SamplingParams

__all__ = ["Phase", "Request"]


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclasses.dataclass
class Request:
    """Token and page state of one request.

    Attributes:
        tokens: prompt and output ids known so far.
        prompt_len: how many of them are the prompt, also after a preemption or resume.
        computed: tokens whose keys and values are committed and injected.
        pages: page ids in position order.
        indexed: leading pages already offered to the prefix index.
        slot: row in the device tables, −1 while waiting.
        cached: prompt tokens found in the prefix cache at the first admission.
        epoch: how often the request gave its slot back; what a step brings for an earlier epoch
            is not its own any more.
        ahead: most tokens that steps not yet committed can add to `computed`.
        steps_ahead: of those steps, how many bring at least one new token.
    """

    request_id: str
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    root: PageKey
    phase: Phase = Phase.WAITING
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    keys: list[PageKey] = dataclasses.field(default_factory=list)
    indexed: int = 0
    slot: int = -1
    cached: int | None = None
    reported_cached: bool = False
    epoch: int = 0
    ahead: int = 0
    steps_ahead: int = 0

    @classmethod
    def from_submit(cls, submit: Submit, root: PageKey) -> Request:
        """A request that waits; `root` seeds its page keys."""
        return cls(
            request_id=submit.request_id,
            params=submit.params,
            tokens=[*submit.prompt_ids, *submit.emitted_ids],
            prompt_len=len(submit.prompt_ids),
            root=page_key(root, list(submit.cache_salt.encode())),
        )

    @property
    def continued(self) -> bool:
        """Whether output exists already, so that the last known token is the anchor."""
        return len(self.tokens) > self.prompt_len

    @property
    def prefill_len(self) -> int:
        """Tokens to compute before decoding: all but the anchor."""
        return len(self.tokens) - 1 if self.continued else self.prompt_len

    def certain_to_end(self, max_model_len: int) -> bool:
        """Whether the steps under way bring the last token there can be."""
        most = min(self.prompt_len + self.params.max_tokens, max_model_len)
        return len(self.tokens) + self.steps_ahead >= most

    def leave_slot(self) -> list[int]:
        """Give slot and pages back; returns the pages."""
        pages, self.pages = self.pages, []
        self.indexed = self.computed = self.ahead = self.steps_ahead = 0
        self.slot = -1
        self.epoch += 1
        return pages

    def page_keys(self, count: int, page_size: int) -> list[PageKey]:
        """Keys of the first `count` pages, which must be full of known tokens."""
        while len(self.keys) < count:
            parent = self.keys[-1] if self.keys else self.root
            first = len(self.keys) * page_size
            self.keys.append(page_key(parent, self.tokens[first : first + page_size]))
        return self.keys[:count]

    def append(
        self, ids: list[int], eos: frozenset[int], max_model_len: int
    ) -> tuple[list[int], FinishReason | None]:
        """Add committed ids up to the first that ends the request.

        Returns:
            the ids that count, and why the request ended, if it did.
        """
        for count, token in enumerate(ids, start=1):
            self.tokens.append(token)
            reason = self._finish_reason(token, eos, max_model_len)
            if reason is not None:
                return ids[:count], reason
        return ids, None

    def finished_already(self, eos: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Whether the ids a continued request came with end it."""
        return self._finish_reason(self.tokens[-1], eos, max_model_len) if self.continued else None

    def _finish_reason(
        self, token: int, eos: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        if token in self.params.stop_token_ids:
            return "stop"
        if token in eos and not self.params.ignore_eos:
            return "stop"
        if len(self.tokens) - self.prompt_len >= self.params.max_tokens:
            return "length"
        return "length" if len(self.tokens) >= max_model_len else None
