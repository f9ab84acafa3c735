"""Attention of up to 32 query rows per request over its paged keys and values.

The R rows of a request and the G query heads that share a key head are packed into row tiles, so
that keys and values are read once. Keys are cut into splits at absolute positions; each split is
computed from scratch and the splits are merged in ascending order. The bits of a row therefore
depend on its own query, its position and its keys only: not on R, on the batch, on the lengths of
other requests, on the number of programs, nor on which of two modes runs:

    whole   one program per (request, key head, row tile) merges its splits in registers.
    split   several programs share the splits of one; a second kernel merges their results, or the
            program that finishes last does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import torch
import triton
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention_decode import decode, merge_parts
from dflash_serve.kernels.gpu.attention_splits import split_count
from dflash_serve.kernels.gpu.prefill import prefill_attention

__all__ = [
    "FEW_ROWS",
    "PREFETCH_BYTES",
    "PREFETCH_PROGRAMS",
    "DecodeTiles",
    "Merge",
    "Mode",
    "attend",
    "decode_attention",
    "decode_tiles",
]

FEW_ROWS = 32
"""More rows per request go to the kernel for prefill, whose row bits differ."""

_PROCESSORS = 132
"""Streaming multiprocessors of an H200; only which mode runs and how many programs share a
request's splits depend on it."""

_WAVES = 4
"""Programs that share splits, in programs per processor over the whole call."""

PREFETCH_BYTES = 16 << 20
"""How much of a later product's weight is brought into the L2 cache, of 60 MB."""

PREFETCH_PROGRAMS = 64
"""Programs that ask for it, at least."""

_LINE_BYTES = 128
_COUNTERS = 1 << 16

_MERGE_ROWS = 4
"""Packed rows of a program that merges splits: few, so that many programs share the reading."""

Mode = Literal["whole", "split"]
Merge = Literal["launch", "last"]

MERGE: Merge = "launch"
"""Who merges splits: a second kernel, or the last program to finish."""

ROW_TILES: Literal["fixed", "fitted"] = "fixed"
"""Whether few packed rows get a smaller tile: `fitted` sums weights through the tensor cores for
all row tiles, since only then are the bits of a row the same in each."""


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Tile shapes and launch options of the decode kernels; row bits depend on `key_tile`,
    `fine`, `coarse` and `sum_by_dot`.

    Attributes:
        row_tile: packed rows of a program, 16, 32, 64 or 128.
        key_tile: keys of an iteration; divides the smallest split.
        value_tile: value columns of a program; the scores are computed again for each.
        warps, stages: of the main kernel.
        sum_by_dot: sum a row's weights through the tensor cores, so that the order of summation
            cannot depend on the layout of a tile.
        evict_first: whether keys and values leave the L2 cache before other data.
        fine, coarse: keys of the first splits and of the last, see `attention_splits`.
        one_loop: in whole mode, masks everywhere for one pipeline over all keys.
    """

    row_tile: int
    key_tile: int
    value_tile: int
    warps: int = 4
    stages: int = 3
    sum_by_dot: bool = False
    evict_first: bool = True
    fine: int = 128
    coarse: int = 1024
    one_loop: bool = False


def decode_tiles(head_dim: int, dtype: torch.dtype, packed_rows: int) -> DecodeTiles:
    """Options for a head width and R · G packed rows.

    The row tile is 64 or 128: within those, a warp holds the same 16 rows in the same layout.
    """
    width = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no tensor cores, and everything takes twice the shared memory
        return DecodeTiles(32, 32 if width <= 256 else 16, min(width, 128), stages=1)
    if width > 256:
        return DecodeTiles(64, 32, 128, stages=2)
    if width > 128:
        return DecodeTiles(64, 64, 128, stages=2)
    if ROW_TILES == "fitted":
        rows = next((rows for rows in (16, 32, 64) if packed_rows <= rows), 128)
        # Two stages leave room for a second program of 64 rows on a processor.
        stages = 2 if rows == 64 else 3
        return DecodeTiles(rows, 64, width, rows // 16, stages, sum_by_dot=True)
    if packed_rows > 64:
        return DecodeTiles(128, 64, width, warps=8)
    return DecodeTiles(64, 64, width)


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    prefetch: Tensor | None = None,
) -> Tensor:
    """`kernels.attention.attend` without reading a length on the host; view.longest is unused.

    Rows that a ragged view assigns to no request come back undefined.
    """
    if view.row_starts is not None or view.rows > FEW_ROWS:
        return prefill_attention(query, key_pages, value_pages, view)
    return decode_attention(query, key_pages, value_pages, view, prefetch=prefetch)


def decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    *,
    prefetch: Tensor | None = None,
    tiles: DecodeTiles | None = None,
    mode: Mode | None = None,
    programs: int | None = None,
    merge: Merge | None = None,
    prefetch_bytes: int = PREFETCH_BYTES,
    prefetch_programs: int = PREFETCH_PROGRAMS,
) -> Tensor:
    """[B, R, heads, head_dim] queries → the same shape. Row-invariant for any B, R and lengths.

    Args:
        query: [B, R, heads, head_dim], dense.
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim] of one layout, dense
            within a slot.
        prefetch: [N, K], contiguous: the weight of the product that follows, which in split mode
            is brought into the L2 cache by further programs; changes nothing but time.
        tiles: options other than the table's.
        mode: 'whole' or 'split' instead of what the shapes ask for.
        programs: programs that share the splits of a request and key head in split mode.
        merge: who merges splits, instead of `MERGE`.
        prefetch_bytes, prefetch_programs: how much of it at most, and by at least how many.
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    assert key_pages.stride() == value_pages.stride()
    tiles = tiles or decode_tiles(head_dim, query.dtype, rows * group)
    mode = mode or ("whole" if batch * kv_heads >= _PROCESSORS else "split")
    row_tiles = triton.cdiv(rows * group, tiles.row_tile)
    wide = kv_heads * row_tiles * triton.cdiv(head_dim, tiles.value_tile)
    splits = split_count(view.page_table.shape[1] * view.page_size, tiles.fine, tiles.coarse)
    counters, ahead = None, _Ahead(query, 0, 1, 0, 1)
    if mode == "whole":
        programs = 1
    else:
        programs = min(splits, programs or max(1, _WAVES * _PROCESSORS // (batch * wide)))
        if (merge or MERGE) == "last":
            counters = _counters(query.device, batch * kv_heads * row_tiles)
        if prefetch is not None:
            planes = triton.cdiv(prefetch_programs, batch * wide)
            ahead = _ahead(prefetch, prefetch_bytes, planes)
    grid = (wide, batch, programs + ahead.planes)
    return _launch(
        grid, query.contiguous(), key_pages, value_pages, view, tiles, mode, splits, counters, ahead
    )


def _launch(
    grid: tuple[int, int, int],
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    tiles: DecodeTiles,
    mode: Mode,
    splits: int,
    counters: Tensor | None,
    ahead: _Ahead,
) -> Tensor:
    """Run the kernels; with `counters` the last program of the first merges its splits."""
    batch, rows, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    group, capacity = heads // kv_heads, view.page_table.shape[1] * view.page_size
    out = torch.empty_like(query)
    scratch = (out, out, out)
    if mode == "split":
        scratch = _scratch(query, batch * kv_heads * splits, rows * group)
    constants = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": view.window or 0,
        "SCALE": math.log2(math.e) * head_dim**-0.5,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "FINE": tiles.fine,
        "COARSE": tiles.coarse,
    }
    decode[grid](
        query,
        key_pages,
        value_pages,
        view.page_table,
        view.start,
        out,
        *scratch,
        view.start if counters is None else counters,
        ahead.weight,
        grid[2] - ahead.planes,
        rows,
        splits,
        capacity,
        view.page_table.stride(0),
        *key_pages.stride()[:3],
        ahead.lines,
        ahead.row_lines,
        ahead.depth,
        **constants,
        PAGE=view.page_size,
        CAUSAL=view.causal,
        WHOLE=mode == "whole",
        LAST=counters is not None,
        ROW_TILE=tiles.row_tile,
        KEY_TILE=tiles.key_tile,
        VALUE_TILE=tiles.value_tile,
        SLICES=triton.cdiv(head_dim, tiles.value_tile),
        SUM_BY_DOT=tiles.sum_by_dot,
        MERGE_TILE=min(tiles.row_tile, 32),
        ONE_LOOP=tiles.one_loop and mode == "whole",
        # The interpreter knows no assembly, and has no cache to fill.
        AHEAD=32 * tiles.warps if ahead.planes and query.is_cuda else 0,
        LINE=_LINE_BYTES // ahead.weight.element_size(),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        EVICTION="evict_first" if tiles.evict_first else "",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if mode == "split" and counters is None:
        merge_parts[(triton.cdiv(rows * group, _MERGE_ROWS), kv_heads, batch)](
            *scratch,
            view.start,
            out,
            rows,
            splits,
            capacity,
            **constants,
            ROWS=_MERGE_ROWS,
            num_warps=4,
        )
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class _Ahead:
    """What to prefetch: the first `row_lines` cache lines of each row, `lines` in all.

    Attributes:
        depth: elements of a row.
        planes: grid planes after those of attention.
    """

    weight: Tensor
    lines: int
    row_lines: int
    planes: int
    depth: int


def _ahead(weight: Tensor, limit: int, planes: int) -> _Ahead:
    """`limit` bytes: the leading part of every row, since a product begins with those."""
    assert weight.is_contiguous()
    rows, depth = weight.shape
    line = _LINE_BYTES // weight.element_size()
    row_lines = min(depth // line, limit // (_LINE_BYTES * rows))
    return _Ahead(weight, rows * row_lines, max(row_lines, 1), planes if row_lines else 0, depth)


def _counters(device: torch.device, needed: int) -> Tensor:
    """Zeros that every launch leaves zero. Calls on one device must therefore not overlap."""
    if needed > _COUNTERS:
        raise ConfigError(
            f"merge 'last' with {needed} row tiles; it has {_COUNTERS} counters: use merge "
            "'launch' or a smaller batch"
        )
    return _zeros(device)


@functools.cache
def _zeros(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "merge 'last' is captured before its first call; run the step once, then capture it"
        )
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def _scratch(query: Tensor, parts: int, packed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per split: maxima and sums [parts, packed rows], weighted values [.., head_dim]."""
    shape = (parts, packed)
    return (
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty((*shape, query.shape[-1]), dtype=torch.float32, device=query.device),
    )
