"""Tiles of the head product that picks, as data: measured for known heads, a rule for all others.

And the switch between it and the product with a pick after it. Up to `INVARIANT_ROWS` rows both
have the same keys, whatever the tile; above, as with every product, nothing is promised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton

from dflash_serve.kernels.gpu.tiles import COPY_BYTES, INVARIANT_ROWS, tile_for

__all__ = ["HEAD_TILES", "UNFUSED_ROWS", "HeadTile", "fuses", "head_tile"]

_PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """How a head product is cut up.

    Attributes:
        rows: rows of the hidden states of one tile.
        columns: ids of one tile.
        depth: elements of K of one step.
        warps: of a program.
        stages: loads in flight, in steps.
        copied: loads go through the copy engine, else by address.
        resident: programs that a processor holds and that walk over the tiles; 0 gives every tile
            a program of its own. Above 0 only with `copied`.
        group: row tiles that share the columns they read from L2; only with `copied`.
        piece: most columns scored at a time, at least 4 and a power of two.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    copied: bool = False
    resident: int = 0
    group: int = 8
    piece: int = 64


_ALL = 1 << 30

# {(N, K): {most rows: tile}}, ascending; bf16.
HEAD_TILES: Mapping[tuple[int, int], Mapping[int, HeadTile]] = MappingProxyType(
    {
        (151936, 4096): {  # Qwen3-8B
            16: HeadTile(16, 128, 128, 4, 3),
            32: HeadTile(32, 64, 128, 4, 4),
            64: HeadTile(64, 128, 128, 4, 4, copied=True),
            128: HeadTile(128, 256, 64, 8, 4, copied=True, resident=1),
            _ALL: HeadTile(128, 256, 64, 8, 4, copied=True, resident=1, group=16, piece=32),
        },
    }
)

UNFUSED_ROWS: Mapping[tuple[int, int], tuple[range, ...]] = MappingProxyType({})
"""{(N, K): row counts at which the product with a pick after it is the faster one}."""


def fuses(columns: int, depth: int, rows: int, dtype: torch.dtype) -> bool:
    """Whether rows of a step without truncation are picked inside the head product."""
    if any(rows in counts for counts in UNFUSED_ROWS.get((columns, depth), ())):
        return False
    if rows > INVARIANT_ROWS:
        # Without tensor cores the library's product is several times faster.
        return dtype.itemsize == 2
    # A sum in parts of K has bits that one in a single part does not have.
    return tile_for(columns, depth, rows, dtype).parts == 1


def head_tile(columns: int, depth: int, rows: int, dtype: torch.dtype) -> HeadTile:
    """The tile of [rows, depth] hidden states and a [columns, depth] head."""
    if dtype.itemsize == 2:
        for most, tile in HEAD_TILES.get((columns, depth), {}).items():
            if rows <= most:
                return tile
    if rows <= INVARIANT_ROWS:
        t = tile_for(columns, depth, rows, dtype)
        return HeadTile(t.rows, t.columns, t.depth, t.warps, t.stages, copied=t.mode != "")
    return _many(columns, depth, rows, dtype)


def _many(columns: int, depth: int, rows: int, dtype: torch.dtype) -> HeadTile:
    """The rule above `INVARIANT_ROWS`: the widest tile that still occupies all processors."""
    if dtype.itemsize > 2:
        return HeadTile(64, 32, 32, 4, 2)
    if depth * dtype.itemsize % COPY_BYTES:
        return HeadTile(64, 64, 64, 4, 3)
    for width in (256, 128):
        if triton.cdiv(rows, 128) * triton.cdiv(columns, width) >= _PROCESSORS:
            return HeadTile(128, width, 64, 8, 4, copied=True, resident=1)
    return HeadTile(64, 64, 64, 4, 4, copied=True)
