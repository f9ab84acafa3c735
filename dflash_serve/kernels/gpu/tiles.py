"""Tiles of the matrix products, as data: measured for known shapes, a rule for all others.

Row tiles and steps may differ from entry to entry: every product sums K in ascending order, so the
bits of a row are the same for all of them. Only `Tile.parts` counts: it is the same in all entries
of a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

__all__ = [
    "FOLDS",
    "GATED_TILES",
    "INVARIANT_ROWS",
    "MANY_TILES",
    "ROW_BUCKETS",
    "TILES",
    "Fold",
    "Mode",
    "Tile",
    "fold_for",
    "large_tile",
    "many_tile",
    "row_bucket",
    "shared_bytes",
    "tile_for",
]

INVARIANT_ROWS = 128
"""Up to this many rows the bits of a row do not depend on how many there are."""

ROW_BUCKETS = (16, 32, 64, 128)
"""Row counts that tiles are chosen for; a call takes the first bucket that holds its rows."""

SHARED_BYTES = 227 * 1024  # what one program may use on Hopper
_PROCESSORS = 132

Fold = Literal["rstd", "apart", "loop"]
"""Where the RMSNorm before a product is computed.

rstd: a small kernel leaves 1 / rms of every row, the product normalises the rows it loads.
apart: the small kernel stores the normalised rows themselves. Bit-equal to `rstd`.
loop: the product sums the squares while it multiplies, and scales its result. Rounds differently.
"""

FOLDS: Mapping[int, Fold] = MappingProxyType(dict.fromkeys(ROW_BUCKETS, "apart"))
"""Fold by row bucket. `loop` may stand here for all buckets or for none: rows would differ."""

Mode = Literal["", "copy", "spread"]
"""What loads a tile and where the parts of K are summed.

"": loads by address; one program sums all parts.
copy: loads by the copy engine; one program sums all parts.
spread: loads by the copy engine; every part has a program, and the last to end adds them up.
"""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is cut up.

    Attributes:
        rows: rows of x of one program.
        columns: rows of the weight of one program; of the gate and of the up part each.
        depth: elements of K of one step.
        warps: of a program.
        stages: loads in flight, in steps.
        parts: equal parts of K that are summed on their own, each a whole number of steps; their
            sums are added in ascending order. It decides a row's bits: one number per shape.
        mode: how the parts are run.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    mode: Mode = ""


_Numbers = (
    tuple[int, int, int, int, int]
    | tuple[int, int, int, int, int, int]
    | tuple[int, int, int, int, int, int, Mode]
)


def _measured(
    entries: dict[tuple[int, int], dict[int, _Numbers]],
) -> Mapping[tuple[int, int, int], Tile]:
    return MappingProxyType(
        {
            (columns, depth, bucket): Tile(*values)
            for (columns, depth), buckets in entries.items()
            for bucket, values in buckets.items()
        }
    )


# {(N, K): {row bucket or row count: (rows, columns, depth, warps, stages, …)}}, bf16 on one H200.
# The bucket of 32 rows is not measured.
TILES = _measured(
    {
        (6144, 4096): {  # Qwen3-8B q, k and v
            16: (16, 32, 256, 4, 4),
            32: (32, 32, 256, 4, 4),
            64: (64, 64, 128, 4, 6),
            128: (128, 64, 64, 4, 6),
        },
        (4096, 4096): {  # o
            16: (16, 32, 128, 4, 6),
            32: (32, 32, 256, 4, 4),
            64: (64, 32, 256, 4, 4),
            128: (64, 64, 128, 4, 4),
        },
        (4096, 12288): {  # down
            16: (16, 32, 256, 4, 6),
            32: (32, 32, 256, 4, 4),
            64: (64, 32, 256, 4, 4),
            128: (64, 64, 128, 4, 4),
        },
        (151936, 4096): {  # head
            16: (16, 64, 128, 4, 4),
            32: (32, 64, 128, 4, 4),
            64: (64, 128, 64, 4, 5),
            128: (128, 128, 64, 8, 5),
        },
        (4096, 20480): {  # the draft's fc over five tapped layers
            16: (16, 32, 256, 4, 6),
            32: (32, 32, 256, 4, 4),
            64: (64, 32, 256, 4, 4),
            128: (64, 64, 128, 4, 4),
        },
        (10240, 4096): {  # the draft's keys and values of five layers
            16: (16, 64, 128, 4, 4),
            32: (32, 64, 128, 4, 4),
            64: (64, 128, 64, 4, 5),
            128: (128, 128, 64, 8, 5),
        },
    }
)
GATED_TILES = _measured(
    {
        (24576, 4096): {  # gate and up
            16: (16, 32, 128, 4, 4),
            32: (32, 32, 128, 4, 4),
            64: (64, 32, 64, 4, 6),
            128: (128, 128, 64, 8, 4),
        }
    }
)

# Of `linear_large`, at the row counts where it is faster than the library.
MANY_TILES = _measured(
    {
        (4096, 4096): {
            512: (128, 128, 64, 8, 5),
            1024: (128, 256, 64, 8, 4),
            2048: (128, 256, 64, 8, 4),
            8192: (128, 256, 64, 8, 3),
        },
        (4096, 12288): {1024: (128, 256, 64, 8, 4), 2048: (128, 256, 64, 8, 3)},
        (4096, 20480): {
            512: (128, 128, 64, 8, 5),
            1024: (128, 256, 64, 8, 4),
            2048: (128, 256, 64, 8, 4),
        },
        (10240, 4096): {1024: (128, 128, 64, 8, 5), 2048: (128, 256, 64, 8, 4)},
    }
)


def row_bucket(rows: int) -> int:
    """The bucket of a row count of at most `INVARIANT_ROWS`."""
    return next(bucket for bucket in ROW_BUCKETS if rows <= bucket)


def fold_for(rows: int) -> Fold:
    """Where the norm is computed for a row count of at most `INVARIANT_ROWS`."""
    return FOLDS[row_bucket(rows)]


def shared_bytes(tile: Tile, dtype: torch.dtype, *, gated: bool = False) -> int:
    """Shared memory that the loads of a tile take."""
    lines = tile.rows + tile.columns * (2 if gated else 1)
    return lines * tile.depth * dtype.itemsize * tile.stages


def tile_for(
    columns: int, depth: int, rows: int, dtype: torch.dtype, *, gated: bool = False
) -> Tile:
    """The tile of a [rows, depth] by [columns, depth] product of at most `INVARIANT_ROWS` rows.

    That of the table's next larger bucket where it has none for the row count.
    """
    bucket = row_bucket(rows)
    if dtype.itemsize == 2:
        # A shape in parts must not fall back to the rule, which knows none.
        table = GATED_TILES if gated else TILES
        for at_least in ROW_BUCKETS[ROW_BUCKETS.index(bucket) :]:
            if (columns, depth, at_least) in table:
                return table[columns, depth, at_least]
    return _ruled(columns, depth, bucket, dtype, gated=gated)


def _ruled(columns: int, depth: int, bucket: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """Enough programs for all processors, weight tiles of 16 KB, whole steps where K allows it."""
    parts = 2 if gated else 1
    wide = next((c for c in (64, 32) if columns >= c * parts * (_PROCESSORS - 12)), 16)
    wide = max(wide, 32) if bucket >= 64 else wide
    if dtype.itemsize > 2:  # float32 has no tensor core product at full precision
        return Tile(bucket, 32, _step(depth, 32), 4, 2)
    wide = wide // parts if wide > 32 else wide
    step = _step(depth, min(8192 // (wide * parts), {16: 512, 32: 256, 64: 128, 128: 128}[bucket]))
    warps = 8 if bucket == 128 and gated else 4
    stages = 4
    tile = Tile(bucket, wide, step, warps, stages)
    while tile.stages > 2 and shared_bytes(tile, dtype, gated=gated) > SHARED_BYTES - 16384:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    return tile


def _step(depth: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides K, or 64 when none of size does."""
    step = largest
    while step > 64 and depth % step:
        step //= 2
    return step


def large_tile(columns: int, depth: int, rows: int, dtype: torch.dtype) -> Tile | None:
    """The tile with which `linear_large` beats the library at so many rows, or None.

    An entry holds from 7/8 of the row count it was measured at: with fewer rows the library has
    fewer tiles to compute, and `linear_large` as many.
    """
    if dtype.itemsize > 2:
        return None
    for (n, k, most), tile in MANY_TILES.items():
        if (n, k) == (columns, depth) and most * 7 < rows * 8 <= most * 8:
            return tile
    return None


def many_tile(
    columns: int, depth: int, rows: int, dtype: torch.dtype, *, gated: bool = False
) -> Tile:
    """A tile of `linear_large` for any product of many rows."""
    if dtype.itemsize > 2:
        return Tile(32, 64, 32, 8, 2)
    found = None if gated else large_tile(columns, depth, rows, dtype)
    if found is not None:
        return found
    if gated:
        return Tile(128, 128, 64, 8, 3)
    few = -(-rows // 128) * -(-columns // 256) < _PROCESSORS
    return Tile(128, 128, 64, 8, 4) if few else Tile(128, 256, 64, 8, 3)
