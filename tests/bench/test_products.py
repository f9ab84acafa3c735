"""The sweep over product tiles, at toy sizes in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_serve.bench import product_chain
from dflash_serve.bench.product_jobs import SHAPES, jobs_of
from dflash_serve.bench.product_tiles import decode_tiles, large_variants
from dflash_serve.bench.products import main
from dflash_serve.kernels.gpu.tiles import ROW_BUCKETS, shared_bytes

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")


@no_gpu
@pytest.mark.parametrize(("part", "rows"), [("decode", 3), ("large", 40)])
def test_a_sweep_times_the_library_and_every_variant(
    part: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "products.json"
    main(["--part", part, "--rows", str(rows), "--cpu-check", "--output", str(output)])
    found = json.loads(output.read_text())["results"]
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    assert {r["shape"] for r in found} == {shape.name for shape in SHAPES}
    for shape in SHAPES:
        variants = [r["variant"] for r in found if r["shape"] == shape.name]
        assert "library" in variants
        assert len(set(variants)) == len(variants) > 2


@no_gpu
def test_the_chain_times_every_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "chain.json"
    product_chain.main(["--rows", "2", "--gap", "1", "--cpu-check", "--output", str(output)])
    assert "not measured" not in capsys.readouterr().out
    found = json.loads(output.read_text())["results"]
    assert {r["fold"] for r in found} == {"library", "rstd", "apart", "loop"}
    assert len({(r["fold"], r["ahead"]) for r in found}) == len(found)


@no_gpu
def test_the_table_names_the_fastest_tile(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "16", "--shapes", "down", "--cpu-check"])
    lines = capsys.readouterr().out.splitlines()
    best = lines[lines.index("down, 16 rows") + 2].split()[-1]
    entry = next(line for line in lines if line.endswith("# down"))
    assert f"16: ({best.replace(',', ', ')})" in entry


def test_a_budget_that_is_spent_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "16", "--shapes", "o", "--cpu-check", "--budget-s", "0"])
    assert "out of time" in capsys.readouterr().out


def test_row_counts_are_measured_in_the_order_given() -> None:
    jobs = jobs_of("decode", SHAPES, [16, 1], toy=False)
    assert [job.rows for job in jobs] == sorted((job.rows for job in jobs), reverse=True)
    assert not any(job.large for job in jobs)


def test_every_tile_tried_fits_a_processor() -> None:
    for gated in (False, True):
        for bucket in ROW_BUCKETS:
            for tile in decode_tiles(bucket, gated=gated):
                # Below 64 rows one stage less is held.
                stages = tile.stages - (tile.rows < 64)
                size = shared_bytes(tile, torch.bfloat16, gated=gated) * stages // tile.stages
                assert size <= 227 * 1024, tile
        for tile, _, _ in large_variants(gated=gated):
            assert shared_bytes(tile, torch.bfloat16, gated=gated) <= 227 * 1024
