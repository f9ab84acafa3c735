"""What the attention benchmark computes: cases at Qwen3-8B's shapes and variants of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from dflash_serve.kernels.gpu.attention import DecodeTiles, Sharing, share
from dflash_serve.kernels.gpu.attention_splits import split_count
from dflash_serve.kernels.gpu.prefill import PrefillTiles

__all__ = [
    "CASES",
    "FEW",
    "HEADS",
    "HEAD_DIM",
    "KV_HEADS",
    "PAGE",
    "TOY",
    "Case",
    "Variant",
    "variants",
]

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` requests of `rows` query rows whose last row sees `context` keys.

    Their page tables have room for `room` keys, if that is more.
    """

    batch: int
    context: int
    rows: int
    room: int = 0

    @property
    def table_width(self) -> int:
        """Pages of a request that a table has room for."""
        return -(-max(self.context, self.room) // PAGE)

    @property
    def packed(self) -> int:
        """Rows that share a key head."""
        return self.rows * HEADS // KV_HEADS


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a case is computed; without `sharing` as the shapes ask for."""

    tiles: DecodeTiles | PrefillTiles
    sharing: Sharing | None = None

    @property
    def name(self) -> str:
        """Short text for the table."""
        t, of = self.tiles, self.sharing
        name = f"{t.row_tile} {t.sums} w{t.warps} s{t.stages}"
        if isinstance(t, PrefillTiles):
            return f"{name} k{t.key_tile}"
        name += f" r{t.registers}" if t.registers else ""
        name += f" v{t.value_tile}" if t.value_tile != HEAD_DIM else ""
        if of is not None:
            name += f" {of.mode}" + f" p{of.programs}" * (of.mode == "split")
            name += f" short/{of.short_slices}" if of.short_keys else ""
        merge = (t.merge_rows, t.merge_warps)
        changed = merge != (LANES_64.merge_rows, LANES_64.merge_warps)
        return name + (f" merge {merge[0]}w{merge[1]}" if changed else "")


Section = Literal["decisive", "more", "sizes", "prefill"]
# Rooms of one page more keep the width of a table from being a multiple of 16, which would be
# other kernels to compile.
CASES: dict[Section, list[Case]] = {
    "decisive": [
        Case(128, 1025, 1),
        Case(128, 1028, 4),
        Case(8, 1040, 16),
        Case(32, 1025, 1),
        Case(8, 1025, 1),
        Case(128, 1040, 16),
        Case(8, 32768, 1, 32832),
        Case(8, 32768, 16, 32832),
        Case(128, 1027, 3),
        Case(1, 1025, 1),
        Case(1, 1040, 16),
        Case(32, 1040, 16),
    ],
    "more": [
        Case(12, 1040, 16),
        Case(16, 1040, 16),
        Case(4, 1040, 16),
        Case(8, 2064, 16),
        Case(16, 1025, 1),
        Case(64, 1025, 1),
        Case(128, 1032, 8),
        Case(16, 16384, 16),
    ],
    "sizes": [
        Case(8, 32768, 16),
        Case(1, 32768, 16),
        Case(1, 8208, 16),
        Case(1, 1040, 16),
        Case(4, 2064, 16),
        Case(4, 8208, 16),
        Case(1, 4112, 16),
        Case(8, 8208, 16),
        Case(8, 32768, 1),
    ],
    "prefill": [Case(8, 1024, 1024), Case(1, 8192, 8192)],
}
TOY: dict[Section, list[Case]] = {
    "decisive": [Case(1, 130, 2), Case(2, 64, 1, 300)],
    "sizes": [Case(1, 150, 2)],
    "prefill": [Case(2, 40, 40)],
}

LANES_64 = DecodeTiles(64, 64, 128)
PRODUCTS_64 = dataclasses.replace(LANES_64, sums="products")
# 168 registers leave room for three programs of four warps on a processor, 128 for four.
FEW = DecodeTiles(16, 64, 128, 4, 3, sums="products", registers=168, residents=3)
DEEP = dataclasses.replace(FEW, stages=4, residents=2)
DEEPEST = dataclasses.replace(FEW, stages=5, registers=None, residents=1)
SHALLOW = dataclasses.replace(FEW, stages=2, registers=128, residents=4)
TWO_WARPS = dataclasses.replace(FEW, warps=2, registers=None)
ONE_WARP = dataclasses.replace(FEW, warps=1, registers=None)
ONE_WARP_LANES = dataclasses.replace(ONE_WARP, sums="lanes")
HALF = dataclasses.replace(FEW, row_tile=32, registers=None, residents=2)
_PREFILL_TILES = [
    PrefillTiles(128, 64, 128, 8, 3),
    PrefillTiles(128, 64, 128, 8, 3, "products"),
    PrefillTiles(128, 128, 128, 8, 3),
]


def variants(case: Case) -> Iterator[Variant]:
    """The sweep of one case, today's first."""
    if case.rows > 32:
        yield from (Variant(tiles) for tiles in _PREFILL_TILES)
        return
    splits = split_count(case.table_width * PAGE)
    for tiles in _tiles(case):
        yield Variant(tiles, share(case.batch * KV_HEADS, splits, tiles))
    if case.packed <= 16:
        yield from _few_shared(case, splits)
    elif case.batch in (4, 8, 12, 16) and case.context < 4096:
        yield from _blocks_shared(splits)


def _tiles(case: Case) -> Iterator[DecodeTiles]:
    yield from (LANES_64, PRODUCTS_64)
    if case.packed <= 16:
        yield from (FEW, TWO_WARPS)
        if case.batch * case.context > 16384:
            yield from (DEEP, SHALLOW)
        if case == CASES["decisive"][0]:
            yield from (DEEPEST, ONE_WARP, ONE_WARP_LANES)
    elif case.packed <= 32:
        yield HALF


def _few_shared(case: Case, splits: int) -> Iterator[Variant]:
    """Other ways to share than the default, for tiles of few rows."""
    pairs = case.batch * KV_HEADS
    if 64 <= pairs <= 256 and case.context < 4096:
        yield Variant(FEW, Sharing("whole", 1))
        for programs in (2, 4):
            yield Variant(FEW, Sharing("split", min(splits, programs)))
        yield Variant(SHALLOW, Sharing("split", splits))


def _blocks_shared(splits: int) -> Iterator[Variant]:
    """Other ways to share than the default, for tiles of many rows."""
    whole, slices = Sharing("whole", 1), Sharing("split", min(splits, 4), 2048, 2)
    yield Variant(LANES_64, slices)
    for sharing in (whole, slices, Sharing("split", splits)):
        yield Variant(PRODUCTS_64, sharing)
    for rows, warps in ((2, 2), (8, 4)):
        merging = dataclasses.replace(PRODUCTS_64, merge_rows=rows, merge_warps=warps)
        yield Variant(merging, Sharing("split", min(splits, 4)))
