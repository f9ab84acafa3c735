"""Figures of `bench.products`, and the table they make."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dflash_serve.bench.product_jobs import Job, Shape
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, ROW_BUCKETS

__all__ = ["Result", "best_parts", "large_summary", "large_table", "report", "summary", "table"]

_READ = 4.2e12  # bytes/s and operations/s that one H200 reaches
_FLOPS = 790e12
_CLEARLY = 0.98  # of the library's time: less of a gain is within what figures vary
_LAYER = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds of one product of a job."""

    job: Job
    ms: float
    right: bool = True
    """Equal to the float32 product within rounding."""
    spread: float = 1.0
    """The slowest replay by the fastest one."""

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
            f"{self.flops / _FLOPS:4.0%}  {self.job.label}{'' if self.right else '  WRONG'}"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything about the measurement."""
        job = self.job
        return {
            "shape": job.shape.name,
            "rows": job.rows,
            "variant": job.label,
            "tile": None if job.tile is None else dataclasses.astuple(job.tile),
            "parts": _parts(self),
            "large": job.large,
            "fused": job.fused,
            "us": self.ms * 1e3,
            "right": self.right,
            "spread": self.spread,
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
        for parts in sorted({_parts(r) for r in own} - {_parts(r) for r in own[:shown]}):
            print(next(r for r in own if _parts(r) == parts).line())


def _parts(result: Result) -> int:
    return 0 if result.job.tile is None else result.job.tile.parts


def best_parts(results: list[Result]) -> dict[str, int]:
    """By shape the number of parts with the least time, relative to the library's, over all rows.

    A shape has one number of parts for all row counts; only numbers that were measured at every
    row count can win.
    """
    found: dict[str, int] = {}
    for name in dict.fromkeys(r.job.shape.name for r in results):
        best: dict[int, dict[int, float]] = {}
        library: dict[int, float] = {}
        for result in (r for r in results if r.job.shape.name == name):
            rows, parts = result.job.rows, _parts(result)
            if parts == 0:
                library[rows] = result.ms
                continue
            times = best.setdefault(parts, {})
            times[rows] = min(times.get(rows, result.ms), result.ms)
        sums = {
            parts: sum(ms / library[rows] for rows, ms in times.items())
            for parts, times in best.items()
            if times.keys() == library.keys()
        }
        if sums:
            found[name] = min(sums, key=lambda parts: sums[parts])
    return found


def chosen_times(results: list[Result]) -> dict[tuple[str, int], tuple[float, float]]:
    """ms of the library and of the best tile in the chosen number of parts, by shape and rows."""
    parts = best_parts(results)
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for result in results:
        name, rows = result.job.shape.name, result.job.rows
        library, own = found.get((name, rows), (math.inf, math.inf))
        if result.job.tile is None:
            library = result.ms
        elif _parts(result) == parts.get(name):
            own = min(own, result.ms)
        found[name, rows] = library, own
    return found


def _kind(result: Result) -> str:
    """Which of the ways to do a product of many rows it is; of few, which way to sum."""
    job = result.job
    if job.tile is None:
        return "library"
    return "fused" if job.fused else "joint" if job.tile.joint else "own"


def _kinds(results: list[Result]) -> dict[tuple[Shape, int], dict[str, Result]]:
    """The best right figure of each kind, by shape and row count."""
    found: dict[tuple[Shape, int], dict[str, Result]] = {}
    for result in results:
        best = found.setdefault((result.job.shape, result.job.rows), {})
        kind = _kind(result)
        if kind == "library" or (result.right and (kind not in best or result.ms < best[kind].ms)):
            best[kind] = result
    return found


def large_summary(results: list[Result]) -> str:
    """A line for each shape, row count and kind: the library, the best tile, how they compare."""
    lines = ["shape      rows  library us      own us  own/library  TFLOP/s  tile"]
    for (shape, rows), best in _kinds(results).items():
        library = best.pop("library", None)
        if library is None:
            continue
        for own in best.values():
            lines.append(
                f"{shape.name:9} {rows:5} {library.ms * 1e3:11.1f} {own.ms * 1e3:11.1f}"
                f" {own.ms / library.ms:12.3f} {own.flops / 1e12:8.0f}  {own.job.label}"
            )
    return "\n".join(lines)


def large_table(results: list[Result]) -> str:
    """Tiles that clearly beat every other kind, as text for `gpu/tiles.py`."""
    entries: dict[str, dict[str, list[str]]] = {"own": {}, "fused": {}}
    for (shape, rows), best in _kinds(results).items():
        if "library" not in best:
            continue
        key = f"({shape.columns}, {shape.depth})"
        # What runs where nothing is activated inside, too.
        others = {"own": ("library",), "fused": ("library", "own")}
        for kind, rivals in others.items():
            least = min(best[rival].ms for rival in rivals if rival in best)
            if kind in best and best[kind].ms <= _CLEARLY * least:
                tiles = entries[kind].setdefault(key, [])
                tiles.append(f"{rows}: {best[kind].job.numbers}")
    lines = []
    for title, kind in (("MANY_TILES", "own"), ("MANY_GATED", "fused")):
        inner = [f"    {key}: {{{', '.join(tiles)}}}," for key, tiles in entries[kind].items()]
        lines += [f"{title} = _measured({{", *inner, "})"]
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Time of a layer's four products, and the shapes whose own product wins at most rows."""
    times = chosen_times(results)
    lines = [f"fastest number of parts: {best_parts(results)}"]
    for rows in dict.fromkeys(r.job.rows for r in results):
        layer = [times.get((name, rows), (math.inf, math.inf)) for name in _LAYER]
        library, own = (sum(column) * 1e3 for column in zip(*layer, strict=True))
        lines.append(f"a layer at {rows} rows: library {library:.1f} us, own {own:.1f} us")
    faster = {
        (r.job.shape.columns, r.job.shape.depth)
        for r in results
        if r.job.rows == INVARIANT_ROWS
        for library, own in [times[r.job.shape.name, r.job.rows]]
        if own < library
    }
    lines.append(f"OWN_FASTER = frozenset({sorted(faster)})")
    return "\n".join(lines)


def table(results: list[Result]) -> str:
    """Best tiles as text for `gpu/tiles.py`."""
    lines = []
    chosen = best_parts(results)
    for title, gated in (("TILES", False), ("GATED_TILES", True)):
        entries: dict[tuple[int, int], dict[int, Result]] = {}
        for result in results:
            job = result.job
            tuned = job.tile is not None and not job.large and job.rows in ROW_BUCKETS
            if (
                not tuned
                or (job.shape.kind == "gated") != gated
                or _parts(result) != chosen.get(job.shape.name, 1)
            ):
                continue
            best = entries.setdefault((job.shape.columns, job.shape.depth), {})
            if job.rows not in best or result.ms < best[job.rows].ms:
                best[job.rows] = result
        lines.append(f"{title} = _measured({{")
        for key, best in entries.items():
            inner = ", ".join(
                f"{rows}: {r.job.numbers}"
                for rows, r in sorted(best.items())
                if r.job.tile is not None
            )
            name = next(iter(best.values())).job.shape.name
            lines.append(f"    {key}: {{{inner}}},  # {name}")
        lines.append("})")
    return "\n".join(lines)
