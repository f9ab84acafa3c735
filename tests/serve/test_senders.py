"""Requests end with the front end they came from."""

import asyncio

import pytest

from dflash_serve.serve.senders import Senders, actor_is_gone, own_actor_name

from .waiting import until


class Front:
    """Front ends that die when told to."""

    def __init__(self):
        self.dead = set()
        self.asked = []

    def is_gone(self, name):
        self.asked.append(name)
        return name in self.dead


@pytest.fixture
def front():
    return Front()


@pytest.fixture
def senders(front):
    return Senders(front.is_gone, poll_s=0.005)


async def test_requests_of_a_dead_front_end_are_cancelled_and_others_are_not(front, senders):
    ended = []

    async def request(name, sender):
        with senders.watched(sender):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(name)

    calls = [("a1", "a"), ("a2", "a"), ("b", "b"), ("none", None)]
    tasks = [asyncio.create_task(request(*call)) for call in calls]
    await asyncio.sleep(0.05)
    assert not ended
    front.dead.add("a")
    await asyncio.wait(tasks[:2], timeout=10)
    assert sorted(ended) == ["a1", "a2"]
    assert all(task.cancelled() for task in tasks[:2])
    await asyncio.sleep(0.05)
    assert not tasks[2].done()
    assert not tasks[3].done()
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_that_has_ended_is_not_cancelled_and_nobody_is_asked_about(front, senders):
    with senders.watched("a"):
        pass
    await asyncio.sleep(0.05)
    front.dead.add("a")
    asked = len(front.asked)
    await asyncio.sleep(0.05)
    assert len(front.asked) == asked
    # The watch begins again with the next request.
    front.dead.clear()

    async def request():
        with senders.watched("a"):
            await asyncio.sleep(60)

    task = asyncio.create_task(request())
    await asyncio.sleep(0.05)
    front.dead.add("a")
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


async def test_a_front_end_that_was_never_found_is_not_taken_for_dead(front, senders):
    front.dead.add("a")
    with senders.watched("a"):
        await asyncio.sleep(0.05)
    assert "a" in front.asked


@pytest.mark.ray
def test_a_killed_actor_is_gone(ray_cluster):
    class Actor:
        def name(self):
            return own_actor_name()

    options = {"num_cpus": 0.1, "name": "front-1", "namespace": "serve"}
    actor = ray_cluster.remote(Actor).options(**options).remote()
    assert ray_cluster.get(actor.name.remote(), timeout=60) == "front-1"
    assert own_actor_name() is None
    assert not actor_is_gone("front-1")
    ray_cluster.kill(actor)
    # Ray ends it some time after the call has returned.
    until(lambda: actor_is_gone("front-1"), "its end is known")
