"""The floor against the published table for the Qwen3-8B shape on H200."""

from __future__ import annotations

import pytest

from dflash_serve.bench.roofline import Workload, step_floor
from dflash_serve.model_config import DraftConfig, RopeConfig, TargetConfig, TransformerConfig

ROPE = RopeConfig(theta=1e6)


def shape(layers: int) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=ROPE,
        qk_norm=True,
    )


TARGET = TargetConfig("qwen3", shape(36), 151936, False, 40960, ())
DRAFT = DraftConfig(shape(5), (1, 9, 17, 25, 33), 151669, "<|MASK|>", 36, 151936, {})


@pytest.mark.parametrize(
    ("tp", "batch", "gigabytes", "teraflop", "floor_ms", "plain_ms"),
    [
        (1, 1, 18.74, 0.31, 4.36, 3.56),
        (1, 8, 19.97, 2.45, 4.64, 3.80),
        (1, 32, 24.18, 9.82, 12.43, 4.64),
        (1, 128, 41.04, 39.28, 49.72, 8.02),
        (2, 1, 9.37, 0.15, 2.20, 1.78),
        (2, 128, 20.56, 19.64, 28.03, 4.18),
        (4, 8, 5.00, 0.61, 1.46, 0.97),
        (4, 128, 10.32, 9.82, 17.18, 2.26),
    ],
)
def test_floor_of_a_step_is_the_published_one(
    tp: int, batch: int, gigabytes: float, teraflop: float, floor_ms: float, plain_ms: float
) -> None:
    floor = step_floor(TARGET, DRAFT, Workload(batch, 1024, 16, tp))
    plain = step_floor(TARGET, None, Workload(batch, 1024, 1, tp))
    assert floor.bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert floor.flops / 1e12 == pytest.approx(teraflop, abs=0.011)
    assert floor.seconds * 1e3 == pytest.approx(floor_ms, abs=0.011)
    assert plain.seconds * 1e3 == pytest.approx(plain_ms, abs=0.011)


def test_a_step_that_is_bound_by_memory_costs_the_same_for_more_rows() -> None:
    few = step_floor(TARGET, DRAFT, Workload(1, 1024, 2))
    many = step_floor(TARGET, DRAFT, Workload(1, 1024, 16))
    assert many.seconds == pytest.approx(few.seconds, rel=0.01)
