"""Boards of two hosts, each with a clock of its own, as tidings go from one to the other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_serve.engine import tidings as tidings_module
from dflash_serve.engine.pulse import Board, Sign, describe
from dflash_serve.engine.tidings import Tidings, gather, spread

HERE, THERE = 1000.0, 5.0
"""What the clocks of the two hosts say at the same moment."""


@pytest.fixture
def boards(tmp_path: Path) -> tuple[Board, Board]:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    return Board(str(tmp_path / "here"), 4), Board(str(tmp_path / "there"), 4)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch):
    """Sets what the clock of the host at work says."""

    def set_clock(now: float) -> None:
        monkeypatch.setattr(tidings_module.time, "monotonic", lambda: now)

    return set_clock


def test_a_sign_arrives_with_its_age_and_not_its_time(boards, at) -> None:
    here, there = boards
    there.write(2, Sign(heard=THERE - 0.5, begun=7, done=6, since=THERE - 2, busy=True))
    at(THERE)
    told = gather(there, [2, 3])
    at(HERE)
    spread(here, told)
    assert here.read() == {0: None, 1: None, 2: Sign(HERE - 0.5, 7, 6, HERE - 2, True), 3: None}


def test_a_host_that_says_nothing_more_grows_old(boards, at) -> None:
    here, there = boards
    there.write(2, Sign(THERE, 7, 6, THERE, True))
    at(THERE)
    told = gather(there, [2])
    at(HERE)
    spread(here, told)
    words = describe(here.read(), HERE + 9, 4.0)
    assert "rank 2 has given no sign of life for 9.0 s" in words


def test_only_the_ranks_asked_for_are_told_of(boards, at) -> None:
    _, there = boards
    for rank in (1, 2):
        there.write(rank, Sign(THERE, 1, 1, THERE, False))
    there.mark_left(1)
    there.mark_left(3)
    at(THERE)
    told = gather(there, [2, 3])
    assert (set(told.signs), told.left) == ({2}, (3,))


def test_an_alarm_reaches_the_other_host_and_the_first_one_stays(boards, at) -> None:
    here, there = boards
    at(HERE)
    here.raise_alarm("rank 0 stands still")
    spread(there, gather(here, [0, 1]))
    assert there.alarm() == "rank 0 stands still"
    there_first = Tidings({}, (2,), "another one")
    spread(here, there_first)
    assert here.alarm() == "rank 0 stands still"
    assert here.has_left(2)


def test_tidings_hold_nothing_but_plain_values(boards, at) -> None:
    here, _ = boards
    here.write(0, Sign(HERE, 1, 1, HERE, False))
    at(HERE)
    told = gather(here, [0])
    assert msgspec.convert(msgspec.to_builtins(told), Tidings) == told
