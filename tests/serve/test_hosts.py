"""A gang over two Ray nodes: the same ids, and a death on either node ends all of it.

Both nodes are on this machine and have its address; `tests/multihost` gives each its own.
"""

import contextlib
import os
import signal

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import Submit
from dflash_serve.errors import EngineDeadError
from dflash_serve.sampling import SamplingParams
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.processes import is_running
from tests.tiny import make_pair

from .conftest import node, placement_groups, run_dirs
from .waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def second_node(ray_cluster):
    with node(ray_cluster, cpus=4):
        yield


@pytest.fixture
def clean(ray_cluster, second_node):
    """Fails a test that leaves a placement group or a run folder behind."""
    groups, folders = placement_groups(ray_cluster), run_dirs()
    yield
    until(lambda: placement_groups(ray_cluster) == groups, "placement groups are as before")
    until(lambda: run_dirs() == folders, "run folders are as before")


def config(tmp_path, tp):
    pair = make_pair(tmp_path)
    return EngineConfig(
        target=pair.target,
        draft=pair.draft,
        tensor_parallel_size=tp,
        device="cpu",
        executor="ray",
        max_model_len=500,
        hang_timeout_s=3,
        record_dir=str(tmp_path / "records"),
    )


@contextlib.contextmanager
def started(config, hosts):
    ranks = RayExecutor(config, rank_cpus=0.5, hosts=hosts)
    client = EngineClient(ranks, start_timeout_s=120, hang_timeout_s=config.hang_timeout_s)
    try:
        yield ranks, client
    finally:
        client.shutdown()


def submits(max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=3)
    return [
        Submit(request_id=str(n), prompt_ids=list(range(3, 20 + n)), params=params)
        for n in range(4)
    ]


def ids(client):
    found = client.collect(submits(60))
    return {name: [i for e in events for i in e.token_ids] for name, events in found.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_ids_are_those_of_a_gang_on_one_host(clean, tmp_path, tp):
    settings = config(tmp_path, tp)
    with started(settings, hosts=1) as (ranks, client):
        assert len({place.node_id for place in ranks.places}) == 1
        expected = ids(client)
    with started(settings, hosts=2) as (ranks, client):
        nodes = [place.node_id for place in ranks.places]
        assert len(set(nodes)) == 2
        assert nodes == sorted(nodes, key=nodes.index)
        assert ids(client) == expected
    assert not any(is_running(place.pid) for place in ranks.places)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("sign", "text"),
    [(signal.SIGKILL, "rank {} died"), (signal.SIGSTOP, "rank {} has given no sign of life for")],
)
def test_what_happens_to_a_rank_on_either_host_ends_the_gang(clean, tmp_path, victim, sign, text):
    with started(config(tmp_path, 2), hosts=2) as (ranks, client):
        target = [ranks.places[victim].pid]

        def strike(event):
            while target:
                os.kill(target.pop(), sign)

        with pytest.raises(EngineDeadError, match=text.format(victim)):
            client.collect(submits(400), strike)
        until(lambda: not any(is_running(p.pid) for p in ranks.places), "all ranks are gone", 15)
