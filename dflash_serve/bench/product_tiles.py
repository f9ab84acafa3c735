"""Which tiles `bench.products` tries."""

from __future__ import annotations

from typing import Any

import torch

from dflash_serve.kernels.gpu.tiles import Tile, tile_for

__all__ = ["decode_tiles", "large_tiles"]

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
_LARGE = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 5),
    (256, 128, 64, 8, 4),
)


def decode_tiles(
    bucket: int, columns: int, depth: int, *, gated: bool, toy: bool = False
) -> list[Tile]:
    """The tile of the table, and others; with `toy`, some that the interpreter gets through."""
    if toy:
        return [
            Tile(16, 32, 16, 4, 2),
            Tile(16, 32, 16, 4, 2, 1, "copy"),
            Tile(16, 32, 16, 4, 2, 2, "spread"),
        ]
    tried = _GATED if gated else _WIDE if columns >= _MANY_COLUMNS else _PLAIN
    now = tile_for(columns, depth, bucket, torch.bfloat16, gated=gated)
    found = [Tile(*values) for values in tried[bucket]]
    return [now, *(tile for tile in found if tile != now)]


def large_tiles(*, toy: bool = False) -> list[Tile]:
    """Tiles of the product of many rows."""
    if toy:
        return [Tile(16, 32, 32, 4, 2), Tile(16, 16, 32, 4, 2)]
    return [Tile(*values) for values in _LARGE]
