"""Tiles of the matrix products, as data: measured for known shapes, a rule for all others.

Row tiles, steps and loads may differ from entry to entry: every product sums K in ascending order,
so the bits of a row are the same for all of them. Only `Tile.parts` counts: it is the same in all
entries of a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

__all__ = [
    "COPY_BYTES",
    "GATED_TILES",
    "INVARIANT_ROWS",
    "MANY_GATED",
    "MANY_TILES",
    "ROW_BUCKETS",
    "SHARED_BYTES",
    "TILES",
    "Mode",
    "Tile",
    "large_tile",
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

Mode = Literal["", "copy", "spread"]
"""What loads a tile and where K is summed.

"": loads by address; one program sums all of K.
copy: loads by the copy engine; one program sums all of K.
spread: loads by the copy engine; every part of K has a program, and the last to end adds them up.
"""

COPY_BYTES = 16
"""What the copy engine asks of addresses and of the distances of rows."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is cut up.

    Attributes:
        rows: rows of x of one program.
        columns: rows of the weight of one program; of the gate and of the up part each, where
            they are not summed as one product.
        depth: elements of K of one step.
        warps: of a program.
        stages: loads in flight, in steps.
        parts: equal parts of K that are summed on their own, each a whole number of steps; their
            sums are added in ascending order. It decides a row's bits: one number per shape. More
            than one only with "spread".
        mode: how they are loaded and run.
        group: row tiles that share the columns they read from L2; only of `linear_large`.
        more: further columns as a second product of the same rows, for widths that are no power
            of two; only with "copy" in one part.
        joint: of a gated product of few rows: gate and up as one product of `columns` rows of the
            weight, told apart after the sum. `linear_large` always does so.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    mode: Mode = ""
    group: int = 8
    more: int = 0
    joint: bool = False

    def joined(self) -> Tile:
        """The same rows of a gated product's weight, as one product."""
        if self.joint:
            return self
        return dataclasses.replace(self, columns=2 * self.columns, more=2 * self.more, joint=True)


_Numbers = (
    tuple[int, int, int, int, int]
    | tuple[int, int, int, int, int, int]
    | tuple[int, int, int, int, int, int, Mode]
    | tuple[int, int, int, int, int, int, Mode, int]
    | tuple[int, int, int, int, int, int, Mode, int, int]
    | tuple[int, int, int, int, int, int, Mode, int, int, bool]
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
TILES = _measured(
    {
        (6144, 4096): {  # Qwen3-8B q, k and v
            16: (16, 64, 256, 4, 4, 1, "copy"),
            32: (32, 64, 256, 4, 4, 1, "copy"),
            64: (64, 64, 128, 4, 5, 1, "copy"),
            128: (64, 64, 128, 4, 4, 1, "copy", 8, 32),
        },
        (4096, 4096): {  # o
            16: (16, 64, 256, 4, 4, 2, "spread"),
            32: (32, 64, 256, 4, 4, 2, "spread"),
            64: (64, 64, 128, 4, 5, 2, "spread"),
            128: (128, 64, 128, 4, 4, 2, "spread"),
        },
        (4096, 12288): {  # down
            16: (16, 64, 256, 4, 4, 2, "spread"),
            32: (32, 64, 256, 4, 4, 2, "spread"),
            64: (64, 64, 128, 4, 5, 2, "spread"),
            128: (128, 64, 128, 4, 4, 2, "spread"),
        },
        (151936, 4096): {  # head
            16: (16, 64, 128, 4, 4),
            32: (32, 64, 128, 4, 4),
            64: (64, 128, 128, 4, 4, 1, "copy"),
            128: (128, 256, 64, 8, 4, 1, "copy"),
        },
        (4096, 20480): {  # the draft's fc over five tapped layers
            16: (16, 64, 256, 4, 4, 2, "spread"),
            32: (32, 64, 128, 4, 5, 2, "spread"),
            64: (64, 64, 128, 4, 5, 2, "spread"),
            128: (128, 64, 128, 4, 4, 2, "spread"),
        },
        (10240, 4096): {  # the draft's keys and values of five layers
            16: (16, 64, 128, 4, 4),
            32: (32, 64, 128, 4, 4),
            64: (64, 128, 64, 4, 5),
            128: (128, 128, 64, 8, 6, 1, "copy"),
        },
    }
)
GATED_TILES = _measured(
    {
        (24576, 4096): {  # gate and up
            16: (16, 32, 128, 4, 3),
            32: (32, 64, 128, 4, 4, 1, "", 8, 0, True),
            64: (64, 128, 128, 4, 3, 1, "copy", 8, 64, True),
            128: (128, 256, 64, 8, 4, 1, "copy", 8, 0, True),
        }
    }
)

# At the row counts where they are faster than the library; of `linear_large` without a mode. What
# follows them is counted: the activation of gate and up, the copy of a residual that is kept.
MANY_TILES = _measured(
    {
        (4096, 4096): {
            384: (128, 128, 64, 8, 6),
            512: (128, 128, 64, 8, 6),
            1024: (128, 256, 64, 8, 4, 1, "", 4),
            2048: (128, 256, 64, 8, 4, 1, "", 4),
            8192: (128, 256, 64, 8, 4, 1, "", 4),
        },
        (4096, 12288): {
            192: (128, 256, 64, 8, 4, 4, "spread"),
            1024: (128, 256, 64, 8, 4, 1, "", 16),
        },
        (6144, 4096): {2048: (128, 256, 64, 8, 4), 8192: (128, 256, 64, 8, 4)},
        (4096, 20480): {
            1024: (128, 256, 64, 8, 4, 1, "", 4),
            2048: (128, 256, 64, 8, 4, 1, "", 4),
        },
        (10240, 4096): {2048: (128, 256, 64, 8, 4), 8192: (128, 256, 64, 8, 4)},
    }
)
# With the activation inside, where that is faster than any product and the activation after it.
MANY_GATED = _measured(
    {
        (24576, 4096): {
            256: (128, 128, 64, 4, 6),
            512: (128, 256, 64, 8, 4, 1, "", 2),
            1024: (128, 256, 64, 8, 4, 1, "", 2),
            2048: (128, 256, 64, 8, 4),
            8192: (128, 256, 64, 8, 4),
        }
    }
)


def row_bucket(rows: int) -> int:
    """The bucket of a row count of at most `INVARIANT_ROWS`."""
    return next(bucket for bucket in ROW_BUCKETS if rows <= bucket)


def shared_bytes(tile: Tile, dtype: torch.dtype, *, gated: bool = False) -> int:
    """Shared memory that the loads of a tile take."""
    lines = tile.rows + (tile.columns + tile.more) * (2 if gated and not tile.joint else 1)
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
    """Enough programs for all processors, weight tiles of 16 KB, whole steps where K allows it.

    In one part, and from 64 rows on through the copy engine where it can address the rows.
    """
    parts = 2 if gated else 1
    wide = next((c for c in (64, 32) if columns >= c * parts * (_PROCESSORS - 12)), 16)
    wide = max(wide, 32) if bucket >= 64 else wide
    if dtype.itemsize > 2:  # float32 has no tensor core product at full precision
        return Tile(bucket, 32, _step(depth, 32), 4, 2)
    wide = wide // parts if wide > 32 else wide
    step = _step(depth, min(8192 // (wide * parts), {16: 512, 32: 256, 64: 128, 128: 128}[bucket]))
    warps = 8 if bucket == 128 and gated else 4
    copied = bucket >= 64 and depth * dtype.itemsize % COPY_BYTES == 0
    tile = Tile(bucket, wide, step, warps, 4, mode="copy" if copied else "")
    while tile.stages > 2 and shared_bytes(tile, dtype, gated=gated) > SHARED_BYTES - 16384:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    return tile


def _step(depth: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides K, or 64 when none of size does."""
    step = largest
    while step > 64 and depth % step:
        step //= 2
    return step


def large_tile(
    columns: int, depth: int, rows: int, dtype: torch.dtype, *, gated: bool = False
) -> Tile | None:
    """The tile with which a kernel of our own beats the library at so many rows, or None.

    Of `linear_large` without a mode; always so with the activation inside (`gated`). An entry
    holds from 7/8 of the row count it was measured at: with fewer rows the library has fewer tiles
    to compute, and ours as many.
    """
    if dtype.itemsize > 2:
        return None
    for (n, k, most), tile in (MANY_GATED if gated else MANY_TILES).items():
        if (n, k) == (columns, depth) and most * 7 < rows * 8 <= most * 8:
            return tile
    return None
