"""What `bench.products` measures: shapes of a Qwen3-8B DFlash step, row counts, variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dflash_serve.bench.product_tiles import decode_tiles, large_tiles
from dflash_serve.kernels.gpu.tiles import Tile, row_bucket

__all__ = ["SHAPES", "TOYS", "Job", "Shape", "jobs_of"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A weight and what surrounds its product.

    Attributes:
        kind: "norm" before it, "gated" norm before and activation after, residual "add" after,
            float32 "head", or "plain".
        copies: weights of that shape in the graph.
    """

    name: str
    columns: int
    depth: int
    kind: str
    copies: int


SHAPES = (
    Shape("qkv", 6144, 4096, "norm", 36),
    Shape("o", 4096, 4096, "add", 36),
    Shape("gate_up", 24576, 4096, "gated", 36),
    Shape("down", 4096, 12288, "add", 36),
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
    """One measurement; without a tile, the library's."""

    shape: Shape
    rows: int
    tile: Tile | None
    large: bool = False

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
        return "library" if self.tile is None else ",".join(str(n) for n in self.numbers)


def jobs_of(part: str, shapes: Iterable[Shape], counts: Iterable[int], toy: bool) -> list[Job]:
    """Everything to measure, in the order in which it matters when time runs out."""
    shapes, counts = tuple(shapes), tuple(counts)
    if part == "large":
        layer = sorted((s for s in shapes if s.name in _LAYER), key=lambda s: _LAYER.index(s.name))
        rest = [s for s in shapes if s.name not in _LAYER]
        return [
            Job(shape, rows, tile, large=True)
            for some in (layer, rest)
            for rows in counts
            for shape in some
            for tile in (
                None,
                *large_tiles(
                    shape.columns, shape.depth, rows, gated=shape.kind == "gated", toy=toy
                ),
            )
        ]
    return [
        Job(shape, rows, tile)
        for rows in counts
        for shape in shapes
        for tile in (
            None,
            *decode_tiles(
                row_bucket(rows),
                shape.columns,
                shape.depth,
                gated=shape.kind == "gated",
                toy=toy,
            ),
        )
    ]
