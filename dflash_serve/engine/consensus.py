"""Proof that all ranks commit the same tokens, before a client sees any of them (no torch).

Every rank hashes what a step commits. Followers send theirs to rank 0, which keeps the events of
a step until all hashes agree: at once where they are there already, else a step later.
"""

from __future__ import annotations

from array import array
from collections import deque
from hashlib import blake2b
from typing import Protocol

import msgspec

from dflash_serve.engine.messages import TokenEvent, Traced
from dflash_serve.errors import ConsensusError
from dflash_serve.scheduler.plan import StepResult

__all__ = ["Echo", "Echoes", "Ledger", "NoEchoes", "checksum"]

_NOT_SAMPLED = -2
_FAULT = -3


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """What a rank made of a step.

    Attributes:
        checksum: of what the step committed.
        traced: the trace that ended with it.
    """

    rank: int
    step: int
    checksum: int
    traced: Traced | None = None


class Echoes(Protocol):
    """Rank 0's end of the channel on which followers answer."""

    def receive(self, timeout_s: float) -> list[Echo]:
        """Echoes that have arrived; waits up to `timeout_s` for the first."""

    def close(self) -> None:
        """Release the channel."""


class NoEchoes:
    """Echoes of an engine with one rank."""

    def receive(self, timeout_s: float) -> list[Echo]:
        """Nobody answers."""
        return []

    def close(self) -> None:
        """Nothing to release."""


def checksum(step: int, result: StepResult) -> int:
    """64 bits over a step's number and all it commits; rejected rows are left out."""
    words = array("q", (step,))
    words.extend(_NOT_SAMPLED if token is None else token for token in result.sampled)
    for decoded in result.decoded:
        if decoded.fault:
            words.append(_FAULT)
        else:
            words.append(decoded.accepted)
            words.fromlist(decoded.picked[: decoded.accepted + 1])
    return int.from_bytes(blake2b(words.tobytes(), digest_size=8).digest(), "little")


class Ledger:
    """Holds a step's events on rank 0 until every rank has committed the same.

    Args:
        followers: how many ranks answer; with none, nothing is held.

    Attributes:
        agreed: steps on which all ranks agreed.
        traces: of the ranks that have sent theirs.
    """

    def __init__(self, echoes: Echoes, followers: int) -> None:
        self._echoes = echoes
        self._followers = followers
        self._own: dict[int, int] = {}  # steps not yet agreed on, in order
        self._heard: dict[int, dict[int, int]] = {}
        self._held: deque[tuple[int, list[TokenEvent]]] = deque()
        self._noted = self._settled = -1
        self.agreed = 0
        self.traces: list[Traced] = []

    @property
    def settled(self) -> bool:
        """Whether nothing waits for a follower."""
        return not (self._own or self._held)

    def note(self, echo: Echo) -> None:
        """Rank 0's own checksum of a step."""
        self._noted = echo.step
        self._keep_trace(echo)
        if self._followers:
            self._own[echo.step] = echo.checksum
        else:
            self._settled = echo.step

    def hold(self, events: list[TokenEvent]) -> None:
        """Events made after the step noted last, by it or by a command."""
        if events:
            self._held.append((self._noted, events))

    def release(self, timeout_s: float = 0.0) -> list[TokenEvent]:
        """Events of the steps that all ranks agree on, in order.

        Args:
            timeout_s: how long to wait for a follower when one's answer is missing.

        Raises:
            ConsensusError: a rank committed something else; none of that step's events is ever
                returned.
        """
        if self._own:
            for echo in self._echoes.receive(timeout_s):
                self._heard.setdefault(echo.step, {})[echo.rank] = echo.checksum
                self._keep_trace(echo)
            self._compare()
        released: list[TokenEvent] = []
        while self._held and self._held[0][0] <= self._settled:
            released += self._held.popleft()[1]
        return released

    def take_traces(self) -> list[Traced]:
        """Every rank's trace, once all are there; none before."""
        if len(self.traces) <= self._followers:
            return []
        traces, self.traces = self.traces, []
        return sorted(traces, key=lambda trace: trace.rank)

    def _keep_trace(self, echo: Echo) -> None:
        if echo.traced is not None:
            self.traces.append(echo.traced)

    def _compare(self) -> None:
        while self._own:
            step, own = next(iter(self._own.items()))
            heard = self._heard.get(step, {})
            if any(value != own for value in heard.values()):
                raise ConsensusError(self._mismatch(step, {0: own, **heard}))
            if len(heard) < self._followers:
                return
            del self._own[step], self._heard[step]
            self._settled = step
            self.agreed += 1

    def _mismatch(self, step: int, values: dict[int, int]) -> str:
        sums = ", ".join(f"rank {rank} {value:016x}" for rank, value in sorted(values.items()))
        held = [event.request_id for at, events in self._held if at == step for event in events]
        names = ", ".join(dict.fromkeys(held)) or "none that a token was due to"
        return (
            f"the ranks committed different tokens in step {step}: checksums {sums}; "
            f"requests: {names}; none of the step's tokens was sent"
        )
