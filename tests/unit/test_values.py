"""Value objects: engine settings, sampling parameters, block geometry, default taps."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.errors import ConfigError, RequestError
from dflash_serve.geometry import Geometry
from dflash_serve.model_config import default_taps
from dflash_serve.sampling import MAX_SEED, SamplingParams

WHOLE = ["tensor_parallel_size", "max_running", "page_size", "prefill_chunk", "logits_rows"]
OPTIONAL = ["max_model_len", "verify_length", "block_size", "threads", "valid_vocab_size"]
REAL = ["kv_cache_gib", "draft_scale", "hang_timeout_s", "start_timeout_s"]


def refused(**fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(target="t", **fields)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, math.nan, "4"], ids=repr)
@pytest.mark.parametrize("name", WHOLE + OPTIONAL)
def test_counts_must_be_positive_integers(name: str, value: object) -> None:
    text = refused(**{name: value})
    assert name in text
    assert repr(value) in text
    assert "positive integer" in text


@pytest.mark.parametrize("value", [0, -0.5, False, math.nan, math.inf, "1"], ids=repr)
@pytest.mark.parametrize("name", REAL)
def test_amounts_must_be_positive_numbers(name: str, value: object) -> None:
    text = refused(**{name: value})
    assert name in text
    assert repr(value) in text
    assert "positive number" in text


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("device", "tpu", "auto, cpu, cuda"),
        ("dtype", "float16", "auto, float32, bfloat16"),
        ("load_format", "random", "auto, dummy"),
        ("executor", "threads", "inproc, mp, ray"),
    ],
)
def test_choices_name_the_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    text = refused(**{name: value})
    assert repr(value) in text
    assert allowed in text


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan])
def test_memory_share_lies_between_zero_and_one(value: float) -> None:
    text = refused(gpu_memory_fraction=value)
    assert str(value) in text
    assert "at most 1" in text


def test_one_process_cannot_run_several_ranks() -> None:
    text = refused(tensor_parallel_size=2)
    assert "2" in text
    assert "'mp'" in text


def test_verify_length_needs_a_draft() -> None:
    assert "no draft" in refused(verify_length=4)
    EngineConfig(target="t", verify_length=1)
    EngineConfig(target="t", draft="d", verify_length=4)


def test_engine_settings_cannot_be_changed_later() -> None:
    config = EngineConfig(target="t")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_running = 3  # type: ignore[misc]


GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0, "top_p": 1e-9, "top_k": 1, "min_p": 1.0},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"max_tokens": 1},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_sampling_parameters_pass(fields: dict[str, object]) -> None:
    SamplingParams(**({"max_tokens": 8} | fields)).validate()  # type: ignore[arg-type]


BAD = [
    ("temperature", -0.01, "0 to 100"),
    ("temperature", math.nan, "0 to 100"),
    ("temperature", math.inf, "0 to 100"),
    ("temperature", 1e39, "0 to 100"),
    ("top_p", 0.0, "above 0, at most 1"),
    ("top_p", 1.0001, "above 0, at most 1"),
    ("top_p", math.nan, "above 0, at most 1"),
    ("top_k", -1, "0 (off) or more"),
    ("min_p", -0.1, "0 to 1"),
    ("min_p", 1.1, "0 to 1"),
    ("min_p", math.nan, "0 to 1"),
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", -3, ">= 1"),
    ("seed", -1, f"0 to {MAX_SEED}"),
    ("seed", MAX_SEED + 1, f"0 to {MAX_SEED}"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_bad_sampling_parameter_is_refused_by_field_value_and_range(
    name: str, value: object, allowed: str
) -> None:
    params = SamplingParams(**({"max_tokens": 8} | {name: value}))  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        params.validate()
    assert caught.value.param == name
    assert str(value) in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "truncates"),
    [
        ({}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.0}, False),
    ],
)
def test_only_sampled_requests_truncate(fields: dict[str, object], truncates: bool) -> None:
    params = SamplingParams(**({"max_tokens": 8} | fields))  # type: ignore[arg-type]
    assert params.truncates is truncates


@pytest.mark.parametrize("block", range(1, 17))
def test_every_count_follows_from_the_block_and_its_width(block: int) -> None:
    whole = Geometry.from_draft({"block_size": block}, block_size=None, verify_length=None)
    assert (whole.block, whole.rows) == (block, block)
    for rows in range(1, block + 1):
        narrow = Geometry.from_draft({"block_size": block}, block_size=None, verify_length=rows)
        assert narrow == whole.at(rows)
        assert narrow.block == block
        assert narrow.query_rows == narrow.verify_rows == narrow.lookahead == rows
        assert narrow.proposals == rows - 1
    for rows in (0, -1, block + 1):
        with pytest.raises(ConfigError, match=rf"{rows}; allowed: 1 to the block size, {block}"):
            whole.at(rows)


def test_plain_decoding_verifies_one_row_and_proposes_nothing() -> None:
    plain = Geometry.plain()
    assert (plain.block, plain.rows, plain.proposals) == (1, 1, 0)


def test_override_wins_over_the_checkpoint_and_none_is_an_error() -> None:
    assert Geometry.from_draft({"block_size": 8}, block_size=4, verify_length=None).block == 4
    assert Geometry.from_draft({}, block_size=4, verify_length=None).block == 4
    with pytest.raises(ConfigError, match="no block_size"):
        Geometry.from_draft({}, block_size=None, verify_length=None)


@pytest.mark.parametrize("value", [0, -8, 8.0, "8", True, [8]], ids=repr)
def test_block_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Geometry.from_draft({"block_size": value}, block_size=None, verify_length=None)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("flag", ["sample_from_anchor", "query_zero_predicts_next"])
def test_anchor_first_layout_is_refused_and_its_absence_is_not(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.*fill-in"):
        Geometry.from_draft({"block_size": 8, flag: True}, block_size=None, verify_length=None)
    fields = {"block_size": 8, flag: False}
    assert Geometry.from_draft(fields, block_size=None, verify_length=None).rows == 8


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (61, 6, (1, 12, 24, 35, 47, 58)),
        (30, 1, (15,)),
        (4, 1, (2,)),
        (5, 2, (1, 2)),
    ],
)
def test_default_taps_are_those_of_the_published_drafts(
    layers: int, count: int, taps: tuple[int, ...]
) -> None:
    assert default_taps(layers, count) == taps


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_default_taps_need_a_target_deep_enough(layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"{layers} layers.*at least 4"):
        default_taps(layers, 2)


@pytest.mark.parametrize(("layers", "count"), [(4, 2), (6, 5), (8, 8)])
def test_default_taps_never_repeat_a_layer(layers: int, count: int) -> None:
    with pytest.raises(ConfigError, match="repeat"):
        default_taps(layers, count)
