"""Which replica a request goes to: the choice itself, and Serve's side of it without Ray."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router.common import ReplicaQueueLengthCache

from dflash_serve.api.protocol import GenerationRequest
from dflash_serve.sampling import SamplingParams
from dflash_serve.serve import wire
from dflash_serve.serve.room import Room
from dflash_serve.serve.route_choice import (
    Chooser,
    LoadReport,
    ReplicaView,
    RouteRules,
    relative_loads,
)
from dflash_serve.serve.route_prefix import PrefixIndex, SessionTable, read_asked
from dflash_serve.serve.routing import EngineRouter
from dflash_serve.serve.settings import RoutingSettings

BLOCK = 64
RULES = RoutingSettings(
    block_bytes=BLOCK, request_blocks=100, replica_blocks=200, sessions=20, min_overlap_bytes=128
).rules(max_running=8)


def chooser(**changes: Any) -> Chooser:
    return Chooser(RouteRules(**RULES | changes), random.Random(0))


def encoded(**fields: Any) -> bytes:
    request = GenerationRequest(
        request_id="r", model="m", params=SamplingParams(max_tokens=1, seed=0), **fields
    )
    return wire.encode_request(request)


def asked(text: str = "", **fields: Any):
    return read_asked(encoded(prompt=text, **fields), BLOCK, 100)


def views(**loads: int) -> list[ReplicaView]:
    return [ReplicaView(name, ongoing=ongoing) for name, ongoing in loads.items()]


def report(**changes: Any) -> LoadReport:
    given = {"requests": 0, "tokens": 0, "kv_tokens": 0, "kv_use": 0.0, "starts": 0}
    return LoadReport(**given | changes)


def text(seed: int, blocks: int = 10) -> str:
    generator = random.Random(seed)
    return "".join(generator.choices("abcdefgh ", k=blocks * BLOCK))


# -- what is compared ------------------------------------------------------------------------


def test_requests_that_begin_alike_share_their_first_blocks_only():
    common = text(1, blocks=4)
    one, two = asked(common + text(2)), asked(common + text(3))
    assert one.blocks[:4] == two.blocks[:4]
    assert not set(one.blocks[4:]) & set(two.blocks[4:])
    assert len(one.blocks) == 14


def test_equal_blocks_after_a_difference_are_not_equal_beginnings():
    one, two = asked(text(1, 1) + text(9, 3)), asked(text(2, 1) + text(9, 3))
    assert not set(one.blocks) & set(two.blocks)


def test_a_conversation_begins_like_the_one_it_continues():
    first = [{"role": "user", "content": text(1, 3)}]
    later = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    one, two = (
        read_asked(encoded(messages=messages), BLOCK, 100).blocks for messages in (first, later)
    )
    assert len(one) == 3
    assert two[:3] == one


def test_a_message_may_begin_like_a_shorter_one():
    document = text(1, 5)
    one, two = (
        read_asked(encoded(messages=[{"role": "user", "content": content}]), BLOCK, 100).blocks
        for content in (document + "What?", document + "And a rather longer question: why?" * 4)
    )
    assert one[:5] == two[:5]


def test_token_ids_have_a_prefix_too():
    ids = list(range(100))
    one, two = (
        read_asked(encoded(prompt=given), BLOCK, 100).blocks
        for given in (ids, [*ids[:80], *range(500, 540)])
    )
    assert len(one) == 100 * 4 // BLOCK
    assert one[:5] == two[:5]
    assert one[5:] != two[5:6]


def test_other_salts_share_nothing():
    assert not set(asked(text(1)).blocks) & set(asked(text(1), cache_salt="tenant").blocks)


def test_only_the_beginning_of_a_long_request_is_looked_at():
    assert len(asked(text(1, blocks=500)).blocks) == 100


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa6prompt\xc3"])
def test_what_cannot_be_read_has_no_prefix(data):
    found = read_asked(data, BLOCK, 100)
    assert (found.blocks, found.session) == ((), None)


def test_ids_out_of_range_have_no_prefix():
    assert read_asked(encoded(prompt=[2**40] * 100), BLOCK, 100).blocks == ()


def test_lone_surrogates_have_no_prefix():
    data = encoded(prompt="x" * 200).replace(b"xx", b"\xed\xa0", 1)
    assert read_asked(data, BLOCK, 100).blocks == ()


# -- the choice ------------------------------------------------------------------------------


def test_the_longest_overlap_wins():
    choose = chooser()
    choose.sent(asked(text(1, 4) + text(2, 6)), "a")
    choose.sent(asked(text(1, 4) + text(3, 6)), "b")
    for _ in range(20):
        choice = choose.choose(asked(text(1, 4) + text(3, 6)), views(a=0, b=2, c=0))
        assert (choice.order[0], choice.reason) == ("b", "prefix")
    assert choice.order[2:] in (("a",), ("c",))


def test_of_replicas_that_have_about_the_same_the_least_loaded_wins():
    choose = chooser()
    for name in "ab":
        choose.sent(asked(text(1)), name)
    assert choose.choose(asked(text(1)), views(a=2, b=1, c=0)).order[0] == "b"


def test_an_overloaded_favourite_loses():
    choose = chooser(overload_requests=4.0, overload_factor=1.5)
    choose.sent(asked(text(1)), "a")
    assert choose.choose(asked(text(1)), views(a=7, b=2)).reason == "prefix"
    choice = choose.choose(asked(text(1)), views(a=8, b=2))
    assert (choice.order, choice.reason) == (("b", "a"), "load")


def test_a_favourite_with_full_pages_loses_while_another_has_room():
    choose = chooser()
    choose.sent(asked(text(1)), "a")
    full = ReplicaView("a", 0, report(kv_use=0.99))
    assert choose.choose(asked(text(1)), [full, ReplicaView("b", 1, report())]).order[0] == "b"
    also = ReplicaView("b", 0, report(kv_use=0.97))
    assert choose.choose(asked(text(1)), [full, also]).order[0] == "a"


def test_a_small_overlap_decides_nothing():
    choose = chooser(min_overlap_bytes=3 * BLOCK)
    choose.sent(asked(text(1, 2)), "a")
    assert choose.choose(asked(text(1, 2) + text(2)), views(a=1, b=0)).reason == "load"
    choose.sent(asked(text(1, 2) + text(3)), "a")
    assert choose.choose(asked(text(1, 2) + text(3)), views(a=1, b=0)).reason == "prefix"


def test_without_overlap_the_less_loaded_of_two_is_taken():
    choose = chooser()
    taken = Counter(choose.choose(asked(), views(a=0, b=1, c=9)).order[0] for _ in range(300))
    assert taken["c"] == 0  # the most loaded loses every comparison
    assert 150 < taken["a"] < 250  # two of the three pairs
    choice = choose.choose(asked(), views(a=0, b=1, c=9))
    assert sorted(choice.order) == ["a", "b", "c"]


def test_new_beginnings_go_where_less_is_kept_while_loads_are_equal():
    choose = chooser()
    sent = Counter()
    for number in range(18):
        given = asked(text(number, 3))
        name = choose.choose(given, views(a=0, b=0, c=0)).order[0]
        choose.sent(given, name)
        sent[name] += 1
    assert max(sent.values()) - min(sent.values()) <= 2
    choose.sent(asked(text(99, 100)), "a")
    assert choose.choose(asked(), views(a=0, b=1)).order[0] == "a"


def test_a_session_sticks_moves_when_overloaded_and_stays_where_it_went():
    choose = chooser(overload_requests=2.0)
    first = asked("short", session="one")
    choose.sent(first, "a")
    for _ in range(20):
        assert choose.choose(first, views(a=2, b=0)).reason == "session"
    choice = choose.choose(first, views(a=3, b=0))
    assert (choice.order[0], choice.reason) == ("b", "load")
    choose.sent(first, "b")
    assert choose.choose(first, views(a=0, b=2)).order[0] == "b"
    assert choose.choose(asked("short", session="two"), views(a=0, b=2)).reason == "load"


def test_a_session_counts_more_than_an_overlap():
    choose = chooser()
    choose.sent(asked(text(1)), "b")
    choose.sent(asked(session="one"), "a")
    assert choose.choose(asked(text(1), session="one"), views(a=1, b=1)).order[0] == "a"


def test_a_dead_replica_is_forgotten_with_its_sessions():
    choose = chooser()
    for name in "ab":
        choose.sent(asked(text(ord(name)), session=name), name)
    choose.retain({"b", "c"})
    assert len(choose.index) == 10
    assert len(choose.sessions) == 1
    assert choose.choose(asked(text(ord("a"))), views(b=0, c=0)).reason == "load"
    assert choose.choose(asked(session="a"), views(b=0, c=0)).reason == "load"
    assert choose.choose(asked(text(ord("b"))), views(b=0, c=0)).reason == "prefix"
    # One of the same name that comes later begins with nothing.
    assert choose.choose(asked(text(ord("a"))), views(a=0, b=0)).reason == "load"


def test_ranks_started_again_have_nothing_cached():
    choose = chooser()
    before = [ReplicaView("a", 0, report(starts=0)), ReplicaView("b", 0, report())]
    after = [ReplicaView("a", 0, report(starts=1)), ReplicaView("b", 0, report())]
    choose.choose(asked(), before)
    choose.sent(asked(text(1)), "a")
    assert choose.choose(asked(text(1)), before).reason == "prefix"
    assert choose.choose(asked(text(1)), after).reason == "load"
    choose.sent(asked(text(1)), "a")
    assert choose.choose(asked(text(1)), after).reason == "prefix"


def test_replicas_without_room_are_passed_by_unless_there_are_no_others():
    choose = chooser()
    choose.sent(asked(text(1)), "a")
    away = ReplicaView("a", 0, able=False)
    assert choose.choose(asked(text(1)), [away, *views(b=3, c=3)]).order in (
        ("b", "c"),
        ("c", "b"),
    )
    assert choose.choose(asked(text(1)), [away]).order == ("a",)


def test_round_robin_takes_turns_and_learns_nothing():
    choose = chooser(policy="round_robin")
    order = []
    for _ in range(6):
        order.append(choose.choose(asked(text(1)), views(b=0, a=9, c=0)).order[0])
        choose.sent(asked(text(1), session="s"), order[-1])
    assert order == ["a", "b", "c"] * 2
    assert len(choose.index) == len(choose.sessions) == 0


# -- loads -----------------------------------------------------------------------------------


def test_load_without_reports_is_requests():
    assert relative_loads(views(a=3, b=0)) == {"a": 3.0, "b": 0.0}
    assert relative_loads([ReplicaView("a")]) == {"a": 0.0}


def test_load_counts_tokens_and_the_requests_since_the_report():
    pool = [
        ReplicaView("long", 2, report(requests=2, tokens=6000)),
        ReplicaView("short", 5, report(requests=4, tokens=1200)),
        ReplicaView("idle", 0, report(requests=1, tokens=100)),
        ReplicaView("unknown", None, report(requests=1, tokens=1100)),
    ]
    usual = (6000 + 1200 + 100 + 1100) / 8
    assert relative_loads(pool) == pytest.approx(
        {
            "long": 6000 / usual,
            "short": 1200 / usual + 1,
            "idle": 0.0,
            "unknown": 1100 / usual,
        }
    )


def test_requests_count_where_no_tokens_are_reported():
    pool = [ReplicaView("a", 3, report(requests=2)), ReplicaView("b", 0, report())]
    assert relative_loads(pool) == {"a": 3.0, "b": 0.0}


def test_a_report_of_other_fields_is_none():
    assert LoadReport.read({}) is None
    assert LoadReport.read({"requests": 1, "unheard": 2}) is None


# -- bounds ----------------------------------------------------------------------------------


def test_the_index_keeps_the_blocks_used_last_and_beginnings_before_ends():
    index = PrefixIndex(8)
    first, second = asked(text(1, 5)).blocks, asked(text(2, 5)).blocks
    index.learn("a", first)
    index.learn("a", second)
    assert len(index) == 8
    assert index.overlap("a", second) == 5
    assert index.overlap("a", first) == 3
    assert index.overlap("b", first) == 0


def test_memory_is_bounded_whatever_comes():
    choose = chooser()
    for number in range(2_000):
        name = "abc"[number % 3]
        choose.sent(asked(text(number, blocks=12), session=str(number)), name)
    assert len(choose.index) == 3 * 200
    assert len(choose.sessions) == 20


def test_no_more_is_remembered_than_a_replica_can_have_cached():
    choose = chooser()
    pool = [ReplicaView("a", 0, report(kv_tokens=8 * BLOCK // 4)), *views(b=0)]
    choose.choose(asked(), pool)
    choose.sent(asked(text(1, blocks=50)), "a")
    choose.sent(asked(text(2, blocks=50)), "b")
    assert len(choose.index) == 8 + 50


def test_the_session_table_drops_the_session_longest_unheard_of():
    table = SessionTable(2)
    table.served(b"1", "a")
    table.served(b"2", "b")
    table.served(b"1", "a")
    table.served(b"3", "b")
    assert [table.replica(s) for s in (b"1", b"2", b"3")] == ["a", None, "b"]


def test_overload_follows_max_running_unless_given():
    assert RoutingSettings().rules(64)["overload_requests"] == 16
    assert RoutingSettings().rules(4)["overload_requests"] == 2
    assert RoutingSettings(overload_requests=3).rules(64)["overload_requests"] == 3


# -- Serve's side ----------------------------------------------------------------------------


class Candidate:
    """What the router reads of a `RunningReplica`."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("Replica"))
        self.routing_stats: dict[str, Any] = {}


@pytest.fixture
def router(monkeypatch):
    monkeypatch.setattr("dflash_serve.serve.room.ROOM", Room(believed_s=60))
    made = object.__new__(EngineRouter)  # Serve's own state needs a running Serve
    made._replica_queue_len_cache = ReplicaQueueLengthCache()
    made.initialize_state(**RULES)
    return made


def pending(data: bytes) -> Any:
    return SimpleNamespace(args=[data], routing_context=SimpleNamespace(should_backoff=False))


async def order(router, replicas, request):
    ranks = await router.choose_replicas(replicas, request)
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


async def test_the_router_learns_from_what_serve_sent(router):
    replicas = [Candidate(name) for name in "abc"]
    request = pending(encoded(prompt=text(1)))
    assert sorted(await order(router, replicas, request)) == ["a", "b", "c"]
    assert request.routing_context.should_backoff
    router.on_request_routed(request, replicas[2].replica_id, None)
    for _ in range(10):
        assert (await order(router, replicas, pending(encoded(prompt=text(1)))))[0] == "c"


async def test_the_router_counts_with_serves_queues_and_the_replicas_reports(router):
    replicas = [Candidate(name) for name in "ab"]
    router.replica_queue_len_cache.update(replicas[0].replica_id, 5)
    router.replica_queue_len_cache.update(replicas[1].replica_id, 4)
    assert (await order(router, replicas, None))[0] == "b"
    given = {"kv_tokens": 0, "kv_use": 0.0, "starts": 0}
    replicas[0].routing_stats = given | {"requests": 5, "tokens": 50}
    replicas[1].routing_stats = given | {"requests": 4, "tokens": 4000}
    assert (await order(router, replicas, None))[0] == "a"


async def test_the_router_passes_by_replicas_without_room(router):
    from dflash_serve.serve import room

    replicas = [Candidate(name) for name in "abc"]
    room.ROOM.none_at("b")
    for _ in range(20):
        assert sorted(await order(router, replicas, None)) == ["a", "c"]
    room.ROOM.none_at("a")
    assert await order(router, replicas, None) == ["c"]
    room.ROOM.none_at("c")  # nobody has any: any of them may be the first to have some again
    assert sorted(await order(router, replicas, None)) == ["a", "b", "c"]


async def test_calls_that_are_no_requests_are_routed_by_load(router):
    replicas = [Candidate(name) for name in "ab"]
    for args in ([], ["text"], [b"garbage"]):
        call = SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))
        assert sorted(await order(router, replicas, call)) == ["a", "b"]
        router.on_request_routed(call, replicas[0].replica_id, None)
    assert await router.choose_replicas([], None) == []
