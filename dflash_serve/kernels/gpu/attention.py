"""Attention of up to 32 query rows per request over its paged keys and values.

The R rows of a request and the G query heads that share a key head are packed into row tiles, so
that keys and values are read once. Keys are cut into splits at absolute positions; each split is
computed from scratch and the splits are merged in ascending order. The bits of a row therefore
depend on its own query, its position and its keys only: not on R, on the batch, on the lengths of
other requests, on the number of programs, nor on which of two modes runs:

    whole   one program per (request, key head, row tile) merges its splits in registers.
    split   several programs share the splits of one; a second kernel merges their results.

In split mode the first programs of a request with few keys may take it whole, each for a slice of
the value columns. Lengths are read on the device, since a captured step must fit any.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention_decode import decode, merge_parts
from dflash_serve.kernels.gpu.attention_splits import split_count
from dflash_serve.kernels.gpu.attention_tiles import Sums
from dflash_serve.kernels.gpu.launch import chained
from dflash_serve.kernels.gpu.prefill import prefill_attention

__all__ = [
    "FEW_ROWS",
    "DecodeTiles",
    "Mode",
    "Sharing",
    "attend",
    "decode_attention",
    "decode_tiles",
    "share",
]

FEW_ROWS = 32
"""More rows per request go to the kernel for prefill, whose row bits differ."""

_PROCESSORS = 132
"""Streaming multiprocessors of an H200. This and the numbers below decide which program computes
what, never a bit of a result."""

_WHOLE_PAIRS = 128
"""(request, key head, row tile)s from which whole mode runs: one program on each processor reads
nearly as fast as the memory allows."""

_SHORT_PAIRS, _SHORT_KEYS = 48, 2048
"""In split mode, from so many of them on a request of up to so many keys is taken whole: partial
results of 64 rows cost as much memory traffic as 256 keys. Those of 16 rows do not."""

_BOX_WIDTH = 128
"""Widest heads that the tensor memory accelerator reads."""

Mode = Literal["whole", "split"]


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Tile shapes and launch options of the decode kernels.

    Row bits depend on `key_tile` and `sums`, with 'lanes' on `row_tile` as well.

    Attributes:
        row_tile: packed rows of a program.
        key_tile: keys of an iteration; divides the smallest split.
        value_tile: value columns of a program; the scores are computed again for each.
        warps, stages: of the main kernel.
        merge_rows, merge_warps: packed rows and warps of a program that merges splits.
        sums: how the weights of a row are added: by a product with ones, in ascending order of
            keys, or over the lanes that hold them.
        registers: most of a thread of the main kernel.
        residents: programs of the main kernel that a processor has room for.
    """

    row_tile: int
    key_tile: int
    value_tile: int
    warps: int = 4
    stages: int = 3
    merge_rows: int = 4
    merge_warps: int = 4
    sums: Sums = "lanes"
    registers: int | None = None
    residents: int = 2


def decode_tiles(head_dim: int, dtype: torch.dtype, packed_rows: int) -> DecodeTiles:
    """Options for a head width and R · G packed rows.

    The heights of one width add weights by products, in one order, and so give the same bits: 16
    rows, which leave three programs room on a processor, for plain decoding and short blocks.
    """
    width = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no tensor cores, and everything takes twice the shared memory
        return DecodeTiles(32, 32 if width <= 256 else 16, min(width, 128), stages=1)
    if width > 256:
        return DecodeTiles(64, 32, 128, stages=2)
    if width > 128:
        return DecodeTiles(64, 64, 128, stages=2)
    if packed_rows > 64:
        return DecodeTiles(128, 64, width, warps=8, sums="products", residents=1)
    if packed_rows > 16:
        return DecodeTiles(64, 64, width, sums="products")
    return DecodeTiles(16, 64, width, sums="products", registers=168, residents=3)


def attend(query: Tensor, key_pages: Tensor, value_pages: Tensor, view: AttentionView) -> Tensor:
    """`kernels.attention.attend` without reading a length on the host; view.longest is unused.

    Rows that a ragged view assigns to no request come back undefined.
    """
    if view.row_starts is not None or view.rows > FEW_ROWS:
        return prefill_attention(query, key_pages, value_pages, view)
    return decode_attention(query, key_pages, value_pages, view)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Which programs compute what; no bit depends on it.

    Attributes:
        mode: see the module.
        programs: that share the splits of a (request, key head, row tile); 1 in whole mode.
        short_keys: in split mode, requests of up to so many keys are taken whole.
        short_slices: by so many of the programs, each for a slice of the value columns.
    """

    mode: Mode
    programs: int
    short_keys: int = 0
    short_slices: int = 1


def share(pairs: int, splits: int, tiles: DecodeTiles) -> Sharing:
    """How programs share `pairs` (request, key head, row tile)s of up to `splits` splits."""
    if pairs >= _WHOLE_PAIRS:
        return Sharing("whole", 1)
    programs = min(splits, max(1, _PROCESSORS * tiles.residents // pairs))
    if pairs < _SHORT_PAIRS or tiles.row_tile < 64:
        return Sharing("split", programs)
    halves = programs > 1 and 2 * pairs <= _PROCESSORS and tiles.value_tile >= 64
    return Sharing("split", programs, _SHORT_KEYS, 2 if halves else 1)


def decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    *,
    tiles: DecodeTiles | None = None,
    sharing: Sharing | None = None,
) -> Tensor:
    """[B, R, heads, head_dim] queries → the same shape. Row-invariant for any B, R and lengths.

    Args:
        query: [B, R, heads, head_dim], dense.
        key_pages, value_pages: [num_pages, page_size, kv_heads, head_dim] of one layout, dense
            within a slot.
        tiles: options other than the table's.
        sharing: other than the shapes ask for.
    """
    batch, rows, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    group = heads // kv_heads
    assert key_pages.stride() == value_pages.stride()
    tiles = tiles or decode_tiles(head_dim, query.dtype, rows * group)
    wide = kv_heads * triton.cdiv(rows * group, tiles.row_tile)
    wide *= triton.cdiv(head_dim, tiles.value_tile)
    splits = split_count(view.page_table.shape[1] * view.page_size)
    sharing = sharing or share(batch * wide, splits, tiles)
    return _launch(wide, query.contiguous(), key_pages, value_pages, view, tiles, sharing, splits)


def _launch(
    wide: int,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    view: AttentionView,
    tiles: DecodeTiles,
    sharing: Sharing,
    splits: int,
) -> Tensor:
    """Run the kernels; a request has at most `splits` splits and `wide` shares of each."""
    batch, rows, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    group, capacity = heads // kv_heads, view.page_table.shape[1] * view.page_size
    out = torch.empty_like(query)
    scratch = (out, out, out)
    split = sharing.mode == "split"
    if split:
        scratch = _scratch(query, batch * kv_heads * splits, rows * group)
    constants = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": view.window or 0,
        "SCALE": math.log2(math.e) * head_dim**-0.5,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "KEY_TILE": tiles.key_tile,
        "SHORT_KEYS": sharing.short_keys,
    }
    decode[(wide, query.shape[0], sharing.programs)](
        query,
        key_pages,
        value_pages,
        *_boxes(key_pages, value_pages, tiles, sharing.short_slices),
        view.page_table,
        view.start,
        out,
        *scratch,
        rows,
        splits,
        capacity,
        view.page_table.stride(0),
        *key_pages.stride()[:3],
        **constants,
        PAGE=view.page_size,
        CAUSAL=view.causal,
        WHOLE=not split,
        SHORT_SLICES=sharing.short_slices,
        ROW_TILE=tiles.row_tile,
        VALUE_TILE=tiles.value_tile,
        SLICES=triton.cdiv(head_dim, tiles.value_tile),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        SUMS=tiles.sums,
        EVICTION="evict_first",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        **chained(query),
    )
    if split:
        merge_parts[(triton.cdiv(rows * group, tiles.merge_rows), kv_heads, batch)](
            *scratch,
            view.start,
            out,
            rows,
            splits,
            capacity,
            **constants,
            ROWS=tiles.merge_rows,
            num_warps=tiles.merge_warps,
            **chained(query),
        )
    return out


def _boxes(
    key_pages: Tensor, value_pages: Tensor, tiles: DecodeTiles, slices: int
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of the pages as [slots, kv_heads · head_dim], with boxes of a tile, or Nones.

    Boxes of keys, of values and of a slice of those. There are none where a tile is not a
    contiguous piece of one page, as wide as a box may be.
    """
    pages, page_size, kv_heads, head_dim = key_pages.shape
    page_stride, slot_stride, head_stride, _ = key_pages.stride()
    dense = page_stride == page_size * slot_stride and head_stride == head_dim
    aligned = all(
        pool.data_ptr() % 16 == 0 and slot_stride * pool.element_size() % 16 == 0
        for pool in (key_pages, value_pages)
    )
    width = triton.next_power_of_2(head_dim)
    fits = page_size % tiles.key_tile == 0 and head_dim == width <= _BOX_WIDTH
    if not (dense and aligned and fits):
        return None, None, None
    shape, strides = [pages * page_size, kv_heads * head_dim], [slot_stride, 1]
    key_box, value_box, short_box = (
        TensorDescriptor(pool, shape, strides, [tiles.key_tile, columns])
        for pool, columns in (
            (key_pages, head_dim),
            (value_pages, tiles.value_tile),
            (value_pages, tiles.value_tile // slices),
        )
    )
    return key_box, value_box, short_box


def _scratch(query: Tensor, splits: int, packed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per split: maxima and sums [splits, packed rows], weighted values [.., head_dim]."""
    shape = (splits, packed)
    return (
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty((*shape, query.shape[-1]), dtype=torch.float32, device=query.device),
    )
