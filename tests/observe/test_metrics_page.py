"""The /metrics page: names, zeros from the start, and measurements that cannot hurt."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_serve.api.protocol import ReplicaStatus
from dflash_serve.engine.messages import EngineStats, LengthStats
from dflash_serve.observe.metrics import Metrics
from dflash_serve.observe.replicas import accept_length
from tests.api.fakes import MODEL, engine_info

VLLM_SERIES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_count",
]
OWN_SERIES = [
    "dflash_steps_total",
    "dflash_step_seconds_total",
    "dflash_spec_drafts_total",
    "dflash_spec_emitted_tokens_total",
    "dflash_consensus_steps_total",
    "dflash_consensus_mismatches_total",
    "dflash_step_age_seconds",
    "dflash_outstanding_requests",
    "dflash_pages",
    "dflash_pages_cached",
    "dflash_gang_restarts_total",
    "dflash_fallbacks",
]


def status(**changes: Any) -> ReplicaStatus:
    fields = {"model": MODEL, "info": engine_info(), "stats": EngineStats(), "config": {}}
    return ReplicaStatus(**{**fields, **changes})


def samples(metrics: Metrics, *statuses: ReplicaStatus) -> dict[tuple[str, str], float]:
    """(series, labels but the model's name) -> value, of a page that must parse."""
    found = {}
    for family in text_string_to_metric_families(metrics.page(statuses).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sorted(sample.labels.items()) if k != "model_name"}
            found[sample.name, ",".join(f"{k}={v}" for k, v in labels.items())] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics([MODEL])


def test_every_series_is_there_with_zero_from_the_start(metrics: Metrics) -> None:
    found = samples(metrics, status())
    for name in [*VLLM_SERIES, *OWN_SERIES, "dflash_metrics_errors_total"]:
        values = [value for (series, _), value in found.items() if series == name]
        assert values, f"{name} is missing"
        assert set(values) == {0.0}, f"{name} does not begin with zero"
    assert found["dflash_replica_state", "engine=0,state=serving"] == 1.0
    assert found["dflash_replica_state", "engine=0,state=restarting"] == 0.0
    for reason in ("stop", "length", "abort", "error"):
        assert ("vllm:request_success_total", f"engine=0,finished_reason={reason}") in found
    for position in range(7):
        key = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert (key, f"engine=0,position={position}") in found
    assert ("dflash_spec_drafts_total", "engine=0,verify_length=8") in found


def test_speculation_counts_follow_vllms_formulas(metrics: Metrics) -> None:
    lengths = {
        1: LengthStats(drafts=50, emitted=50),
        4: LengthStats(drafts=10, emitted=20, accepted_per_position=[6, 3, 1]),
        8: LengthStats(drafts=10, emitted=30, accepted_per_position=[9, 6, 3, 1, 1, 0, 0]),
    }
    found = samples(metrics, status(stats=EngineStats(by_length=lengths)))
    drafts = found["vllm:spec_decode_num_drafts_total", "engine=0"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total", "engine=0"]
    assert (drafts, accepted) == (20, 30)
    assert found["vllm:spec_decode_num_draft_tokens_total", "engine=0"] == 10 * 3 + 10 * 7
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert found[per_position, "engine=0,position=0"] == 15
    assert found[per_position, "engine=0,position=6"] == 0
    assert 1 + accepted / drafts == accept_length([lengths[4], lengths[8]]) == 2.5
    assert found["dflash_spec_emitted_tokens_total", "engine=0,verify_length=1"] == 50


def test_every_replica_has_its_own_series(metrics: Metrics) -> None:
    stats = EngineStats(running=3, pages_total=10, pages_used=4)
    found = samples(metrics, status(), status(replica="1", stats=stats))
    assert found["vllm:num_requests_running", "engine=0"] == 0
    assert found["vllm:num_requests_running", "engine=1"] == 3
    assert found["vllm:kv_cache_usage_perc", "engine=1"] == 0.4


def test_times_per_token_reach_below_a_millisecond(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("dflash_serve.observe.metrics.time.monotonic", lambda: now)
    timer = metrics.request(MODEL)
    now = 100.5
    timer.tokens(1)
    now = 100.508
    timer.tokens(10)
    timer.tokens(0)
    timer.finished(prompt_tokens=7)
    found = samples(metrics)
    name = "vllm:inter_token_latency_seconds"
    assert found[f"{name}_count", "engine=all"] == 10
    assert found[f"{name}_sum", "engine=all"] == pytest.approx(0.008)
    for bound in ("0.0005", "0.001", "0.002", "0.003", "0.005", "0.0075"):
        expected = 10 if float(bound) > 0.0008 else 0
        assert found[f"{name}_bucket", f"engine=all,le={bound}"] == expected
    assert found["vllm:time_to_first_token_seconds_sum", "engine=all"] == pytest.approx(0.5)
    assert found["vllm:e2e_request_latency_seconds_sum", "engine=all"] == pytest.approx(0.508)
    assert found["vllm:request_generation_tokens_sum", "engine=all"] == 11
    assert found["vllm:request_prompt_tokens_sum", "engine=all"] == 7
    per_token = found["vllm:request_time_per_output_token_seconds_sum", "engine=all"]
    assert per_token == pytest.approx(0.0008)


def test_a_measurement_that_fails_is_counted_and_logged_once(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("counters can only grow")

    monkeypatch.setattr("prometheus_client.Histogram.labels", fail)
    monkeypatch.setattr("prometheus_client.Counter.labels", fail)
    timer = metrics.request(MODEL)
    with caplog.at_level(logging.WARNING, logger="dflash_serve"):
        timer.tokens(3)
        timer.finished(1)
        metrics.failure(400)
    assert samples(metrics)["dflash_metrics_errors_total", ""] == 3
    assert len(caplog.records) == 1


def test_an_odd_status_does_not_take_the_page_away(metrics: Metrics) -> None:
    odd = EngineStats(by_length={2: LengthStats(drafts=1, accepted_per_position=[1, 1, 1])})
    found = samples(metrics, status(replica="1", stats=odd, info=engine_info(verify_length=2)))
    assert found["dflash_metrics_errors_total", ""] > 0
    assert found["dflash_steps_total", "engine=1"] == 0


def test_two_pages_in_one_process_do_not_share_anything() -> None:
    first, second = Metrics([MODEL]), Metrics([MODEL])
    first.failure(400)
    assert samples(first)["dflash_http_failures_total", "status=400"] == 1
    assert samples(second)["dflash_http_failures_total", "status=400"] == 0
