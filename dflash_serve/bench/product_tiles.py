"""Which tiles `bench.products` tries."""

from __future__ import annotations

from dflash_serve.kernels.gpu.tiles import Tile

__all__ = ["decode_tiles", "large_variants"]

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


def large_variants(*, gated: bool, toy: bool = False) -> list[tuple[Tile, bool, bool]]:
    """Tiles of the product of many rows, with its `halves` and `persistent`."""
    if toy:
        return [(Tile(16, 32, 32, 4, 2), True, True), (Tile(16, 32, 32, 4, 2), False, False)]
    found = _LARGE_GATED if gated else _LARGE
    return [(Tile(*values), halves, persistent) for values, halves, persistent in found]
