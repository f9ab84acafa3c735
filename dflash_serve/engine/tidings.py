"""What one host's board tells another's: signs of life with ages in place of times (no torch).

A gang over several hosts has a board on each, and every host a clock of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from dflash_serve.engine.pulse import Board, Sign

__all__ = ["Tidings", "gather", "spread"]


class Tidings(NamedTuple):
    """State of some ranks, and of the alarm, as of one moment.

    Attributes:
        signs: by rank; `heard` and `since` are ages in seconds.
        left: ranks that their watchdog ends.
        alarm: its text, once raised.
    """

    signs: dict[int, Sign]
    left: tuple[int, ...] = ()
    alarm: str | None = None


def gather(board: Board, ranks: Iterable[int]) -> Tidings:
    """What a board says of `ranks` now."""
    now, chosen = time.monotonic(), set(ranks)
    signs = {
        rank: sign._replace(heard=now - sign.heard, since=now - sign.since)
        for rank, sign in board.read().items()
        if sign is not None and rank in chosen
    }
    left = tuple(sorted(rank for rank in chosen if board.has_left(rank)))
    return Tidings(signs, left, board.alarm())


def spread(board: Board, tidings: Tidings) -> None:
    """Write another host's tidings on a board, in this host's time.

    The way here counts as no time: a sign looks younger than it is, by less than what a call
    takes, and one that arrives no more grows old.
    """
    now = time.monotonic()
    for rank, sign in tidings.signs.items():
        board.write(rank, sign._replace(heard=now - sign.heard, since=now - sign.since))
    for rank in tidings.left:
        board.mark_left(rank)
    if tidings.alarm is not None and board.alarm() is None:
        board.raise_alarm(tidings.alarm)
