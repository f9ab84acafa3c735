"""Which tiles `bench.products` tries."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from dflash_serve.kernels.gpu.tiles import (
    SHARED_BYTES,
    Tile,
    large_tile,
    shared_bytes,
    tile_for,
)

__all__ = ["clocks", "decode_tiles", "gated_tiles", "large_tiles"]

_Tried = dict[int, tuple[tuple[Any, ...], ...]]

# (rows, columns, depth, warps, stages, …) by row bucket; steps divide a quarter of every K.
_PLAIN: _Tried = {
    16: (
        (16, 32, 128, 4, 6),
        (16, 32, 128, 4, 8),
        (16, 32, 256, 4, 6),
        (16, 32, 128, 4, 6, 1, "copy"),
        (16, 32, 256, 4, 5, 1, "copy"),
        (16, 32, 256, 4, 7, 1, "copy"),
        (16, 64, 128, 4, 4),
        (16, 64, 128, 4, 6, 1, "copy"),
        (16, 64, 256, 4, 4, 2, "spread"),
        (16, 64, 128, 4, 6, 4, "spread"),
    ),
    32: (
        (32, 32, 128, 4, 6),
        (32, 32, 256, 4, 4),
        (32, 32, 256, 4, 5, 1, "copy"),
        (32, 64, 128, 4, 4),
        (32, 64, 128, 4, 5, 1, "copy"),
        (32, 64, 128, 4, 5, 2, "spread"),
        (32, 64, 128, 4, 5, 4, "spread"),
    ),
    64: (
        (64, 32, 256, 4, 4),
        (64, 32, 128, 4, 6, 1, "copy"),
        (64, 32, 256, 4, 4, 1, "copy"),
        (64, 64, 128, 4, 5, 1, "copy"),
        (64, 128, 64, 4, 5),
        (64, 64, 128, 4, 5, 2, "spread"),
        (64, 128, 128, 8, 4, 4, "spread"),
    ),
    128: (
        (64, 64, 128, 4, 4, 1, "copy"),
        (128, 64, 64, 4, 6, 1, "copy"),
        (128, 64, 128, 8, 4, 1, "copy"),
        (128, 128, 64, 8, 5),
        (128, 128, 64, 8, 6, 1, "copy"),
        (128, 64, 64, 4, 6, 2, "spread"),
        (128, 64, 128, 4, 4, 2, "spread"),
        (128, 64, 64, 4, 4, 4, "spread"),
    ),
}
_MANY_COLUMNS = 65536
# With so many there are enough tiles without parts.
_WIDE: _Tried = {
    16: (
        (16, 64, 128, 4, 4),
        (16, 64, 128, 4, 6, 1, "copy"),
        (16, 128, 128, 4, 4, 1, "copy"),
    ),
    32: ((32, 64, 128, 4, 4), (32, 64, 128, 4, 6, 1, "copy"), (32, 128, 64, 4, 5)),
    64: ((64, 128, 64, 4, 6, 1, "copy"), (64, 128, 128, 4, 4, 1, "copy"), (64, 128, 64, 4, 5)),
    128: (
        (128, 128, 128, 8, 3),
        (128, 128, 64, 8, 6, 1, "copy"),
        (128, 256, 64, 8, 4, 1, "copy"),
    ),
}
_GATED: _Tried = {
    16: (
        (16, 32, 128, 4, 3),
        (16, 32, 128, 4, 4),
        (16, 32, 128, 4, 4, 1, "copy"),
        (16, 64, 128, 4, 4, 1, "copy"),
    ),
    32: ((32, 32, 128, 4, 4), (32, 32, 64, 4, 6), (32, 32, 128, 4, 5, 1, "copy")),
    64: ((64, 32, 64, 4, 6), (64, 32, 128, 4, 4, 1, "copy"), (64, 64, 64, 4, 5, 1, "copy")),
    128: (
        (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 4, 1, "copy"),
        (128, 64, 64, 8, 3, 1, "copy"),
    ),
}
# Gate and up as one product, of twice the columns; the table's tile is tried so too.
_JOINT: _Tried = {
    16: (
        (16, 64, 128, 4, 4),
        (16, 64, 128, 4, 5),
        (16, 64, 128, 4, 6, 1, "copy"),
        (16, 128, 128, 4, 4, 1, "copy"),
        (16, 128, 64, 4, 5),
    ),
    32: (
        (32, 64, 128, 4, 5),
        (32, 64, 128, 4, 5, 1, "copy"),
        (32, 128, 64, 4, 5),
        (32, 128, 128, 4, 4, 1, "copy"),
    ),
    64: (
        (64, 128, 64, 4, 6, 1, "copy"),
        (64, 128, 128, 4, 4, 1, "copy"),
        (64, 256, 64, 4, 5, 1, "copy"),
        (64, 256, 64, 8, 5, 1, "copy"),
    ),
    128: (
        (128, 256, 64, 8, 3, 1, "copy"),
        (128, 128, 64, 8, 6, 1, "copy"),
        (128, 128, 64, 4, 6, 1, "copy"),
        (128, 128, 128, 8, 3, 1, "copy"),
    ),
}
# (rows, columns, depth, warps, most stages, parts, mode); stages as shared memory allows.
_LARGE: tuple[tuple[Any, ...], ...] = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 6),
    (256, 128, 64, 8, 4),
    (64, 256, 64, 4, 5),
    (128, 256, 64, 8, 4, 2, "spread"),
    (256, 128, 64, 8, 4, 2, "spread"),
    (128, 128, 64, 8, 6, 2, "spread"),
    (128, 256, 64, 8, 4, 3, "spread"),
    (128, 256, 64, 8, 4, 4, "spread"),
)
_LARGE_GATED: tuple[tuple[Any, ...], ...] = (
    (128, 256, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 4),
    (64, 256, 64, 4, 5),
    (64, 256, 64, 8, 5),
    (128, 128, 64, 8, 6),
    (128, 128, 64, 4, 6),
)
_GROUPS = (2, 4, 16)
_TRIED_LARGE = 4

# One H200: multiplications of a processor in a clock, as far as power allows, and bytes that all
# of them read from L2.
_PROCESSORS = 132
_PRODUCTS = 1800
_L2_BYTES = 5120
_TILE_CLOCKS = 2000  # what the end of a tile costs beside its products
_EPILOGUE = 34 * 1024  # of shared memory


def decode_tiles(
    bucket: int, columns: int, depth: int, *, gated: bool, toy: bool = False
) -> list[Tile]:
    """The tile of the table, and others; with `toy`, some that the interpreter gets through."""
    if toy:
        return [
            Tile(16, 32, 16, 4, 2),
            Tile(16, 32, 16, 4, 2, 1, "copy"),
            Tile(16, 32, 16, 4, 2, 2, "spread"),
            *([Tile(16, 32, 16, 4, 2, joint=True)] if gated else []),
        ]
    tried = _GATED if gated else _WIDE if columns >= _MANY_COLUMNS else _PLAIN
    now = tile_for(columns, depth, bucket, torch.bfloat16, gated=gated)
    found = [now, *(Tile(*values) for values in tried[bucket])]
    if gated:
        found.append(now.joined())
        found += [dataclasses.replace(Tile(*values), joint=True) for values in _JOINT[bucket]]
    return list(dict.fromkeys(found))


def clocks(tile: Tile, columns: int, depth: int, rows: int) -> float:
    """An estimate: rounds of tiles, each bound by its products or by what all read from L2."""
    across = math.ceil(columns / tile.columns)
    programs = math.ceil(rows / tile.rows) * across * tile.parts
    rounds, active = math.ceil(programs / _PROCESSORS), min(programs, _PROCESSORS)
    long = depth / tile.parts
    products = tile.rows * tile.columns * long / _PRODUCTS
    read = 2 * (tile.rows + tile.columns) * long * active / _L2_BYTES
    sums = 4 * tile.rows * tile.columns * (1 + tile.parts) * active / _L2_BYTES
    sums = sums if tile.parts > 1 else 0
    return rounds * (max(products, read) + sums + _TILE_CLOCKS)


def large_tiles(columns: int, depth: int, rows: int, *, toy: bool = False) -> list[Tile]:
    """Tiles of the products of many rows: that of the table, and the best by estimate.

    The best of them with other groups of row tiles too, where there are enough rows.
    """
    if toy:
        return [Tile(16, 32, 32, 4, 2), Tile(16, 16, 32, 4, 2, group=2)]
    fitting = [_fitted(Tile(*values)) for values in _LARGE]
    usable = [tile for tile in fitting if depth % (tile.parts * tile.depth) == 0]
    best = sorted(usable, key=lambda t: clocks(t, columns, depth, rows))
    found = best[:_TRIED_LARGE]
    if rows >= 1024:
        plain = next(tile for tile in best if tile.parts == 1)
        found += [dataclasses.replace(plain, group=group) for group in (4, 16)]
    now = large_tile(columns, depth, rows, torch.bfloat16)
    return found if now is None or now in found else [now, *found]


def gated_tiles(columns: int, depth: int, rows: int, *, toy: bool = False) -> list[Tile]:
    """Tiles of a product of many rows that activates inside: that of the table, and others.

    The first of them with every group of row tiles that makes a difference.
    """
    if toy:
        return [Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2, group=2)]
    found = [Tile(*values) for values in _LARGE_GATED]
    row_tiles = math.ceil(rows / found[0].rows)
    found += [
        dataclasses.replace(found[0], group=group)
        for group in _GROUPS
        if min(group, row_tiles) != min(found[0].group, row_tiles)
    ]
    now = large_tile(columns, depth, rows, torch.bfloat16, gated=True)
    return found if now is None else list(dict.fromkeys([now, *found]))


def _fitted(tile: Tile) -> Tile:
    """With as many stages as shared memory holds beside what the end of a tile needs."""
    room = SHARED_BYTES - (0 if tile.mode else _EPILOGUE)
    one = shared_bytes(dataclasses.replace(tile, stages=1), torch.bfloat16)
    return dataclasses.replace(tile, stages=min(tile.stages, room // one))
