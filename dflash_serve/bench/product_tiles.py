"""Which tiles `bench.products` tries."""

from __future__ import annotations

from typing import Any

import torch

from dflash_serve.kernels.gpu.tiles import Tile, tile_for

__all__ = ["decode_tiles", "large_variants", "parted_tiles"]

# (rows, columns, depth, warps, stages) by row bucket, likely winners first.
_PLAIN = {
    16: (
        (16, 32, 256, 4, 4),
        (16, 32, 512, 4, 4),
        (16, 64, 128, 4, 4),
        (16, 64, 256, 4, 4),
        (16, 16, 512, 4, 4),
        (16, 32, 256, 4, 6),
        (16, 32, 128, 4, 6),
        (16, 64, 256, 8, 4),
        (16, 16, 256, 2, 6),
        (16, 32, 512, 8, 4),
        (16, 128, 128, 8, 4),
        (16, 128, 64, 4, 6),
    ),
    32: (
        (32, 32, 256, 4, 4),
        (32, 64, 128, 4, 4),
        (32, 32, 128, 4, 6),
        (32, 64, 256, 8, 4),
        (32, 128, 64, 4, 5),
    ),
    64: (
        (64, 32, 256, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 32, 128, 4, 5),
        (64, 64, 128, 4, 6),
        (64, 128, 64, 4, 5),
        (64, 128, 128, 8, 3),
    ),
    128: (
        (128, 32, 128, 4, 4),
        (128, 64, 64, 4, 6),
        (128, 64, 128, 8, 4),
        (128, 128, 64, 8, 5),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 5),
    ),
}
_GATED = {
    16: (
        (16, 32, 128, 4, 4),
        (16, 32, 256, 4, 4),
        (16, 16, 256, 4, 4),
        (16, 32, 128, 4, 6),
        (16, 64, 128, 4, 4),
        (16, 64, 128, 8, 4),
        (16, 32, 256, 8, 4),
        (16, 16, 512, 4, 4),
        (16, 64, 64, 4, 6),
        (16, 16, 128, 4, 6),
    ),
    32: (
        (32, 32, 128, 4, 4),
        (32, 32, 128, 4, 6),
        (32, 64, 128, 8, 4),
        (32, 16, 256, 4, 4),
    ),
    64: (
        (64, 32, 128, 4, 4),
        (64, 64, 64, 4, 5),
        (64, 32, 64, 4, 6),
        (64, 64, 128, 8, 4),
        (64, 64, 64, 8, 5),
    ),
    128: (
        (128, 64, 64, 8, 5),
        (128, 32, 128, 8, 4),
        (128, 32, 64, 4, 6),
        (128, 128, 64, 8, 4),
        (64, 64, 64, 4, 5),
    ),
}
# The same with parts of K and a mode, for shapes with few columns; steps divide K / 8 of all.
_PARTED: dict[int, tuple[tuple[Any, ...], ...]] = {
    16: (
        (16, 32, 256, 8, 6),
        (16, 32, 128, 4, 8),
        (16, 16, 256, 4, 7),
        (16, 32, 128, 4, 6, 2),
        (16, 32, 128, 4, 6, 4),
        (16, 32, 256, 4, 4, 2),
        (16, 32, 256, 4, 4, 4),
        (16, 32, 256, 4, 6, 4),
        (16, 32, 128, 4, 6, 8),
        (16, 32, 128, 4, 6, 1, "copy"),
        (16, 32, 256, 4, 5, 1, "copy"),
        (16, 32, 256, 4, 7, 1, "copy"),
        (16, 64, 128, 4, 6, 1, "copy"),
        (16, 32, 256, 4, 7, 4, "copy"),
        (16, 64, 128, 4, 6, 4, "copy"),
        (16, 64, 256, 4, 4, 2, "spread"),
        (16, 32, 256, 4, 5, 2, "spread"),
        (16, 32, 256, 4, 5, 4, "spread"),
        (16, 64, 128, 4, 6, 4, "spread"),
        (16, 128, 64, 4, 6, 4, "spread"),
        (16, 64, 128, 4, 5, 8, "spread"),
    ),
    32: (
        (32, 32, 128, 4, 6),
        (32, 32, 256, 4, 5, 1, "copy"),
        (32, 32, 256, 4, 4, 2),
        (32, 32, 256, 4, 4, 4),
        (32, 32, 128, 4, 6, 8),
        (32, 32, 256, 4, 5, 4, "copy"),
        (32, 64, 128, 4, 5, 2, "spread"),
        (32, 64, 128, 4, 5, 4, "spread"),
        (32, 64, 128, 4, 5, 8, "spread"),
    ),
    64: (
        (64, 32, 256, 4, 4, 2),
        (64, 32, 256, 4, 4, 4),
        (64, 32, 128, 4, 6, 1, "copy"),
        (64, 32, 256, 4, 4, 1, "copy"),
        (64, 64, 128, 4, 5, 1, "copy"),
        (64, 64, 128, 4, 5, 2, "spread"),
        (64, 64, 128, 4, 4, 4, "spread"),
        (64, 128, 64, 4, 5, 2, "spread"),
        (64, 128, 64, 4, 5, 4, "spread"),
        (64, 128, 128, 8, 4, 4, "spread"),
        (64, 128, 64, 4, 5, 8, "spread"),
    ),
    128: (
        (64, 64, 64, 4, 8),
        (64, 64, 256, 4, 3),
        (128, 128, 128, 8, 3),
        (128, 64, 64, 4, 6, 1, "copy"),
        (128, 64, 128, 8, 4, 1, "copy"),
        (128, 128, 64, 8, 6, 1, "copy"),
        (64, 64, 128, 4, 4, 1, "copy"),
        (128, 64, 64, 4, 6, 2, "spread"),
        (128, 64, 128, 4, 4, 2, "spread"),
        (128, 128, 64, 8, 5, 2, "spread"),
        (128, 128, 64, 8, 3, 2, "spread"),
        (128, 128, 64, 8, 5, 4, "spread"),
        (128, 128, 64, 8, 3, 4, "spread"),
        (128, 64, 64, 4, 4, 4, "spread"),
        (128, 64, 128, 4, 4, 4, "spread"),
        (128, 256, 64, 8, 4, 4, "spread"),
        (128, 128, 64, 8, 3, 8, "spread"),
        (128, 256, 64, 8, 4, 8, "spread"),
    ),
}
_MANY_COLUMNS = 65536
# With so many there are enough tiles without parts.
_WIDE: dict[int, tuple[tuple[Any, ...], ...]] = {
    16: (
        (16, 64, 128, 4, 6, 1, "copy"),
        (16, 128, 128, 4, 4, 1, "copy"),
        (16, 64, 256, 4, 4, 1, "copy"),
    ),
    32: ((32, 64, 128, 4, 6, 1, "copy"), (32, 128, 64, 4, 5)),
    64: ((64, 128, 64, 4, 6, 1, "copy"), (64, 128, 128, 4, 4, 1, "copy")),
    128: (
        (128, 128, 128, 8, 3),
        (128, 128, 64, 8, 6, 1, "copy"),
        (128, 128, 64, 8, 3, 1, "copy"),
        (128, 256, 64, 8, 4, 1, "copy"),
    ),
}
_PARTED_GATED: dict[int, tuple[tuple[Any, ...], ...]] = {
    16: (
        (16, 32, 128, 4, 3),
        (16, 32, 128, 4, 5),
        (16, 16, 256, 4, 3),
        (16, 32, 128, 4, 4, 2),
        (16, 32, 128, 4, 4, 1, "copy"),
        (16, 32, 128, 4, 5, 1, "copy"),
        (16, 64, 128, 4, 4, 1, "copy"),
        (16, 32, 256, 4, 4, 1, "copy"),
        (16, 64, 128, 4, 4, 2, "spread"),
        (16, 64, 128, 4, 4, 4, "spread"),
    ),
    32: (
        (32, 32, 128, 4, 5, 1, "copy"),
        (32, 32, 64, 4, 6),
        (32, 64, 64, 4, 5, 2, "spread"),
        (32, 64, 128, 4, 4, 4, "spread"),
    ),
    64: (
        (64, 32, 128, 4, 4, 1, "copy"),
        (64, 64, 64, 4, 5, 1, "copy"),
        (64, 64, 64, 8, 5, 2, "spread"),
        (64, 64, 128, 8, 3, 4, "spread"),
    ),
    128: (
        (128, 128, 64, 8, 4, 1, "copy"),
        (128, 64, 64, 8, 3, 1, "copy"),
        (128, 64, 64, 8, 4, 1, "copy"),
        (128, 64, 64, 8, 5, 1),
        (128, 128, 64, 8, 4, 2, "spread"),
        (128, 64, 64, 8, 3, 2, "spread"),
        (128, 128, 64, 8, 4, 4, "spread"),
    ),
}
_LARGE = (
    ((128, 256, 64, 8, 3), True, True),
    ((128, 256, 64, 8, 4), True, True),
    ((128, 128, 64, 4, 3), True, False),
    ((128, 128, 64, 8, 5), True, True),
    ((256, 128, 64, 8, 4), True, True),
)
_LARGE_GATED = (
    ((128, 128, 64, 8, 4), True, True),
    ((128, 128, 64, 8, 3), False, True),
    ((128, 64, 64, 4, 3), True, False),
    ((256, 64, 64, 8, 4), True, True),
)


def decode_tiles(bucket: int, *, gated: bool, toy: bool = False) -> list[Tile]:
    """Tiles of the product of few rows; with `toy`, some that the interpreter gets through."""
    if toy:
        return [Tile(16, 32, 32, 4, 2), Tile(16, 16, 64, 4, 2)]
    return [Tile(*values) for values in (_GATED if gated else _PLAIN)[bucket]]


def parted_tiles(
    bucket: int, columns: int, depth: int, *, gated: bool, toy: bool = False
) -> list[Tile]:
    """The tile of the table, and others in up to 8 parts and with modes."""
    if toy:
        return [
            Tile(16, 32, 16, 4, 2),
            Tile(16, 32, 16, 4, 2, 2),
            Tile(16, 32, 16, 4, 2, 2, "spread"),
        ]
    tried = _PARTED_GATED if gated else _WIDE if columns >= _MANY_COLUMNS else _PARTED
    now = tile_for(columns, depth, bucket, torch.bfloat16, gated=gated)
    found = [Tile(*values) for values in tried[bucket]]
    return [now, *(tile for tile in found if tile != now)]


def large_variants(*, gated: bool, toy: bool = False) -> list[tuple[Tile, bool, bool]]:
    """Tiles of the product of many rows, with its `halves` and `persistent`."""
    if toy:
        return [(Tile(16, 32, 32, 4, 2), True, True), (Tile(16, 32, 32, 4, 2), False, False)]
    found = _LARGE_GATED if gated else _LARGE
    return [(Tile(*values), halves, persistent) for values, halves, persistent in found]
