"""What may be changed while an engine runs: soft knobs, applied between steps (no torch)."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized

import msgspec

from dflash_serve.errors import RequestError
from dflash_serve.scheduler.verify_length import VerifyLengthPolicy

__all__ = ["Tuning", "chosen_rows"]


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine decides from its next step on; running requests go on undisturbed.

    Attributes:
        verify_length: g of every step; None as the engine was started.
        speculation: False verifies one row a step and drafts nothing.
        max_running: requests with a slot at once; None as many as the engine was sized for. Those
            that run above a lower limit run on.
    """

    verify_length: int | None = None
    speculation: bool = True
    max_running: int | None = None

    def check(self, lengths: Collection[int], slots: int) -> None:
        """Refuse what the engine was not started for.

        Args:
            lengths: values of g that it can run.
            slots: requests that it was sized for.

        Raises:
            RequestError: names the field, what is allowed, and that more needs a new start.
        """
        if self.verify_length is not None and self.verify_length not in lengths:
            raise RequestError(
                f"verify_length is {self.verify_length}; allowed without a new start: "
                f"{', '.join(str(n) for n in sorted(lengths))}; for others deploy again",
                "verify_length",
            )
        if self.max_running is not None and not 1 <= self.max_running <= slots:
            raise RequestError(
                f"max_running is {self.max_running}; allowed without a new start: 1 to {slots}; "
                "for more deploy again with engine.max_running",
                "max_running",
            )

    def admits(self, running: Sized) -> bool:
        """Whether one more request may have a slot beside those that run."""
        return self.max_running is None or len(running) < self.max_running

    @property
    def rows(self) -> int | None:
        """g where it is fixed here."""
        if not self.speculation:
            return 1
        return self.verify_length


def chosen_rows(policy: VerifyLengthPolicy | None, contexts: Sequence[int], otherwise: int) -> int:
    """g that the policy chooses for requests with so many tokens each, where there are any."""
    if policy is None or not contexts:
        return otherwise
    return policy.decide(len(contexts), sum(contexts) / len(contexts)).rows
