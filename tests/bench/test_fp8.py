"""The benchmark of 8-bit products, at a size that the interpreter gets through."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dflash_serve.bench.fp8 import Result, compared, main, tables, totals
from dflash_serve.bench.fp8_jobs import ROWS, SHAPES, Job, candidates, jobs_of
from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile, fp8_tile, head_tile
from dflash_serve.kernels.gpu.tiles import SHARED_BYTES
from dflash_serve.kernels.pick import order_keys


def test_every_way_is_checked_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    main(["--cpu-check", "--shapes", "down", "--rows", "16", "--output", str(output)])
    figures = json.loads(output.read_text())
    assert figures["results"]
    assert all(result["right"] for result in figures["results"])
    assert all(result["error"] < 1e-5 for result in figures["results"])
    assert {result["way"] for result in figures["results"]} == {"bf16", "tile"}
    assert any(result["tile"] and result["tile"]["parts"] > 1 for result in figures["results"])
    text = capsys.readouterr().out
    assert "down, 16 rows" in text
    assert "0 wrong results" in text


def test_a_picked_id_is_judged_by_its_score() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.99], [5.0, 0.0, -1.0]])
    assert compared(order_keys(scores, 0).amax(1), scores) == (True, 0.0)
    near = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert compared(order_keys(near, 0).amax(1), scores)[0]
    wrong = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert not compared(order_keys(wrong, 0).amax(1), scores)[0]


def test_the_head_is_measured_with_its_pick(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    main(["--cpu-check", "--shapes", "head", "--rows", "16", "--output", str(output)])
    results = json.loads(output.read_text())["results"]
    assert all(result["right"] for result in results)
    assert {result["apart"] for result in results} == {False, True}


def test_nothing_starts_after_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--cpu-check", "--rows", "16", "--budget-s", "0"])
    assert "out of time: 3 of 3 cells are missing" in capsys.readouterr().out


def test_candidates_fit_and_begin_with_the_tile_in_use() -> None:
    for shape in SHAPES:
        for rows in ROWS:
            found = candidates(shape, rows)
            summed, gated = shape.kind == "add", shape.kind == "gated"
            size = shape.columns, shape.depth, rows
            chosen = fp8_tile(*size, gated=gated, summed=summed)
            assert found[0] == (head_tile(*size) if shape.kind == "pick" else chosen)
            assert len(set(found)) == len(found) > 2
            for tile in found:
                assert (tile.rows + tile.columns) * tile.depth * tile.stages <= SHARED_BYTES
                assert shape.depth % (tile.depth * tile.parts) == 0
                assert tile.parts == 1 or summed


def test_totals_and_tables_take_the_fastest_right_way() -> None:
    shape = dataclasses.replace(SHAPES[2], each_step=5)
    slow, fast, wrong = (Fp8Tile(16, 64, 64 * n, 4, 2) for n in (1, 2, 4))
    cell = [
        Result(Job(shape, 16, "bf16"), 10.0, 0.0, True),
        Result(Job(shape, 16, "library"), 8.0, 0.0, True),
        Result(Job(shape, 16, "tile", slow), 7.0, 0.0, True),
        Result(Job(shape, 16, "tile", fast), 6.0, 0.0, True),
        Result(Job(shape, 16, "tile", wrong), 1.0, 9.0, False),
    ]
    assert totals([cell]) == ["16 rows: bf16 50 us, fp8 30 us, library 40 us a step (down)"]
    text = tables([cell])
    assert f"16: {fast}," in text
    assert str(slow) not in text
    assert str(wrong) not in text


def test_jobs_of_a_cell_belong_together() -> None:
    for cell in jobs_of(SHAPES, ROWS):
        assert len({(job.shape, job.rows) for job in cell}) == 1
        assert [job.way for job in cell[:3]] == ["bf16", "library", "tile"]
