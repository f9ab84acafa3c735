"""What `bench.products` measures: shapes of a Qwen3-8B DFlash step, row counts, variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dflash_serve.bench.product_tiles import decode_tiles, gated_tiles, large_tiles
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, Tile, row_bucket

__all__ = ["SHAPES", "TOYS", "Job", "Shape", "jobs_of"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A weight and what surrounds its product.

    Attributes:
        kind: "norm" before it, "gated" norm before and activation after, residual "add" after,
            float32 "head", or "plain".
        copies: weights of that shape in the graph.
        consumed: whether the sum may take the memory of its residual.
    """

    name: str
    columns: int
    depth: int
    kind: str
    copies: int
    consumed: bool = False


SHAPES = (
    Shape("qkv", 6144, 4096, "norm", 36),
    Shape("o", 4096, 4096, "add", 36),
    Shape("gate_up", 24576, 4096, "gated", 36),
    Shape("down", 4096, 12288, "add", 36, consumed=True),
    Shape("head", 151936, 4096, "head", 2),
    Shape("fc", 4096, 20480, "plain", 8),
    Shape("draft_kv", 10240, 4096, "norm", 16),
)
_LAYER = ("gate_up", "down", "qkv", "o")  # those with the most to win first
# At a size that the interpreter gets through.
TOYS = tuple(
    dataclasses.replace(s, columns=64, depth=64 + 32 * (s.kind == "add"), copies=2) for s in SHAPES
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement; without a tile, the library's.

    Attributes:
        large: of the products of many rows, without the norm before them.
        fused: of those, activated inside; a gated one is otherwise activated in a kernel after it.
    """

    shape: Shape
    rows: int
    tile: Tile | None
    large: bool = False
    fused: bool = False

    @property
    def activated(self) -> bool:
        """Whether a kernel after our own product activates it."""
        gated = self.shape.kind == "gated" and self.large
        return gated and self.tile is not None and not self.fused

    @property
    def numbers(self) -> tuple[object, ...]:
        """Of the tile, without those at the end that are as usual."""
        if self.tile is None:
            return ()
        values = dataclasses.astuple(self.tile)
        usual = [field.default for field in dataclasses.fields(self.tile)]
        while values[-1] == usual[len(values) - 1]:
            values = values[:-1]
        return values

    @property
    def label(self) -> str:
        """The variant in a few characters."""
        if self.tile is None:
            return "library"
        apart = dataclasses.replace(self, tile=dataclasses.replace(self.tile, joint=False))
        numbers = ",".join(str(n) for n in apart.numbers)
        after = " + silu" if self.activated else " fused" if self.fused else ""
        return numbers + after + (" joint" if self.tile.joint else "")


def jobs_of(part: str, shapes: Iterable[Shape], counts: Iterable[int], toy: bool) -> list[Job]:
    """Everything to measure, in the order in which it matters when time runs out."""
    shapes, counts = tuple(shapes), tuple(counts)
    if part == "large":
        layer = sorted((s for s in shapes if s.name in _LAYER), key=lambda s: _LAYER.index(s.name))
        rest = [s for s in shapes if s.name not in _LAYER]
        return [
            job
            for some in (layer, rest)
            for rows in counts
            for shape in some
            for job in _large_jobs(shape, rows, toy)
        ]
    return [job for rows in counts for shape in shapes for job in _few_jobs(shape, rows, toy)]


def _few_jobs(shape: Shape, rows: int, toy: bool) -> list[Job]:
    """The library's and every tile's of few rows."""
    gated = shape.kind == "gated"
    tiles = decode_tiles(row_bucket(rows), shape.columns, shape.depth, gated=gated, toy=toy)
    return [Job(shape, rows, tile) for tile in (None, *tiles)]


def _large_jobs(shape: Shape, rows: int, toy: bool) -> list[Job]:
    """The library's and every tile's; of few rows those that decoding takes."""
    if rows <= INVARIANT_ROWS and not toy:
        return _few_jobs(shape, rows, toy)
    tiles = large_tiles(shape.columns, shape.depth, rows, toy=toy)
    jobs = [Job(shape, rows, tile, large=True) for tile in (None, *tiles)]
    if shape.kind == "gated":
        inside = gated_tiles(shape.columns, shape.depth, rows, toy=toy)
        jobs += [Job(shape, rows, tile, large=True, fused=True) for tile in inside]
    return jobs
