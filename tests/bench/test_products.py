"""The sweep over product tiles, at toy sizes in Triton's interpreter."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dflash_serve.bench.product_jobs import SHAPES, TOYS, Job, jobs_of
from dflash_serve.bench.product_report import (
    Result,
    best_parts,
    large_summary,
    large_table,
    summary,
    table,
)
from dflash_serve.bench.product_tiles import clocks, decode_tiles, gated_tiles, large_tiles
from dflash_serve.bench.product_timing import captured, take_turns
from dflash_serve.bench.products import Inputs, main, measure, run_job
from dflash_serve.kernels.gpu import linear_large
from dflash_serve.kernels.gpu.tiles import ROW_BUCKETS, SHARED_BYTES, Tile, shared_bytes

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
    assert all(r["right"] for r in found)
    assert {r["shape"] for r in found} == {shape.name for shape in SHAPES}
    for shape in SHAPES:
        variants = [r["variant"] for r in found if r["shape"] == shape.name]
        assert "library" in variants
        assert len(set(variants)) == len(variants) > 2


def test_the_fastest_number_of_parts_counts_all_rows() -> None:
    shape = SHAPES[0]

    def times(parts: int, few: float, many: float) -> list[Result]:
        tile = Tile(16, 32, 64, 4, 4, parts, "spread")
        return [Result(Job(shape, 16, tile), few), Result(Job(shape, 128, tile), many)]

    library = [Result(Job(shape, 16, None), 10.0), Result(Job(shape, 128, None), 20.0)]
    found = [*library, *times(1, 9.0, 24.0), *times(2, 9.5, 18.0), *times(4, 11.0, 17.0)]
    found.append(Result(Job(shape, 128, Tile(16, 32, 64, 4, 4, 8, "spread")), 1.0))
    assert best_parts(found) == {"qkv": 2}
    lines = summary(found).splitlines()
    assert lines[0] == "fastest number of parts: {'qkv': 2}"
    assert lines[-1] == "OWN_FASTER = frozenset([(6144, 4096)])"
    assert "16: (16, 32, 64, 4, 4, 2, 'spread')" in table(found)


@no_gpu
def test_the_table_names_the_fastest_tile(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "16", "--shapes", "down", "--cpu-check"])
    lines = capsys.readouterr().out.splitlines()
    best = lines[lines.index("down, 16 rows") + 2].split()[-1]
    entry = next(line for line in lines if line.endswith("# down"))
    assert f"16: ({best.replace(',', ', ')})" in entry.replace("'", "")


def test_a_budget_that_is_spent_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "16", "--shapes", "o", "--cpu-check", "--budget-s", "0"])
    assert "out of time" in capsys.readouterr().out


def test_every_number_of_parts_is_tried_at_every_row_count() -> None:
    for gated, columns, depth in ((False, 4096, 12288), (False, 151936, 4096), (True, 24576, 4096)):
        found = [
            {tile.parts for tile in decode_tiles(bucket, columns, depth, gated=gated)}
            for bucket in ROW_BUCKETS
        ]
        assert found == [found[0]] * len(ROW_BUCKETS)


def test_row_counts_are_measured_in_the_order_given() -> None:
    jobs = jobs_of("decode", SHAPES, [16, 1], toy=False)
    assert [job.rows for job in jobs] == sorted((job.rows for job in jobs), reverse=True)
    assert not any(job.large for job in jobs)


def test_every_tile_tried_fits_a_processor() -> None:
    for gated, columns in ((False, 4096), (False, 151936), (True, 24576)):
        for bucket in ROW_BUCKETS:
            found = decode_tiles(bucket, columns, 4096, gated=gated)
            assert len(set(found)) == len(found) > 2
            for tile in found:
                # Below 64 rows one stage less is held.
                stages = tile.stages - (tile.rows < 64)
                size = shared_bytes(tile, torch.bfloat16, gated=gated) * stages // tile.stages
                assert size <= 227 * 1024, tile


def test_every_large_tile_tried_fits_a_processor_beside_what_is_stored() -> None:
    for shape in SHAPES:
        for rows in (192, 512, 2048, 8192):
            found = large_tiles(shape.columns, shape.depth, rows)
            assert len(set(found)) == len(found) > 3
            for tile in found:
                assert tile.stages >= 2
                assert shape.depth % (tile.parts * tile.depth) == 0
                room = 0 if tile.mode else 32 * 1024
                size = shared_bytes(tile, torch.bfloat16) + room
                assert size <= 227 * 1024, tile


def test_an_estimate_counts_rounds_of_tiles() -> None:
    tile = Tile(128, 128, 64, 8, 4)
    one = clocks(tile, 12288, 4096, 128)
    assert one == clocks(tile, 12288, 4096, 1)
    # 96 tiles of 132 at a time, then 192: two rounds.
    assert clocks(tile, 12288, 4096, 256) > 1.9 * one
    # In two parts the second round is gone, and the sums of the parts come on top.
    spread = Tile(128, 128, 64, 8, 4, 2, "spread")
    assert clocks(spread, 4096, 12288, 256) < clocks(tile, 4096, 12288, 256)


def test_a_gated_product_of_many_rows_is_activated_inside_or_after_it() -> None:
    shape = next(s for s in SHAPES if s.kind == "gated")
    library, *own = jobs_of("large", [shape], [512], toy=False)
    assert library.label == "library"
    assert own
    assert all(job.label.endswith(" fused" if job.fused else " + silu") for job in own)


@no_gpu
def test_only_the_library_writes_into_a_residual_that_is_given_away() -> None:
    for shape in TOYS:
        inputs = Inputs(shape, 20, "cpu")
        before = inputs.residual.clone()
        weight = torch.ones(shape.columns, shape.depth)
        for job in jobs_of("large", [shape], [20], toy=True):
            out = run_job(job, inputs, weight)
            in_place = shape.name == "down" and job.tile is None
            assert (out.data_ptr() == inputs.given.data_ptr()) == in_place
        assert torch.equal(inputs.residual, before)


def test_neither_a_wrong_variant_nor_one_that_hardly_wins_is_chosen() -> None:
    shape = SHAPES[0]
    fast, slow = Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 3)
    found = [
        Result(Job(shape, 512, None, large=True), 10.0),
        Result(Job(shape, 512, fast, large=True), 1.0, right=False),
        Result(Job(shape, 512, slow, large=True), 8.0),
        Result(Job(shape, 2048, None, large=True), 10.0),
        Result(Job(shape, 2048, slow, large=True), 9.9),
    ]
    assert found[1].line().endswith("WRONG")
    assert "0.800" in large_summary(found)
    assert "(6144, 4096): {512: (128, 256, 64, 8, 3)}" in large_table(found)
    assert "2048" not in large_table(found)


def test_the_activation_goes_inside_only_where_that_beats_both_other_ways() -> None:
    shape = next(s for s in SHAPES if s.kind == "gated")
    tile = Tile(128, 256, 64, 8, 4)

    def times(rows: int, library: float, own: float, fused: float) -> list[Result]:
        return [
            Result(Job(shape, rows, None, large=True), library),
            Result(Job(shape, rows, tile, large=True), own),
            Result(Job(shape, rows, tile, large=True, fused=True), fused),
        ]

    found = [*times(512, 10.0, 8.0, 7.0), *times(1024, 10.0, 8.0, 7.9), *times(2048, 8.0, 9.0, 7.0)]
    plain, inside = large_table(found).split("MANY_GATED")
    assert "{512: (128, 256, 64, 8, 4), 1024: (128, 256, 64, 8, 4)}" in plain
    assert "{512: (128, 256, 64, 8, 4), 2048: (128, 256, 64, 8, 4)}" in inside
    assert large_summary(found).count(" + silu") == large_summary(found).count(" fused") == 3


def test_gate_and_up_are_tried_apart_joint_and_with_the_activation_inside() -> None:
    jobs = jobs_of("large", [s for s in SHAPES if s.kind == "gated"], [16, 128, 192, 2048], False)
    assert len({(job.rows, job.label) for job in jobs}) == len(jobs)
    for rows in (16, 128):
        few = [job for job in jobs if job.rows == rows]
        assert not any(job.large or job.fused for job in few)
        assert {job.tile.joint for job in few if job.tile is not None} == {True, False}
    for rows in (192, 2048):
        many = [job for job in jobs if job.rows == rows]
        assert all(job.large for job in many)
        assert sum(job.activated for job in many) > 3
        assert sum(job.fused for job in many) > 3


def test_every_tile_with_the_activation_inside_fits_a_processor() -> None:
    for rows in (192, 512, 2048, 8192):
        found = gated_tiles(24576, 4096, rows)
        assert len(set(found)) == len(found)
        for tile in found:
            stored = 2 * tile.rows * tile.columns // 2
            assert shared_bytes(tile, torch.bfloat16) + stored + 1024 <= SHARED_BYTES, tile


@pytest.mark.gpu
def test_variants_take_turns_on_a_gpu() -> None:
    x = torch.ones(8, device="cuda")
    runs = [captured(lambda: x.add_(1), "cuda"), captured(lambda: x.mul_(2), "cuda")]
    times = take_turns(runs, "cuda", 0.0)
    assert [len(turns) for turns in times] == [6, 6]  # three rounds even after the deadline
    assert min(min(turns) for turns in times) > 0


@no_gpu
def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = TOYS[0]
    job = Job(shape, 20, Tile(16, 32, 32, 4, 2), large=True)
    assert all(r.right for r in measure([job], "cpu", set(), math.inf))
    monkeypatch.setattr(linear_large, "product", lambda x, w, *_, **__: 1.01 * (x @ w.T))
    assert not any(r.right for r in measure([job], "cpu", set(), math.inf))


@no_gpu
def test_the_library_is_asked_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--part", "library", "--rows", "20", "--shapes", "down", "--cpu-check"])
    printed = capsys.readouterr().out
    for form in ("linear", "mm out=", "addmm, copied", "addmm_ in place"):
        assert f"down        20 {form}" in printed
