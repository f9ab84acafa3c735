"""What rank 0 holds back until its followers agree."""

from __future__ import annotations

import pytest

from dflash_serve.engine.consensus import Echo, Ledger, NoEchoes, checksum
from dflash_serve.engine.messages import TokenEvent
from dflash_serve.errors import ConsensusError
from dflash_serve.scheduler.plan import DecodeResult, StepResult


class Followers:
    """Echoes that a test puts there; waits are counted, not waited."""

    def __init__(self) -> None:
        self.sent: list[Echo] = []
        self.waits: list[float] = []

    def receive(self, timeout_s: float) -> list[Echo]:
        self.waits.append(timeout_s)
        sent, self.sent = self.sent, []
        return sent

    def close(self) -> None:
        pass


def event(name: str) -> TokenEvent:
    return TokenEvent(request_id=name, token_ids=[1])


def names(events: list[TokenEvent]) -> list[str]:
    return [e.request_id for e in events]


def test_without_followers_nothing_is_held() -> None:
    ledger = Ledger(NoEchoes(), 0)
    ledger.hold([event("refused")])
    assert names(ledger.release()) == ["refused"]
    ledger.note(Echo(0, 7, 1))
    ledger.hold([event("a")])
    assert names(ledger.release()) == ["a"]
    assert ledger.settled
    assert ledger.agreed == 0


def test_events_wait_for_every_follower_and_keep_their_order() -> None:
    followers = Followers()
    ledger = Ledger(followers, 2)
    ledger.note(Echo(0, 1, 11))
    ledger.hold([event("a1")])
    assert ledger.release() == []
    ledger.note(Echo(0, 3, 33))
    ledger.hold([event("a3"), event("b3")])
    followers.sent = [Echo(1, 1, 11), Echo(1, 3, 33), Echo(2, 1, 11)]
    assert names(ledger.release(0.5)) == ["a1"]
    assert followers.waits == [0.0, 0.5]
    assert not ledger.settled
    ledger.hold([event("aborted")])  # a command's event goes behind what is held already
    assert ledger.release() == []
    followers.sent = [Echo(2, 3, 33)]
    assert names(ledger.release()) == ["a3", "b3", "aborted"]
    assert ledger.settled
    assert ledger.agreed == 2


def test_a_follower_may_answer_first() -> None:
    followers = Followers()
    ledger = Ledger(followers, 1)
    ledger.note(Echo(0, 1, 11))
    followers.sent = [Echo(1, 1, 11), Echo(1, 2, 22)]
    assert ledger.release() == []
    ledger.note(Echo(0, 2, 22))
    ledger.hold([event("a")])
    assert names(ledger.release()) == ["a"]


def test_a_mismatch_names_step_ranks_checksums_and_requests_and_sends_nothing() -> None:
    followers = Followers()
    ledger = Ledger(followers, 2)
    ledger.note(Echo(0, 5, 0xAB))
    ledger.hold([event("x"), event("y")])
    followers.sent = [Echo(2, 5, 0xCD)]
    text = (
        r"in step 5: checksums rank 0 00000000000000ab, rank 2 00000000000000cd; requests: x, y; "
        "none of the step's tokens was sent"
    )
    for _ in range(2):  # and it stays so
        with pytest.raises(ConsensusError, match=text):
            ledger.release()


def result(picked: list[int], accepted: int, *, fault: bool = False) -> StepResult:
    decoded = DecodeResult(picked=picked, accepted=accepted, fault=fault)
    return StepResult(sampled=[4, None], decoded=[decoded])


def test_the_checksum_covers_what_is_committed_and_nothing_else() -> None:
    base = checksum(3, result([7, 8, 9], 1))
    assert base == checksum(3, result([7, 8, 1], 1))  # a row that was not accepted
    others = [
        checksum(4, result([7, 8, 9], 1)),
        checksum(3, result([7, 9, 9], 1)),
        checksum(3, result([7, 8, 9], 0)),
        checksum(3, result([7, 8, 9], 2)),
        checksum(3, result([7, 8, 9], 1, fault=True)),
        checksum(3, StepResult(sampled=[4, -1], decoded=result([7, 8, 9], 1).decoded)),
        checksum(3, StepResult(sampled=[5, None], decoded=result([7, 8, 9], 1).decoded)),
    ]
    assert len({base, *others}) == 8
    assert checksum(3, result([1, 2], 0, fault=True)) == checksum(3, result([3], 0, fault=True))
    assert 0 <= base < 2**64
