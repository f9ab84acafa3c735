import os
import signal

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.cores import usable_cores
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.messages import Submit
from dflash_serve.errors import EngineDeadError
from dflash_serve.sampling import SamplingParams
from dflash_serve.serve.deaths import describe_death
from dflash_serve.serve.gang import RayExecutor
from dflash_serve.serve.processes import is_running
from tests.tiny import make_pair

from .conftest import placement_groups, run_dirs
from .waiting import until

pytestmark = pytest.mark.ray

FAKE = "tests.serve.fake_rank"


def executor(tp: int, target: str = "/m/fake") -> RayExecutor:
    config = EngineConfig(target=target, tensor_parallel_size=tp, device="cpu", executor="ray")
    return RayExecutor(config, rank_cpus=0.5, runner=FAKE)


def submit(request_id: str = "a", max_tokens: int = 3) -> Submit:
    return Submit(
        request_id=request_id, prompt_ids=[5], params=SamplingParams(max_tokens=max_tokens)
    )


def start_and_ask(ranks: RayExecutor) -> None:
    """A long request: the stand-in's rank 0 does not wait for the others to load."""
    EngineClient(ranks, start_timeout_s=60).collect([submit(max_tokens=100_000)])


@pytest.fixture
def clean(ray_cluster):
    """Fails a test that leaves a placement group or a socket folder behind."""
    groups, folders = placement_groups(ray_cluster), run_dirs()
    yield ray_cluster
    until(lambda: placement_groups(ray_cluster) == groups, "placement groups are as before")
    assert run_dirs() == folders


@pytest.mark.parametrize("tp", [1, 2])
def test_gang_serves_and_shuts_down_completely(clean, tp):
    ranks = executor(tp)
    client = EngineClient(ranks, start_timeout_s=60)
    events = client.collect([submit()])["a"]
    assert [e.token_ids for e in events] == [[6], [7], [8]]
    assert len({place.pid for place in ranks.places}) == tp
    assert list(ranks.start_seconds) == ["create", "report", "rank_map"]
    client.shutdown()
    client.shutdown()
    ranks.shutdown()
    assert not any(is_running(place.pid) for place in ranks.places)


@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_one_rank_ends_all(clean, victim):
    ranks = executor(2)
    client = EngineClient(ranks, start_timeout_s=60)
    os.kill(ranks.places[victim].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"rank {victim} died"):
        client.collect([submit(max_tokens=100_000)])
    with pytest.raises(EngineDeadError):
        client.check_health()
    until(lambda: not any(is_running(p.pid) for p in ranks.places), "both ranks are gone", 5)
    client.shutdown()


def test_a_stopped_rank_zero_ends_all(clean):
    ranks = executor(2)
    client = EngineClient(ranks, start_timeout_s=60, hang_timeout_s=1.5)
    os.kill(ranks.places[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="rank 0 has reported nothing for"):
        client.collect([submit(max_tokens=100_000)])
    with pytest.raises(EngineDeadError):
        client.check_health()
    until(lambda: not any(is_running(p.pid) for p in ranks.places), "both ranks are gone", 5)
    client.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_of_a_real_pair_is_named_and_ends_all(clean, tmp_path, victim):
    pair = make_pair(tmp_path)
    config = EngineConfig(
        target=pair.target,
        draft=pair.draft,
        tensor_parallel_size=2,
        device="cpu",
        executor="ray",
        max_model_len=500,
        hang_timeout_s=3,
        record_dir=str(tmp_path / "records"),
    )
    ranks = RayExecutor(config, rank_cpus=0.5)
    client = EngineClient(ranks, start_timeout_s=120, hang_timeout_s=config.hang_timeout_s)
    stop = [ranks.places[victim].pid]

    def strike(event):
        while stop:
            os.kill(stop.pop(), signal.SIGSTOP)

    with pytest.raises(EngineDeadError, match=f"rank {victim} has given no sign of life for"):
        client.collect([submit(max_tokens=400)], strike)
    until(lambda: not any(is_running(p.pid) for p in ranks.places), "both ranks are gone", 5)
    client.shutdown()
    (record,) = (tmp_path / "records").iterdir()
    assert record.name.startswith(f"dflash-rank{1 - victim}-")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("/m/broken", "CheckpointError: tensor model.norm.weight is missing"),
        ("/m/broken-follower", "rank 1 failed: CheckpointError: shard 1 is truncated"),
    ],
)
def test_error_while_loading_is_the_reason_given(clean, target, text):
    ranks = executor(2, target)
    with pytest.raises(EngineDeadError, match=text):
        start_and_ask(ranks)
    ranks.shutdown()


def test_gang_that_fits_nowhere_says_so(clean, monkeypatch):
    monkeypatch.setattr("dflash_serve.serve.placement._TIMEOUT_S", 0.5)
    config = EngineConfig(target="/m/fake", device="cpu", executor="ray")
    ranks = RayExecutor(config, rank_cpus=1000, runner=FAKE)
    with pytest.raises(EngineDeadError, match=r"no node with .*1000.* free within"):
        ranks.start()


def test_a_rank_that_returns_is_described():
    assert describe_death(2, None) == "rank 2 stopped by itself"


def test_usable_cores_are_at_most_the_affinity():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
