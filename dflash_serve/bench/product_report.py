"""Figures of `bench.products`, and the table they make."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash_serve.bench.product_jobs import Job
from dflash_serve.kernels.gpu.tiles import Fold

__all__ = ["Result", "report", "table"]

_READ = 4.2e12  # bytes/s and operations/s that one H200 reaches
_FLOPS = 790e12


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds of one product of a job."""

    job: Job
    ms: float

    @property
    def bytes_moved(self) -> int:
        """Weight, rows and result once."""
        shape, rows = self.job.shape, self.job.rows
        wide = shape.columns * (2 if shape.kind == "head" else 1)
        return 2 * (shape.columns * shape.depth + rows * shape.depth + rows * wide)

    @property
    def bandwidth(self) -> float:
        """bytes/s."""
        return self.bytes_moved / self.ms * 1e3

    @property
    def flops(self) -> float:
        """operations/s."""
        return 2e3 * self.job.rows * self.job.shape.columns * self.job.shape.depth / self.ms

    def line(self) -> str:
        """Figures of a report line."""
        return (
            f"{self.ms * 1e3:9.2f} us {self.bandwidth / 1e12:5.2f} TB/s "
            f"{self.bandwidth / _READ:4.0%} {self.flops / 1e12:4.0f} TFLOP/s "
            f"{self.flops / _FLOPS:4.0%}  {self.job.label}"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything about the measurement."""
        job = self.job
        return {
            "shape": job.shape.name,
            "rows": job.rows,
            "variant": job.label,
            "tile": None if job.tile is None else dataclasses.astuple(job.tile),
            "fold": job.fold,
            "large": job.large,
            "us": self.ms * 1e3,
            "tb_s": self.bandwidth / 1e12,
            "tflop_s": self.flops / 1e12,
        }


def report(results: list[Result], shown: int = 4) -> None:
    """The library's time and the best variants of each shape and row count."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.job.shape.name, result.job.rows), []).append(result)
    for (name, rows), found in groups.items():
        print(f"\n{name}, {rows} rows")
        for result in found:
            if result.job.tile is None:
                print(result.line())
        own = sorted((r for r in found if r.job.tile is not None), key=lambda r: r.ms)
        for result in own[:shown]:
            print(result.line())
        for fold in sorted({r.job.fold for r in own} - {r.job.fold for r in own[:shown]}):
            print(next(r for r in own if r.job.fold == fold).line())


def table(results: list[Result], folds: tuple[Fold, ...]) -> str:
    """Best tiles as text for `gpu/tiles.py`, and the best time of every fold."""
    lines = []
    for title, gated in (("TILES", False), ("GATED_TILES", True)):
        entries: dict[tuple[int, int], dict[int, Result]] = {}
        for result in results:
            job = result.job
            tuned = job.tile is not None and not job.large and job.rows in (16, 32, 64, 128)
            normed = job.shape.kind in ("norm", "gated")
            if (
                not tuned
                or (job.shape.kind == "gated") != gated
                or (normed and job.fold not in folds)
            ):
                continue
            best = entries.setdefault((job.shape.columns, job.shape.depth), {})
            if job.rows not in best or result.ms < best[job.rows].ms:
                best[job.rows] = result
        lines.append(f"{title} = _measured({{")
        for key, best in entries.items():
            inner = ", ".join(
                f"{rows}: {dataclasses.astuple(r.job.tile)}"
                for rows, r in sorted(best.items())
                if r.job.tile is not None
            )
            name = next(iter(best.values())).job.shape.name
            lines.append(f"    {key}: {{{inner}}},  # {name}")
        lines.append("})")
    return "\n".join(lines)
