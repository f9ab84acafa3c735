"""The comparison of head products, at toy size in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_serve.bench import head_pick
from dflash_serve.bench.head_pick import ROWS, Found, table, tiles_of
from dflash_serve.bench.pick import main
from dflash_serve.kernels.gpu.tiles import SHARED_BYTES


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
def test_every_way_gives_the_same_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_pick, "_MOST_ROUNDS", 1)
    output = tmp_path / "head.json"
    main(["--head", "--cpu-check", "--rows", "3", "--output", str(output)])
    found = json.loads(output.read_text())["results"]
    assert len(found) == 6
    assert all(one["right"] and one["microseconds"] > 0 for one in found)
    assert "WRONG" not in capsys.readouterr().out


def test_a_budget_that_is_spent_ends_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--head", "--cpu-check", "--budget", "0"])
    assert capsys.readouterr().out.count("no time left") == 4


def test_wrong_keys_and_failures_are_named() -> None:
    case = [
        Found(16, 0.0, "product + pick", 200.0),
        Found(16, 0.0, "one", 150.0, right=False),
        Found(16, 0.0, "other", error="OutOfResources: shared memory"),
    ]
    lines = table(case).splitlines()
    assert "+25.0% WRONG" in lines[2]
    assert lines[3].endswith("OutOfResources: shared memory")


def test_the_loads_of_every_timed_tile_fit_in_shared_memory() -> None:
    for rows in ROWS:
        for tile in tiles_of(rows):
            loads = (tile.rows + tile.columns) * tile.depth * 2 * tile.stages
            assert loads * max(1, tile.resident) < SHARED_BYTES
