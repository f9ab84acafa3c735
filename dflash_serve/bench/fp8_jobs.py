"""What `bench.fp8` measures: products of a Qwen3-8B draft, row counts, ways to multiply."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from dflash_serve.kernels.gpu.fp8_tiles import Fp8Tile, fp8_tile, head_tile
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, row_bucket

__all__ = ["ROWS", "SHAPES", "TOYS", "Job", "Kind", "Shape", "candidates", "jobs_of"]

Kind = Literal["plain", "gated", "add", "pick"]

ROWS = (16, 2048, 128, 64, 512, 256, 1024, 32, 384, 240)
"""One request and 128 of them first, should the time run out."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A weight of the draft.

    Attributes:
        kind: "gated" with the activation after it, "add" with residual and norm after it, "pick"
            with the choice of an id for each row.
        copies: weights of that shape in memory, multiplied one after the other.
        each_step: products of that shape in a step.
    """

    name: str
    columns: int
    depth: int
    kind: Kind
    copies: int
    each_step: int


SHAPES = (
    Shape("gate_up", 24576, 4096, "gated", 5, 5),
    Shape("head", 151936, 4096, "pick", 1, 1),
    Shape("down", 4096, 12288, "add", 5, 5),
    Shape("qkv", 6144, 4096, "plain", 5, 5),
    Shape("o", 4096, 4096, "add", 8, 5),
    Shape("fc", 4096, 20480, "plain", 3, 1),
    Shape("kv", 10240, 4096, "plain", 4, 1),
)
# At a size that the interpreter gets through.
TOYS = tuple(dataclasses.replace(s, columns=64, depth=256, copies=1) for s in SHAPES[:3])


@dataclasses.dataclass(frozen=True)
class Job:
    """One way to compute one product, rows quantised first where it is in 8 bits.

    Attributes:
        way: "bf16" as the draft computes it without `draft_quantization`, "library" for the
            library's product of quantised rows, "tile" for our own with `tile`.
        apart: the ids are picked from logits, by a kernel of its own.
    """

    shape: Shape
    rows: int
    way: Literal["bf16", "library", "tile"]
    tile: Fp8Tile | None = None
    apart: bool = False

    @property
    def label(self) -> str:
        """The way in a few characters."""
        if self.tile is None:
            return self.way
        t = self.tile
        flags = [f"{t.parts} parts"] * (t.parts > 1) + ["swapped"] * t.swapped
        flags += [f"walks/{t.group}"] * t.walks + ["exact"] * t.exact
        flags += ["then pick"] * self.apart
        return " ".join([f"{t.rows},{t.columns},{t.depth},{t.warps},{t.stages}", *flags])


def jobs_of(
    shapes: Iterable[Shape], counts: Iterable[int], *, library: bool = True
) -> list[list[Job]]:
    """The jobs of each shape and row count, which are timed side by side."""
    shapes = tuple(shapes)
    return [
        [
            Job(shape, rows, "bf16"),
            *([Job(shape, rows, "library")] if library else []),
            *(Job(shape, rows, "tile", tile) for tile in candidates(shape, rows)),
            *(Job(shape, rows, "tile", tile, apart=True) for tile in _logits_tiles(shape, rows)),
        ]
        for rows in counts
        for shape in shapes
    ]


def candidates(shape: Shape, rows: int) -> list[Fp8Tile]:
    """Tiles worth a try, that of the table or rule first, no two alike."""
    if shape.kind == "pick":
        found = [head_tile(shape.columns, shape.depth, rows), *_picking(rows)]
        return list(dict.fromkeys(found))
    summed = shape.kind == "add"
    gated = shape.kind == "gated"
    found = [fp8_tile(shape.columns, shape.depth, rows, gated=gated, summed=summed)]
    for tile in _few(rows) if rows <= INVARIANT_ROWS else _many():
        split = (1,) if not summed or tile.walks else (1, 2, 4) if rows <= 512 else (1, 2)
        found += [dataclasses.replace(tile, parts=parts) for parts in split]
    fitting = [tile for tile in found if shape.depth % (tile.depth * tile.parts) == 0]
    return list(dict.fromkeys(fitting))


def _logits_tiles(shape: Shape, rows: int) -> list[Fp8Tile]:
    """Tiles of a head product that leaves its logits to the pick."""
    if shape.kind != "pick":
        return []
    found = [fp8_tile(shape.columns, shape.depth, rows)]
    found += _few(rows)[:4] if rows <= INVARIANT_ROWS else _many()[:2]
    return list(dict.fromkeys(found))


def _picking(rows: int) -> list[Fp8Tile]:
    if rows <= 32:
        return _few(rows)[:5]
    if rows <= 64:
        return [
            Fp8Tile(64, 64, 128, 4, 6, swapped=True),
            Fp8Tile(64, 64, 128, 4, 6),
            Fp8Tile(64, 128, 128, 8, 6),
        ]
    many = [
        Fp8Tile(128, 64, 128, 8, 5),
        Fp8Tile(128, 128, 128, 8, 6),
        Fp8Tile(128, 128, 128, 8, 6, walks=True),
        Fp8Tile(64, 256, 128, 8, 4, walks=True),
    ]
    wide = [Fp8Tile(128, 128, 128, 8, 6, walks=True, group=16)]
    return many if rows <= INVARIANT_ROWS else many[1:] + wide


def _few(rows: int) -> list[Fp8Tile]:
    bucket = row_bucket(rows)
    if bucket <= 32:
        first = Fp8Tile(bucket, 64, 256, 4, 4, swapped=True)
        return [
            first,
            dataclasses.replace(first, exact=True),
            Fp8Tile(bucket, 64, 512, 4, 3, swapped=True),
            Fp8Tile(bucket, 64, 128, 4, 8, swapped=True),
            Fp8Tile(bucket, 128, 128, 4, 5, swapped=True),
            Fp8Tile(bucket, 32, 256, 4, 6),
            Fp8Tile(bucket, 64, 256, 4, 4),
        ]
    if bucket == 64:
        return [
            Fp8Tile(64, 64, 128, 4, 6, swapped=True),
            Fp8Tile(64, 64, 128, 4, 6),
            Fp8Tile(64, 64, 256, 4, 4),
            Fp8Tile(64, 128, 128, 4, 5),
            Fp8Tile(64, 128, 128, 4, 5, swapped=True),
            Fp8Tile(64, 128, 128, 4, 5, exact=True),
        ]
    return [
        Fp8Tile(128, 64, 128, 4, 5),
        Fp8Tile(128, 64, 256, 4, 4),
        Fp8Tile(128, 128, 128, 4, 4),
        Fp8Tile(128, 128, 128, 8, 4),
        Fp8Tile(128, 128, 128, 8, 4, exact=True),
        Fp8Tile(128, 128, 128, 8, 6, walks=True),
        Fp8Tile(128, 256, 128, 8, 4, walks=True),
    ]


def _many() -> list[Fp8Tile]:
    return [
        Fp8Tile(128, 256, 128, 8, 4, walks=True),
        Fp8Tile(128, 256, 128, 8, 4, walks=True, group=16),
        Fp8Tile(128, 256, 128, 8, 3),
        Fp8Tile(128, 128, 128, 8, 6, walks=True),
        Fp8Tile(128, 128, 128, 8, 6, walks=True, exact=True),
        Fp8Tile(128, 128, 128, 8, 4),
        Fp8Tile(128, 64, 128, 4, 5),
    ]
