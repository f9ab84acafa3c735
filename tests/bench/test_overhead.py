import pytest

from dflash_serve.bench.engines import running
from dflash_serve.bench.event_client import Stream
from dflash_serve.bench.overhead import Counters, Load, _Engine, measure, summarise
from dflash_serve.bench.server import deployment
from dflash_serve.config import EngineConfig
from tests.tiny import make_pair


def test_a_row_counts_gaps_within_streams_only():
    streams = [
        Stream(0.0, [(0.010, 1), (0.012, 3)]),
        Stream(0.5, [(0.520, 2), (0.524, 2)]),
    ]
    row = summarise("mp", Load(2, 1, 4), streams, Counters(4.0, 0.008, 0.002, 0.006, 2.0))
    assert row.tokens == 8
    assert row.seconds == pytest.approx(0.524)
    assert row.event_ms_p50 == pytest.approx(3.0)
    assert row.first_ms_p50 == pytest.approx(15.0)
    assert (row.first_ms, row.engine_first_ms) == (pytest.approx(15.0), pytest.approx(3.0))
    assert (row.step_ms, row.gap_ms) == (pytest.approx(2.0), pytest.approx(0.5))


def test_an_engines_row_has_every_token_and_a_gap_between_steps(tmp_path):
    pair = make_pair(tmp_path)
    config = EngineConfig(
        target=pair.target, draft=pair.draft, device="cpu", dtype="float32", max_running=2
    )
    with running(config) as engine:
        row = measure("inproc", _Engine(engine), Load(2, 2, 8))
    assert row.tokens == 2 * 2 * 8
    assert row.gap_ms > 0
    assert 0 < row.engine_first_ms <= row.first_ms
    assert row.step_ms > 0


def test_the_served_engine_is_the_measured_one():
    config = EngineConfig(target="t", draft="d", executor="mp", tensor_parallel_size=2, threads=1)
    args = deployment(config)["applications"][0]["args"]
    assert args["engine"] == {"target": "t", "draft": "d", "tensor_parallel_size": 2, "threads": 1}
