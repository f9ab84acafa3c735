"""Sampling parameters of one request, as the engine sees them (no torch)."""

from __future__ import annotations

import msgspec

from dflash_serve.errors import RequestError

__all__ = ["MAX_SEED", "MAX_TEMPERATURE", "SamplingParams"]

MAX_SEED = 2**63 - 1
"""Seeds are non-negative 63-bit integers; the noise generator uses them as its key."""


MAX_TEMPERATURE = 100.0
"""Far past where a distribution is flat; a value that float32 cannot hold would end the engine."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: most output tokens, at least 1.
        seed: key of the request's noise; the same seed and prompt give the same ids.
        temperature: 0 is greedy.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep ids while the probability mass before them is below it; 1 keeps all.
        min_p: keep ids with at least this share of the largest probability; 0 keeps all.
        stop_token_ids: ids that end the request; the id itself is emitted and counted.
        ignore_eos: do not end at the model's end-of-sequence ids.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can remove an id."""
        sampled = self.temperature > 0.0
        return sampled and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def validate(self) -> None:
        """Check every field.

        Raises:
            RequestError: names the field, the value and what is allowed.
        """
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:  # false for NaN, too
            raise RequestError(
                f"temperature is {self.temperature}; allowed: 0 to {MAX_TEMPERATURE:g}",
                "temperature",
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; allowed: above 0, at most 1", "top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; allowed: 0 (off) or more", "top_k")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p is {self.min_p}; allowed: 0 to 1", "min_p")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; allowed: >= 1", "max_tokens")
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; allowed: 0 to {MAX_SEED}", "seed")
