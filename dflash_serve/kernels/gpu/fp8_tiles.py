"""Tiles of the 8-bit products, as data: measured for known shapes, a rule for all others.

Every product sums K in ascending order; how many parts of K are summed on their own is the same
at all row counts of a shape up to `INVARIANT_ROWS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import triton

from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, ROW_BUCKETS, row_bucket

__all__ = ["GATED_TILES", "HEAD_TILES", "TILES", "Fp8Tile", "fp8_tile", "head_tile"]

_PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Fp8Tile:
    """How an 8-bit product is cut up.

    Attributes:
        rows: rows of x of one tile.
        columns: rows of the weight of one tile, gate and up counted each.
        depth: elements of K of one step, a byte each.
        warps: of a program.
        stages: loads in flight, in steps.
        parts: equal parts of K, each a whole number of steps, whose sums are left to `add_norm`;
            1 where the product itself is wanted.
        swapped: multiply weight by x, which gives the tensor cores their 64 rows when x has fewer.
        walks: one program a processor walks over the tiles; else each tile has its own.
        group: row tiles that share the columns they read from L2; only where programs walk.
        exact: add each step of K to the sum in full float32; else a Hopper tensor core keeps about
            14 bits of it between steps. Within a step, products of 64 rows keep no more.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    swapped: bool = False
    walks: bool = False
    group: int = 8
    exact: bool = False


_Numbers = (
    tuple[int, int, int, int, int]
    | tuple[int, int, int, int, int, int]
    | tuple[int, int, int, int, int, int, bool]
    | tuple[int, int, int, int, int, int, bool, bool]
    | tuple[int, int, int, int, int, int, bool, bool, int]
)
_Tiles = Mapping[tuple[int, int], Mapping[int, Fp8Tile]]


def _measured(entries: dict[tuple[int, int], dict[int, _Numbers]]) -> _Tiles:
    return MappingProxyType(
        {
            shape: MappingProxyType({most: Fp8Tile(*values) for most, values in tiles.items()})
            for shape, tiles in entries.items()
        }
    )


# {(N, K): {most rows: (rows, columns, depth, warps, stages, …)}}, ascending, on one H200; (N, K)
# of a gated product in `GATED_TILES`.
TILES = _measured(
    {
        (4096, 12288): {  # down
            16: (16, 64, 512, 4, 3, 2, True),
            32: (32, 64, 512, 4, 3, 2, True),
            64: (64, 64, 256, 4, 4, 2),
            128: (128, 64, 256, 4, 4, 2),
            256: (128, 128, 128, 8, 4, 2),
            512: (128, 128, 128, 8, 6, 1, False, True),
            1024: (128, 256, 128, 8, 4, 1, False, True),
            2048: (128, 256, 128, 8, 4, 1, False, True, 16),
        },
        (6144, 4096): {  # qkv
            16: (16, 64, 512, 4, 3, 1, True),
            32: (32, 64, 256, 4, 4, 1, True),
            64: (64, 64, 256, 4, 4),
            128: (128, 64, 256, 4, 4),
            256: (128, 64, 128, 4, 4),
            384: (128, 256, 128, 8, 3),
            512: (128, 256, 128, 8, 4, 1, False, True, 16),
            1024: (128, 128, 128, 8, 6, 1, False, True),
            2048: (128, 256, 128, 8, 4, 1, False, True, 16),
        },
        (4096, 4096): {  # o
            16: (16, 64, 512, 4, 3, 2, True),
            32: (32, 64, 256, 4, 4, 2, True),
            64: (64, 64, 256, 4, 4, 2),
            128: (128, 64, 256, 4, 4, 2),
            256: (128, 64, 128, 4, 5),
            384: (128, 64, 128, 4, 4),
            512: (128, 128, 128, 8, 6, 1, False, True),
            2048: (128, 256, 128, 8, 4, 1, False, True),
        },
        (4096, 20480): {  # fc
            16: (16, 64, 512, 4, 3, 1, True),
            32: (32, 64, 512, 4, 3, 1, True),
            64: (64, 64, 256, 4, 4),
            128: (128, 64, 256, 4, 4),
            256: (128, 64, 128, 4, 5),
            512: (128, 128, 128, 8, 6, 1, False, True),
            1024: (128, 256, 128, 8, 3),
            2048: (128, 256, 128, 8, 4, 1, False, True, 16),
        },
        (10240, 4096): {  # kv
            16: (16, 64, 256, 4, 4, 1, True),
            32: (32, 64, 256, 4, 4, 1, True),
            64: (64, 64, 128, 4, 6),
            128: (128, 128, 128, 8, 6, 1, False, True),
            256: (128, 256, 128, 8, 4, 1, False, True, 16),
            384: (128, 256, 128, 8, 4, 1, False, True),
            1024: (128, 128, 128, 8, 6, 1, False, True),
            2048: (128, 256, 128, 8, 4, 1, False, True, 16),
        },
    }
)
GATED_TILES = _measured(
    {
        (24576, 4096): {  # gate_up
            16: (16, 128, 128, 4, 5, 1, True),
            32: (32, 128, 128, 4, 5, 1, True),
            64: (64, 64, 128, 4, 4),
            128: (128, 256, 128, 8, 4, 1, False, True),
            384: (128, 128, 128, 8, 6, 1, False, True),
            2048: (128, 256, 128, 8, 4, 1, False, True),
        },
    }
)

# The same of the head product that picks.
HEAD_TILES = _measured(
    {
        (151936, 4096): {  # head
            16: (16, 128, 128, 4, 5, 1, True),
            32: (32, 128, 128, 4, 5, 1, True),
            64: (64, 64, 128, 4, 6),
            128: (128, 128, 128, 8, 6, 1, False, True),
            2048: (64, 256, 128, 8, 4, 1, False, True),
        },
    }
)


def fp8_tile(
    columns: int, depth: int, rows: int, *, gated: bool = False, summed: bool = False
) -> Fp8Tile:
    """The tile of a [rows, depth] by [columns, depth] product.

    Args:
        summed: the kernel behind it adds parts of K up; without, there is one part.
    """
    table = (GATED_TILES if gated else TILES).get((columns, depth), {})
    tile = next((tile for most, tile in table.items() if rows <= most), None)
    if tile is None:
        few = rows <= INVARIANT_ROWS
        tile = (_few if few else _many)(columns, depth, rows, gated=gated, summed=summed)
    return tile if summed else dataclasses.replace(tile, parts=1)


def head_tile(columns: int, depth: int, rows: int) -> Fp8Tile:
    """The tile of [rows, depth] hidden states and a [columns, depth] head, picked inside.

    The pick needs registers, which leaves them to smaller tiles than those of the product.
    """
    for most, tile in HEAD_TILES.get((columns, depth), {}).items():
        if rows <= most:
            return tile
    if rows > INVARIANT_ROWS:
        return Fp8Tile(128, 128, _step(depth, 128), 8, 6, walks=True)
    bucket = row_bucket(rows)
    if bucket <= 32:
        return Fp8Tile(bucket, 64, _step(depth, 256), 4, 4, swapped=True)
    return Fp8Tile(bucket, 128, _step(depth, 128), 8, 4)


def _few(columns: int, depth: int, rows: int, *, gated: bool, summed: bool) -> Fp8Tile:
    """Tiles of 64 weight rows; K in two parts where that leaves processors without a tile."""
    bucket = row_bucket(rows)
    wide = 128 if gated and bucket == ROW_BUCKETS[-1] else 64
    step = _step(depth, 256 if bucket <= 32 else 128)
    # The same whatever the rows.
    split = summed and columns < 64 * _PROCESSORS and depth % (2 * _step(depth, 256)) == 0
    return Fp8Tile(bucket, wide, step, 4, 4, parts=2 if split else 1, swapped=bucket < 64)


def _many(columns: int, depth: int, rows: int, *, gated: bool, summed: bool) -> Fp8Tile:
    """The widest tile of 128 rows that gives most processors one."""
    step = _step(depth, 128)
    for wide, warps, stages in ((256, 8, 4), (128, 8, 6)):
        if triton.cdiv(rows, 128) * triton.cdiv(columns, wide) >= _PROCESSORS * 3 // 4:
            return Fp8Tile(128, wide, step, warps, stages, walks=True)
    return Fp8Tile(128, 64, step, 4, 4)


def _step(depth: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides K, or 64 when none of size does."""
    step = largest
    while step > 64 and depth % step:
        step //= 2
    return step
