"""Messages and the channels that carry them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dflash_serve.engine.client import Port
from dflash_serve.engine.consensus import Echo
from dflash_serve.engine.lines import (
    EchoReceiver,
    EchoSender,
    Inbox,
    Lines,
    PlanReceiver,
    PlanSender,
    local_lines,
)
from dflash_serve.engine.messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    LengthStats,
    Report,
    Shutdown,
    Submit,
    TokenEvent,
    Trace,
    Traced,
    decode_commands,
    decode_report,
    encode,
)
from dflash_serve.engine.sockets import Socket, make_key
from dflash_serve.engine.transport import Mailbox, QueueChannel, ZmqMailbox, ZmqPort
from dflash_serve.sampling import MAX_SEED, SamplingParams
from dflash_serve.scheduler.plan import PrefillChunk, SlotSetup, StepPlan

WAIT_S = 10.0

COMMANDS: list[Command] = [
    Submit(
        request_id="é\n",
        prompt_ids=[0, 2**31, 5],
        params=SamplingParams(
            max_tokens=7,
            seed=MAX_SEED,
            temperature=0.7,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            stop_token_ids=(3, 4),
            ignore_eos=True,
        ),
        emitted_ids=[9],
        cache_salt="tenant",
    ),
    Abort("r"),
    Shutdown(),
    Trace(5, "/tmp/é"),
]

REPORT = Report(
    events=[
        TokenEvent(
            request_id="r",
            token_ids=[1, 2],
            finish_reason="stop",
            cached_tokens=0,
            drafted=7,
            accepted=1,
        ),
        TokenEvent(request_id="s", finish_reason="error", error="why"),
    ],
    stats=EngineStats(
        steps=3,
        finished={"stop": 1},
        step_seconds=0.25,
        by_length={8: LengthStats(drafts=2, emitted=5, accepted_per_position=[2, 1])},
    ),
    info=EngineInfo(
        model_type="llama",
        max_model_len=64,
        vocab_size=320,
        eos_token_ids=[1],
        verify_length=8,
        block_size=None,
        tensor_parallel_size=1,
        device="cpu",
        dtype="float32",
        executor="inproc",
        num_pages=9,
        page_size=16,
        max_running=2,
        weight_bytes=2**40,
        kv_bytes=0,
        load_seconds=0.5,
        versions={"torch": "2"},
    ),
    fatal="why",
)

PLAN = StepPlan(
    step=4,
    setups=[
        SlotSetup(
            slot=1,
            start=16,
            anchor=5,
            seed=MAX_SEED,
            temperature=0.5,
            top_k=1,
            top_p=0.3,
            min_p=0.0,
        )
    ],
    pages=[(1, 0, [4, 5])],
    prefill=[PrefillChunk(slot=1, start=16, token_ids=[7, 8], sample=True)],
    decode=[0, 2],
    rows=8,
    longest=40,
    noisy=True,
)


def test_commands_survive_the_wire() -> None:
    assert decode_commands(encode(COMMANDS)) == COMMANDS


def test_reports_survive_the_wire() -> None:
    assert decode_report(encode(REPORT)) == REPORT
    assert decode_report(encode(Report())) == Report()


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([{"type": "exec"}])])
def test_what_is_no_message_is_not_decoded(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_commands(data)


@pytest.fixture(params=["queue", "zmq"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Port, Mailbox]]:
    """Both ends of a channel."""
    if request.param == "queue":
        both = QueueChannel()
        yield both, both.mailbox
        return
    port, mailbox = ZmqPort.bind(str(tmp_path)), ZmqMailbox(str(tmp_path))
    yield port, mailbox
    mailbox.close()
    port.close()


def until(condition: Callable[[], bool], step: Callable[[], None]) -> None:
    """Repeat `step`, which itself waits, until the condition holds."""
    for _ in range(100):
        if condition():
            return
        step()
    raise AssertionError("nothing came")


def test_commands_arrive_in_order(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    sent = [Abort(f"r{i}") for i in range(50)]
    for command in sent:
        port.send([command])
    got: list[Command] = []
    until(lambda: len(got) == 50, lambda: got.extend(mailbox.receive(0.2)))
    assert got == sent


def test_a_batch_of_commands_arrives_whole(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    port.send(COMMANDS)
    assert mailbox.receive(WAIT_S) == COMMANDS


def test_reports_arrive_in_order(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    for step in range(20):
        mailbox.send(Report(stats=EngineStats(steps=step)))
    got = [port.receive(WAIT_S) for _ in range(20)]
    assert [r.stats.steps for r in got if r is not None and r.stats] == list(range(20))


def test_a_report_is_a_snapshot(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    stats = EngineStats(steps=1)
    mailbox.send(Report(stats=stats))
    stats.steps = 2
    report = port.receive(WAIT_S)
    assert report is not None
    assert report.stats == EngineStats(steps=1)


def test_receiving_nothing_returns_in_time(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    assert port.receive(0.01) is None
    assert mailbox.receive(0.01) == []
    assert mailbox.receive(0.0) == []


def test_a_waiting_end_wakes_when_something_comes(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    got: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: got.put(mailbox.receive(WAIT_S)))
    thread.start()
    port.send([Abort("r")])
    assert got.get(timeout=WAIT_S) == [Abort("r")]
    thread.join()


def test_many_threads_may_send(channel: tuple[Port, Mailbox]) -> None:
    port, mailbox = channel
    threads = [
        threading.Thread(target=lambda n=n: [port.send([Abort(f"{n}-{i}")]) for i in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[Command] = []
    until(lambda: len(got) == 200, lambda: got.extend(mailbox.receive(0.2)))
    for thread in threads:
        thread.join()
    names = [c.request_id for c in got if isinstance(c, Abort)]
    for n in range(4):
        mine = [name for name in names if name.startswith(f"{n}-")]
        assert mine == [f"{n}-{i}" for i in range(50)]


def test_commands_sent_before_the_other_end_exists_are_kept(tmp_path: Path) -> None:
    port = ZmqPort.bind(str(tmp_path))
    port.send([Abort("early")])
    mailbox = ZmqMailbox(str(tmp_path))
    assert mailbox.receive(WAIT_S) == [Abort("early")]
    mailbox.close()
    port.close()


def test_commands_to_a_dead_peer_block_nobody(tmp_path: Path) -> None:
    port, mailbox = ZmqPort.bind(str(tmp_path)), ZmqMailbox(str(tmp_path))
    port.send([Abort("r")])
    assert mailbox.receive(WAIT_S) == [Abort("r")]
    mailbox.close()
    senders = [
        threading.Thread(target=lambda: port.send([Abort("late")]), daemon=True) for _ in range(3)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(WAIT_S)
        assert not sender.is_alive()
    port.close()


def test_every_follower_gets_every_plan(tmp_path: Path) -> None:
    lines = local_lines(str(tmp_path), 4)
    sender = PlanSender(lines)
    receivers = [PlanReceiver(lines, rank) for rank in (1, 2, 3)]
    stop = StepPlan(step=-1, stop=True)
    sender.send(PLAN)
    sender.send(stop)
    for receiver in receivers:
        assert receiver.receive() == PLAN
        assert receiver.receive() == stop
        receiver.close()
    sender.close()


def test_channels_close_twice_without_harm(tmp_path: Path) -> None:
    port = ZmqPort.bind(str(tmp_path))
    port.close()
    port.close()


def test_every_followers_echoes_reach_rank_zero_in_its_order(tmp_path: Path) -> None:
    lines = local_lines(str(tmp_path), 3)
    early = EchoSender(lines)
    early.send(Echo(1, 0, 2**64 - 1))  # rank 0 is not there yet
    receiver = EchoReceiver(lines)
    late = EchoSender(lines)
    traced = Traced(rank=2, folder="t", path="t/trace-rank2.json")
    for step in range(1, 50):
        early.send(Echo(1, step, step))
        late.send(Echo(2, step, step, traced if step == 7 else None))
    found: list[Echo] = []
    while len(found) < 99:
        arrived = receiver.receive(10.0)
        assert arrived, "echoes are missing"
        found += arrived
    assert [echo.step for echo in found if echo.rank == 1] == list(range(50))
    assert next(echo.checksum for echo in found if echo.rank == 1) == 2**64 - 1
    assert [echo.step for echo in found if echo.traced == traced] == [7]
    assert receiver.receive(0.0) == []
    for end in (early, late, receiver):
        end.close()


def test_ranks_on_several_hosts_talk_over_keyed_tcp() -> None:
    key = make_key()
    inboxes = [Inbox("127.0.0.1", key) for _ in range(3)]
    lines = Lines(tuple(i.endpoint for i in inboxes[1:]), inboxes[0].endpoint, key)
    plans, echoes = PlanSender(lines), EchoReceiver(lines, inboxes[0])
    followers = [(PlanReceiver(lines, r, inboxes[r]), EchoSender(lines)) for r in (1, 2)]
    plans.send(PLAN)
    for rank, (receiver, sender) in enumerate(followers, start=1):
        assert receiver.receive() == PLAN
        sender.send(Echo(rank, 3, rank))
    found: list[Echo] = []
    while len(found) < 2:
        arrived = echoes.receive(WAIT_S)
        assert arrived, "echoes are missing"
        found += arrived
    assert sorted(echo.rank for echo in found) == [1, 2]
    for end in (plans, echoes, *(end for pair in followers for end in pair)):
        end.close()


def test_a_stranger_reaches_no_inbox() -> None:
    key = make_key()
    inbox = Inbox("127.0.0.1", key)
    stranger = Socket(inbox.endpoint, bind=False, kind="PUSH", key=make_key())
    stranger.send(b"stop")
    assert inbox.socket.receive(1.0) is None
    friend = Socket(inbox.endpoint, bind=False, kind="PUSH", key=key)
    friend.send(b"go on")
    assert inbox.socket.receive(WAIT_S) == b"go on"
    for end in (stranger, friend, inbox.socket):
        end.close()


def test_a_socket_that_others_could_reach_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs the gang's key"):
        Socket("tcp://127.0.0.1:*", bind=True, kind="PULL")
