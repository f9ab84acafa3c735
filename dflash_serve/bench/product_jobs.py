"""What `bench.products` measures: shapes of a Qwen3-8B DFlash step, row counts, variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dflash_serve.bench.product_tiles import decode_tiles, large_variants, parted_tiles
from dflash_serve.kernels.gpu.tiles import Fold, Tile, row_bucket

__all__ = ["LOGITS", "SHAPES", "TOYS", "Job", "Shape", "jobs_of", "toy"]


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
# The head once more: logits of the type of the rows instead of float32.
LOGITS = Shape("head_short", 151936, 4096, "plain", 2)


def toy(shape: Shape) -> Shape:
    """The same at a size that the interpreter gets through."""
    return dataclasses.replace(shape, columns=64, depth=64 + 32 * (shape.kind == "add"), copies=2)


TOYS = tuple(toy(shape) for shape in SHAPES)


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement; without a tile, the library's. Folds matter where a norm comes before."""

    shape: Shape
    rows: int
    tile: Tile | None
    fold: Fold = "apart"
    large: bool = False
    halves: bool = True
    persistent: bool = True

    @property
    def numbers(self) -> tuple[object, ...]:
        """Of the tile, without those at the end that are as usual."""
        if self.tile is None:
            return ()
        values = dataclasses.astuple(self.tile)
        return values if self.tile.mode else values[:-1] if self.tile.parts > 1 else values[:-2]

    @property
    def label(self) -> str:
        """The variant in a few characters."""
        if self.tile is None:
            return "library"
        numbers = ",".join(str(n) for n in self.numbers)
        if self.large:
            return f"{numbers}{'' if self.halves else ' whole'}{'' if self.persistent else ' grid'}"
        return f"{numbers} {self.fold}" if self.shape.kind in ("norm", "gated") else numbers


def _parted(shape: Shape, rows: int, toy: bool) -> list[Tile]:
    gated = shape.kind == "gated"
    return parted_tiles(row_bucket(rows), shape.columns, shape.depth, gated=gated, toy=toy)


def jobs_of(part: str, shapes: Iterable[Shape], counts: Iterable[int], toy: bool) -> list[Job]:
    """Everything to measure, in the order in which it matters when time runs out."""
    jobs: list[Job] = []
    for rows in counts:
        for shape in shapes:
            many = part in ("large", "logits")
            jobs.append(Job(shape, rows, None, large=many))
            if many:
                variants = large_variants(gated=shape.kind == "gated", toy=toy)
                jobs += [Job(shape, rows, t, "apart", True, h, p) for t, h, p in variants]
                continue
            if part == "decode2":
                jobs += [Job(shape, rows, t) for t in _parted(shape, rows, toy)]
                continue
            folds: tuple[Fold, ...] = ("rstd", "apart", "loop")
            normed = shape.kind in ("norm", "gated")
            tiles = decode_tiles(row_bucket(rows), gated=shape.kind == "gated", toy=toy)
            if rows == 1:  # the bucket is tuned at 16 rows
                tiles = tiles[:4]
            jobs += [
                Job(shape, rows, t, f) for t in tiles for f in (folds if normed else folds[:1])
            ]
    return jobs
