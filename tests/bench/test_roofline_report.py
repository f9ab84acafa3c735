"""`dflash-serve roofline`: what it prints of the published figures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dflash_serve.bench.roofline import TARGETS, draft_like
from dflash_serve.bench.roofline_report import load_draft, machine_named
from dflash_serve.cli import app
from dflash_serve.errors import ConfigError


def roofline(*args: str) -> Result:
    shape = ("--target", "qwen3-8b", "--draft", "like-target")
    return CliRunner().invoke(app, ("roofline", *shape, *args), env={"COLUMNS": "80"})


def cells(result: Result, *start: str) -> list[str]:
    """The cells of the printed row that begins with `start`."""
    assert result.exit_code == 0, result.output
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in result.output.splitlines()
        if line.startswith("│")
    ]
    (found,) = [row for row in rows if row[: len(start)] == list(start)]
    return found[len(start) :]


def test_phases_carry_bytes_operations_collectives_and_bound() -> None:
    one = roofline("--batch", "1", "--tp", "4")
    assert cells(one, "1", "draft") == ["0.49", "0.01", "11", "2", "0.12", "bytes"]
    assert cells(one, "1", "step") == ["4.68", "0.08", "87", "17", "1.13", ""]
    many = roofline("--batch", "128", "--tp", "4")
    assert cells(many, "128", "target")[-2:] == ["13.48", "flops"]


def test_rates_stand_beside_plain_decoding_and_the_best_length() -> None:
    result = roofline("--batch", "32", "--estimate")
    assert cells(result, "32", "5.94", "", "plain")[0] == "5,383"
    assert cells(result, "32", "17.12", "2.88", "5") == ["9,343", "292", "7", "3.08"]


def test_an_acceptance_vector_takes_the_place_of_tau() -> None:
    result = roofline("--batch", "1", "--block-size", "4", "--acceptance", "1,0.5,0.1")
    rate = float(cells(result, "1", "4.36", "1.23", "given")[0].replace(",", ""))
    assert rate == pytest.approx((1 + 1 + 0.5 + 0.05) / 4.36e-3, rel=0.002)


def test_a_measured_time_gives_the_share_of_the_floor() -> None:
    result = roofline("--batch", "1", "--gpu", "h200-read", "--measured", "6.42")
    assert "measured 6.42 ms, of which the step above is 69%" in result.output


def test_a_short_block_is_modelled_at_the_tokens_it_can_bring() -> None:
    result = roofline("--batch", "1", "--block-size", "4")
    assert cells(result, "1", "4.36", "1.23", "3")
    assert cells(roofline("--batch", "1", "--block-size", "2"), "1", "4.36", "1.23", "2")


def test_rows_of_the_tables_fit_a_terminal() -> None:
    result = roofline("--tp", "8")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "…" not in result.output


def test_numbers_given_replace_those_of_the_machine() -> None:
    machine = machine_named("h200", estimate=True, bandwidth_tb=3.0, node_us=0, element_bytes=4)
    assert machine.bandwidth == 3e12
    assert machine.node_seconds == 0
    assert machine.weight_bytes == 4
    assert machine.collective_seconds == 5e-6


def test_a_checkpoints_own_configs_are_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = roofline("--batch", "8", "--target", str(tmp_path))
    assert cells(result, "8", "step")[0] == "19.97"


def test_the_assumed_draft_has_the_targets_shape_and_a_tap_per_layer() -> None:
    for target in TARGETS.values():
        draft = draft_like(target)
        taps = draft.resolve_taps(5, target.model.num_layers)
        assert len(set(taps)) == draft.model.num_layers == 5
        assert load_draft("like-target", target, block_size=None, rows=None)[1:] == (16, 16)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--gpu", "abacus"), "known: ['h200', 'h200-read']"),
        (("--tp", "3"), "possible sizes"),
        (("--tau", "17"), "a block of 16 brings 1 to 16"),
        (("--acceptance", "0.5,0.5"), "has 15 draft positions"),
        (("--acceptance", "2", "--block-size", "2"), "at most 1"),
        (("--measured", "5"), "give the batch that was measured"),
        (("--measured", "0", "--batch", "1"), "must be positive"),
        (("--bandwidth", "0"), "must be positive"),
        (("--verify-length", "17"), "1 to the block size, 16"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_exit_code_two(
    args: tuple[str, ...], named: str
) -> None:
    result = roofline(*args)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_an_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="abacus"):
        machine_named("abacus", estimate=False)
