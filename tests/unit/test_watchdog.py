"""Signs of life, alarms, and what a watchdog makes of them; no process and no waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dflash_serve.engine import pulse as pulse_module
from dflash_serve.engine.pulse import Board, Pulse, Sign, describe
from dflash_serve.engine.watchdog import Watchdog

LIMIT_S = 4.0


class Clock:
    """`time.monotonic` of the pulse module, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pulse_module.time, "monotonic", clock.monotonic)
    return clock


def watchdog(pulse: Pulse, board: Board | None = None) -> Watchdog:
    return Watchdog(
        pulse, LIMIT_S, rank=0, board=board, record=lambda _: None, on_trip=lambda _: None
    )


def look_until(dog: Watchdog, clock: Clock, end: float) -> str | None:
    """Look twice a second until a time; returns the first reason to end the engine."""
    while clock.now < end:
        clock.now += 0.5
        if (reason := dog._look(clock.now)) is not None:
            return reason
    return None


def test_only_pending_work_ages_and_a_completed_step_starts_anew(clock: Clock) -> None:
    pulse = Pulse()
    dog = watchdog(pulse)
    assert look_until(dog, clock, 1020) is None
    pulse.begin(7)
    assert look_until(dog, clock, 1023) is None
    pulse.complete(7)
    pulse.begin(8)
    assert look_until(dog, clock, 1026.5) is None
    reason = look_until(dog, clock, 1040)
    assert reason is not None
    assert reason.startswith("no step has completed for 4.5 s (limit 4 s): ")
    assert "rank 0 has been in step 8 for 4.5 s" in reason
    pulse.rest()
    assert look_until(dog, clock, 1060) is None


def test_what_was_asked_for_may_take_longer(clock: Clock) -> None:
    pulse = Pulse()
    dog = watchdog(pulse)
    pulse.begin(1)
    pulse.excuse(60.0)
    pulse.complete(1)
    assert look_until(dog, clock, 1063) is None
    assert look_until(dog, clock, 1070) is not None


def test_a_process_that_was_held_up_itself_judges_nobody_by_that_time(
    clock: Clock, tmp_path: Path
) -> None:
    board = Board(str(tmp_path), 2)
    pulse = Pulse()
    dog = watchdog(pulse, board)
    pulse.begin(1)
    board.write(1, Sign(clock.now, 1, 0, clock.now, True))
    clock.now += 100
    assert dog._look(clock.now) is None
    assert look_until(dog, clock, clock.now + 3) is None
    assert look_until(dog, clock, clock.now + 3) is not None


def test_a_peer_that_fell_silent_in_the_middle_of_work_ends_a_resting_rank(
    clock: Clock, tmp_path: Path
) -> None:
    board = Board(str(tmp_path), 2)
    dog = watchdog(Pulse(), board)
    board.write(1, Sign(clock.now, 3, 2, clock.now, False))
    assert look_until(dog, clock, clock.now + 20) is None  # at rest: nothing is due
    board.write(1, Sign(clock.now, 3, 2, clock.now, True))
    reason = look_until(dog, clock, clock.now + 10)
    assert reason is not None
    assert "rank 1 has given no sign of life for 4.5 s" in reason


def test_an_alarm_ends_every_rank_with_the_first_text(clock: Clock, tmp_path: Path) -> None:
    board = Board(str(tmp_path), 2)
    dog = watchdog(Pulse(), board)
    assert dog._look(clock.now) is None
    assert board.raise_alarm("rank 1 failed") == "rank 1 failed"
    assert board.raise_alarm("rank 0 failed too") == "rank 1 failed"
    assert dog._look(clock.now) == "rank 1 failed"
    assert not list(tmp_path.glob("alarm-*"))


def test_a_board_whose_folder_is_gone_is_no_error(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "gone"), 1)
    board.write(0, Pulse().sign(1.0))
    board.mark_left(0)
    assert board.read() == {0: None}
    assert board.raise_alarm("late") == "late"
    assert board.alarm() is None


def test_the_description_begins_with_the_silent_and_tells_where_the_others_are() -> None:
    signs = {
        0: Sign(100.0, 9, 8, 95.0, True),
        1: Sign(96.0, 9, 8, 95.0, True),
        2: Sign(100.0, 8, 8, 96.0, True),
        3: Sign(100.0, 8, 8, 10.0, False),
        4: None,
    }
    assert describe(signs, 100.0, 5.0).split("; ") == [
        "rank 1 has given no sign of life for 4.0 s: its process is stopped, or stuck outside "
        "Python",
        "rank 0 has been in step 9 for 5.0 s",
        "rank 2 has begun no step after step 8 for 4.0 s",
        "rank 3 rests after step 8",
        "rank 4 has not begun to serve",
    ]


def test_a_block_that_raises_is_recorded_and_alarms_the_others(tmp_path: Path) -> None:
    board, reasons, trips = Board(str(tmp_path), 2), [], []
    dog = Watchdog(Pulse(), 0.1, rank=1, board=board, record=reasons.append, on_trip=trips.append)
    with pytest.raises(ValueError, match="odd"), dog:
        raise ValueError("odd")
    assert reasons == ["rank 1 failed: ValueError: odd"]
    assert board.alarm() == reasons[0]
    assert trips == []
    assert not [t for t in threading.enumerate() if t.name == "watchdog"]


def test_a_trip_records_before_it_ends_the_rank() -> None:
    calls: list[str] = []
    ended = threading.Event()
    pulse = Pulse()
    dog = Watchdog(
        pulse,
        0.05,
        rank=0,
        board=None,
        record=lambda reason: calls.append(f"record {reason}"),
        on_trip=lambda reason: (calls.append(f"end {reason}"), ended.set()),  # type: ignore[func-returns-value]
    )
    with dog:
        pulse.begin(0)
        assert ended.wait(30)
    assert [call.split()[0] for call in calls] == ["record", "end"]
    assert "rank 0 has been in step 0" in calls[1]


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("a folder of another user"),
        UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
        KeyError("what no recorder raises"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_flight_record_that_cannot_be_written_does_not_keep_the_rank(error: Exception) -> None:
    def fail(_: str) -> None:
        raise error

    ended = threading.Event()
    pulse = Pulse()
    dog = Watchdog(pulse, 0.05, rank=0, board=None, record=fail, on_trip=lambda _: ended.set())
    with dog:
        pulse.begin(0)
        assert ended.wait(30)


def test_a_flight_record_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise OSError("the disk is full")

    board = Board(str(tmp_path), 2)
    dog = Watchdog(Pulse(), 0.1, rank=1, board=board, record=fail, on_trip=lambda _: None)
    with pytest.raises(ValueError, match="odd"), dog:
        raise ValueError("odd")
    assert board.alarm() == "rank 1 failed: ValueError: odd"
