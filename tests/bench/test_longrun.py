"""The long runs on a tiny pair, and what they count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.bench.closed_loop import Window, fill_contexts, speed
from dflash_serve.bench.engines import pair_config, requests, running, variant
from dflash_serve.bench.identity import compare, identity
from dflash_serve.bench.longrun import main
from dflash_serve.bench.prefill import prefill_flops
from dflash_serve.bench.soak import Watch, soak
from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import TokenEvent
from dflash_serve.engine.pair import prepare
from dflash_serve.engine.rank import load_sized_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.errors import ConfigError
from dflash_serve.model_config import RopeConfig, TransformerConfig
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import PrefillChunk, SlotSetup, StepPlan
from tests.tiny import TinyPair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def tiny(pair: TinyPair, **fields: Any) -> EngineConfig:
    fields = {"max_running": 3, "max_model_len": 64, "threads": 1, "prefix_cache": False} | fields
    return pair_config(pair.target, pair.draft, Path(), device="cpu", **fields)


def silent(text: str) -> None:
    assert text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_dflash_and_plain_decoding_are_counted_identical(
    temperature: float, pair: TinyPair
) -> None:
    found = identity(
        tiny(pair),
        ["block"],
        batches=[1, 3],
        plain_batches=[3, 1],
        prompts=4,
        prompt_lengths=(3, 9),
        max_tokens=6,
        temperature=temperature,
        progress=silent,
    )
    runs = [(run["mode"], run["batch"], run["identical"]) for run in found["runs"]]
    assert runs == [("plain", 3, 4), ("plain", 1, 4), ("block", 1, 4), ("block", 3, 4)]
    assert all(run["tokens"] == 4 * 6 and run["differing"] == [] for run in found["runs"])


def test_a_difference_is_reported_with_its_place_and_ids() -> None:
    expected, found = [[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 7], [6, 8]]
    assert compare(expected, found) == [
        {"request": 1, "place": 1, "expected": 5, "found": 7},
        {"request": 2, "place": 1, "expected": None, "found": 8},
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_soak_stays_within_bounds(overlap: bool, pair: TinyPair) -> None:
    found = soak(
        tiny(pair, overlap=overlap, kv_cache_gib=0.0003, max_running=4),
        "4",
        steps=40,
        prompt_lengths=(3, 20),
        max_tokens=16,
        sample_every=10,
        settled_after=20,
        progress=silent,
        wave=8,
    )
    assert found["faults"] == 0, found["first_faults"]
    assert found["steps"] >= 40
    assert found["checked"] > 500
    assert found["requests"] == found["finished"]
    assert found["preemptions"] > 0
    assert found["growth_bytes"] == 0
    assert len(found["memory"]) == found["steps"] // 10
    assert {1, 2} < set(found["batches"])


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ({"pages": [(0, 0, [0])]}, "page 0 is not in"),
        ({"pages": [(0, 0, [10**6])]}, "page 1000000 is not in"),
        ({"pages": [(0, 1, [1])]}, "slot 0 has 0 pages"),
        ({"pages": [(0, 0, [1, 1])], "decode": [0]}, "share a page"),
        ({"decode": [0]}, "no page for position"),
        ({"prefill": [PrefillChunk(slot=0, start=0, token_ids=[320], sample=False)]}, "prompt id"),
    ],
)
def test_a_plan_out_of_bounds_is_noticed(plan: dict[str, Any], fault: str, pair: TinyPair) -> None:
    config = tiny(pair)
    runner = Runner(load_sized_pair(config, Single()), config)
    runner.launch = lambda plan: runner  # type: ignore[method-assign, assignment, return-value]
    runner.result = None  # type: ignore[attr-defined]
    watch = Watch(1)
    watch.install(runner)
    setup = SlotSetup(slot=0, start=0, anchor=0, seed=0, temperature=0.0)
    runner.launch(StepPlan(step=0, setups=[setup], **plan))
    assert any(fault in text for text in watch.first_faults)
    watch.check_ids([0, 10**6])
    assert "emitted id 1000000" in watch.first_faults[-1]


@pytest.mark.parametrize("filled", [False, True])
def test_speed_runs_modes_in_turn_and_compares_them_with_plain(
    pair: TinyPair, filled: bool
) -> None:
    found = speed(
        tiny(pair, synthetic_acceptance=1.0),
        ["4", "plain"],
        batches=[2],
        context=5,
        max_tokens=9,
        rounds=2,
        repeats=2,
        temperature=0.0,
        progress=silent,
        filled=filled,
    )
    four, plain = found["rows"]
    assert (four["mode"], plain["mode"], plain["vs_plain"]) == ("4", "plain", 1.0)
    assert plain["tokens_per_step"] == 1.0
    assert four["tokens_per_step"] == 4.0
    assert len(four["runs"]) == 2
    assert set(four["runs"][0]["blocks_by_length"]) == {4}


def test_requests_too_short_to_run_at_once_are_refused(pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="3 requests of 2 tokens never ran at once"):
        speed(
            tiny(pair, prefill_chunk=8),
            ["plain"],
            batches=[3],
            context=40,
            max_tokens=2,
            rounds=1,
            repeats=1,
            temperature=0.0,
            progress=silent,
        )


def test_filled_contexts_are_as_long_as_the_prompts_and_hold_no_zeros(pair: TinyPair) -> None:
    config = tiny(pair)
    runners: list[Runner] = []

    def ready(runner: Runner) -> None:
        fill_contexts(runner)
        runners.append(runner)

    with running(config, ready) as engine:
        engine.collect(requests("filled", [[1] * 7, [2] * 4], 1, 0.0))
        (runner,) = runners
        assert sorted(runner.state.start[:2].tolist()) == [4, 7]
        assert bool((runner.pair.target_kv.pool != 0).all())


def test_the_window_is_open_while_every_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    window = Window(2, 3)
    for name, count, end in [
        ("a", 1, None),
        ("b", 1, None),  # opens
        ("a", 3, "length"),  # c takes the place
        ("c", 1, None),
        ("b", 2, "length"),  # nothing takes the place: closes
        ("c", 5, "length"),
    ]:
        window.note(TokenEvent(request_id=name, token_ids=[0] * count, finish_reason=end))
    assert (window.tokens, window.seconds) == (6, 3.0)
    assert (window.decoded, window.blocks) == (10, 3)


def test_the_command_writes_what_it_measured_and_where(pair: TinyPair, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    main(
        [
            *("--what", "prefill", "--target", pair.target, "--draft", pair.draft),
            *("--loads", "2x16,1x40", "--chunks", "16,64", "--repeats", "2"),
            *("--device", "cpu", "--output", str(output)),
        ]
    )
    found = json.loads(output.read_text())
    assert found["machine"]["device"] == "cpu"
    assert found["settings"]["chunks"] == [16, 64]
    cells = {(c["mode"], c["chunk"], c["prompts"], c["length"]) for c in found["cells"]}
    assert cells == {("block", c, *load) for c in (16, 64) for load in ((2, 16), (1, 40))}
    assert all(c["seconds"] > 0 and c["tflops"] > 0 and len(c["runs"]) == 2 for c in found["cells"])


def test_prefill_counts_the_target_layers_and_half_of_the_attention_square() -> None:
    model = TransformerConfig(
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    )
    weights = 36 * (4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12288)
    square = 36 * 2 * 1024**2 * 32 * 128
    assert prefill_flops(model, 8, 1024) == 8 * (2 * weights * 1024 + square)


def test_a_preset_can_be_cut_to_fewer_layers(tmp_path: Path) -> None:
    config = pair_config(
        "dummy:qwen3-4b", "dummy:qwen3-4b-b16", tmp_path, layers=12, device="cpu", max_model_len=64
    )
    settings, _, _ = prepare(config)
    assert settings.target.model.num_layers == 12
    assert settings.taps == (1, 3, 5, 7, 9)
    assert variant(config, "plain").draft is None


def test_an_unknown_mode_is_refused(pair: TinyPair) -> None:
    config = tiny(pair)
    with pytest.raises(ConfigError, match="allowed: plain, block, auto"):
        variant(config, "fast")
