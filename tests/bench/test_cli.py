"""The command line on a tiny pair with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dflash_serve.cli import app
from tests.api.fakes import save_tokenizer
from tests.tiny import TinyPair, make_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A tiny pair whose target has a tokenizer and a chat template."""
    pair = make_pair(tmp_path_factory.mktemp("pair"), "llama", vocab=1024)
    save_tokenizer(Path(pair.target))
    return pair


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200"})


def test_generate_prints_both_speeds_and_that_the_ids_are_the_same(pair: TinyPair) -> None:
    result = invoke(
        "generate", "the fox", "--target", pair.target, "--draft", pair.draft, "--max-tokens", "12"
    )
    assert result.exit_code == 0, result.output
    assert "with the draft" in result.output
    assert "without it" in result.output
    assert "the same ids" in result.output


def test_generate_without_a_draft_is_plain_decoding(pair: TinyPair) -> None:
    args = ("generate", "the fox", "--target", pair.target, "--draft", "none", "--raw")
    result = invoke(*args, "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    assert "plain decoding" in result.output


def test_bench_step_reports_every_batch_and_length_beside_plain_decoding(
    pair: TinyPair, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    result = invoke(
        *("bench", "step", "--target", pair.target, "--draft", pair.draft, "--batch", "1,2"),
        *("--verify", "1,4", "--limit", "4", "--max-tokens", "8", "--max-model-len", "256"),
        *("--output", str(output)),
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(output.read_text())
    cells = {(row["batch"], row["verify_length"]) for row in figures["rows"]}
    assert cells == {(b, g) for b in (1, 2) for g in (None, 1, 4)}
    assert "transformers_tokens_per_second" in figures
    assert all(row["tokens_per_step"] >= 1 and row["floor_ms"] > 0 for row in figures["rows"])


def test_check_describes_a_pair_and_refuses_a_wrong_one(pair: TinyPair, tmp_path: Path) -> None:
    good = invoke("check", pair.target, pair.draft)
    assert good.exit_code == 0, good.output
    assert "8 queries, 7 proposals" in good.output
    other = make_pair(tmp_path, "llama", vocab=512)
    bad = invoke("check", pair.target, other.draft)
    assert bad.exit_code == 2
    assert "512" in bad.output
    assert "1024" in bad.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("bench", "step", "--batch", "two"), "two"),
        (("bench", "step", "--verify", "0"), "positive"),
        (("generate", "x", "--target", "nowhere"), "nowhere"),
        (("generate", "x", "--temperature", "-1"), "temperature"),
        (("check", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(args: tuple[str, ...], named: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert named in result.output
    assert "Traceback" not in result.output
