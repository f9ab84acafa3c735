"""What all attention kernels share: rows in and out, and the state of a row over key tiles.

Everything whose rounding could depend on the compiler is spelled out: each multiply-add is an
explicit `fma`, and no other product feeds a sum. Two kernels that call these functions with the
same tile shapes therefore compute the same bits.

A tile of rows is packed from R tokens and the G query heads that share a key head: row m is token
m // G, head m % G of the group. K columns of scores are K keys.
"""

from __future__ import annotations

from typing import Any, Literal

import triton
import triton.language as tl

from dflash_serve.kernels.gpu.attention_splits import ends_split, finite, fresh, merge

__all__ = ["Sums", "attend_keys", "load_query", "row_positions", "row_tokens", "store_rows"]

Sums = Literal["products", "lanes"]

_SUM_COLUMNS = tl.constexpr(8)
"""Columns of ones that sum weights: the fewest that a product has."""

_QUIET = tl.constexpr(1e30)
"""Maximum of rows that nobody asked for: their weights become 0, and zeros take less power."""


@triton.jit  # type: ignore[untyped-decorator]
def row_tokens(tile: tl.tensor, GROUP: tl.constexpr, ROW_TILE: tl.constexpr) -> Any:
    """Tokens [ROW_TILE] and heads of the group [ROW_TILE] of a tile's packed rows."""
    packed = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    return packed // GROUP, packed % GROUP


@triton.jit  # type: ignore[untyped-decorator]
def load_query(
    query: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> Any:
    """[ROW_TILE, BLOCK_D] queries, zero past `rows` tokens; `query` [rows, HEADS, HEAD_DIM]."""
    column = tl.arange(0, BLOCK_D)
    offset = (tokens.to(tl.int64) * HEADS + heads) * HEAD_DIM
    inside = (tokens < rows)[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(query + offset[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(
    out: tl.tensor,
    acc: tl.tensor,
    row_sum: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    first_column: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
) -> None:
    """Normalise and store columns first_column… of the rows; `out` [rows, HEADS, HEAD_DIM]."""
    column = first_column + tl.arange(0, VALUE_TILE)
    offset = (tokens.to(tl.int64) * HEADS + heads) * HEAD_DIM
    inside = (tokens < rows)[:, None] & (column < HEAD_DIM)[None, :]
    row_sum = tl.where(tokens < rows, row_sum, 1.0)
    value = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] + column[None, :], value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def row_positions(start: tl.tensor, tokens: tl.tensor, rows: tl.tensor) -> Any:
    """[ROW_TILE] absolute positions; −1 past `rows` tokens."""
    return tl.where(tokens < rows, start + tokens, -1)


@triton.jit  # type: ignore[untyped-decorator]
def no_keys(position: tl.tensor) -> Any:
    """[ROW_TILE] maxima of rows that have seen no key; those at −1 never weigh one."""
    return tl.where(position < 0, _QUIET, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(
    score: tl.tensor,
    value: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
) -> Any:
    """Online softmax over the scores of one more tile of keys. SCALE holds log2(e), hence exp2.

    A sum over the lanes that hold a row depends on the layout, and so on the row tile. A product
    with ones adds the rounded weights in ascending order of keys, whatever the row tile.
    """
    peak = tl.maximum(row_max, tl.max(score, 1))
    base = finite(peak)
    old = tl.exp2((row_max - base) * SCALE)
    weight = tl.exp2(tl.fma(score, SCALE, -(base * SCALE)[:, None]))
    rounded = weight.to(value.dtype)
    if SUMS == "products":
        ones = tl.full((value.shape[0], _SUM_COLUMNS), 1.0, value.dtype)
        row_sum = tl.dot(rounded, ones, row_sum * old[:, None], input_precision=PRECISION)
    else:
        row_sum = tl.fma(row_sum, old, tl.sum(weight, 1))
    acc = tl.dot(rounded, value, acc * old[:, None], input_precision=PRECISION)
    return peak, row_sum, acc


@triton.jit  # type: ignore[untyped-decorator]
def _total(row_sum: tl.tensor, SUMS: tl.constexpr) -> Any:
    """[ROW_TILE] sums of weights from the state of `_add_tile`."""
    if SUMS == "products":
        row_sum = tl.max(row_sum, 1)  # all columns are equal
    return row_sum


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(
    pages: tl.tensor,
    offset: tl.tensor,
    column: tl.tensor,
    present: tl.tensor,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    EVICTION: tl.constexpr,
) -> Any:
    """[K, columns] keys or values at page offsets [K]; masks only where something is missing."""
    place = pages + offset[:, None] + column[None, :]
    if MASKED or PADDED:
        inside = (column < HEAD_DIM)[None, :]
        if MASKED and PADDED:
            inside = inside & present[:, None]
        elif MASKED:
            inside = present[:, None]
        tile = tl.load(place, mask=inside, other=0.0, eviction_policy=EVICTION)
    else:
        tile = tl.load(place, eviction_policy=EVICTION)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _load_page_ids(
    table: tl.tensor,
    first: tl.tensor,
    capacity: tl.tensor,
    KEY_TILE: tl.constexpr,
    PAGE: tl.constexpr,
) -> Any:
    """[KEY_TILE] page ids of the keys from `first` on; any id for keys past the table."""
    if PAGE % KEY_TILE == 0:
        keys = tl.minimum(first, capacity - 1)
    else:
        keys = tl.minimum(first + tl.arange(0, KEY_TILE), capacity - 1)
    return tl.load(table + keys // PAGE)


@triton.jit  # type: ignore[untyped-decorator]
def _scan(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    page: tl.tensor,
    capacity: tl.tensor,
    present_stop: tl.tensor,
    position: tl.tensor,
    first_column: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    merged_max: tl.tensor,
    merged_sum: tl.tensor,
    merged_acc: tl.tensor,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    EVICTION: tl.constexpr,
    key_box: tl.tensor,
    value_box: tl.tensor,
    box_column: tl.tensor,
) -> Any:
    """Take the key tiles that begin in first…stop−1 into the state of a row tile.

    Page ids are read an iteration ahead: were they read in the iteration that needs them, the
    compiler would spend half of its pipeline stages on them.
    """
    column = tl.arange(0, BLOCK_D)
    value_column = first_column + tl.arange(0, VALUE_TILE)
    for begin in tl.range(first, stop, KEY_TILE):
        keys = begin + tl.arange(0, KEY_TILE)
        present = keys < present_stop
        here = page
        page = _load_page_ids(table, begin + KEY_TILE, capacity, KEY_TILE, PAGE)
        if key_box is not None and not MASKED:
            box_row = (here * PAGE + begin % PAGE).to(tl.int32)
            key = key_box.load([box_row, box_column])
            value = value_box.load([box_row, box_column + first_column])
        else:
            offset = here * page_stride + (keys % PAGE) * slot_stride
            key = _load_tile(
                key_pages, offset, column, present, HEAD_DIM, MASKED,
                BLOCK_D != HEAD_DIM, EVICTION,
            )  # fmt: skip
            value = _load_tile(
                value_pages, offset, value_column, present, HEAD_DIM, MASKED,
                HEAD_DIM % VALUE_TILE != 0, EVICTION,
            )  # fmt: skip
        visible = present[None, :]
        if MASKED and CAUSAL:
            visible = visible & (keys[None, :] <= position[:, None])
        if MASKED and WINDOW > 0:
            visible = visible & (position[:, None] - keys[None, :] < WINDOW)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            score = tl.where(visible, score, float("-inf"))
        # A split ends before this tile. The state is taken here, after the product that waits for
        # all products before it: taken at the end of an iteration, the compiler could not leave
        # the last product running and would wait after each step of every product. A maximum of
        # −inf alone begins anew: it scales what was summed by 0.
        # Nested conditions, since the outer ones are of compile time.
        if SPLITS == "merge":  # noqa: SIM102
            if ends_split(begin):
                merged_max, merged_sum, merged_acc = merge(
                    merged_max, merged_sum, merged_acc, row_max, _total(row_sum, SUMS), acc, SCALE
                )
                row_max = no_keys(position)
        row_max, row_sum, acc = _add_tile(
            score, value, row_max, row_sum, acc, SCALE, PRECISION, SUMS
        )
    return row_max, row_sum, acc, merged_max, merged_sum, merged_acc, page


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    clear_first: tl.tensor,
    clear_stop: tl.tensor,
    present_stop: tl.tensor,
    capacity: tl.tensor,
    position: tl.tensor,
    first_column: tl.tensor,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    EVICTION: tl.constexpr,
    key_box: tl.tensor = None,
    value_box: tl.tensor = None,
    box_column: tl.tensor = 0,
) -> Any:
    """Softmax state of a row tile over the key tiles that begin in first…stop−1.

    Tiles in which every row sees every key are computed without masks; a mask that hides nothing
    changes no bit, nor does a tile that hides everything, so that only speed depends on the bounds.

    Args:
        query: [ROW_TILE, BLOCK_D].
        key_pages, value_pages: pages of this key head.
        table: page ids of the request.
        first: a multiple of KEY_TILE.
        clear_first, clear_stop: multiples of KEY_TILE, the bounds of the tiles without masks; only
            with a window may clear_first lie above first.
        present_stop: keys from here on do not exist; they are not read.
        capacity: keys that the page table has room for.
        position: [ROW_TILE] absolute positions of the rows, or −1: results of those mean nothing.
        first_column: first of the VALUE_TILE columns of the values to weigh.
        WINDOW: a row sees keys less than this far behind it; 0 for all.
        SUMS: how weights are added, 'products' or 'lanes'; see `_add_tile`.
        SPLITS: 'one' for keys of one split, 'merge' merges all of them.
        key_box, value_box: descriptors of the pages as [slots, kv_heads · HEAD_DIM] with boxes of
            a tile, which then lies within a page; tiles without masks are read through them.
        box_column: first column of this key head in them.

    Returns:
        Maximum, sum and weighted values of all keys.
    """
    page = _load_page_ids(table, first, capacity, KEY_TILE, PAGE)
    row_max = no_keys(position)
    _, row_sum, acc = fresh(position.shape[0], VALUE_TILE)
    if SUMS == "products":
        row_sum = tl.zeros((position.shape[0], _SUM_COLUMNS), tl.float32)
    merged_max, merged_sum, merged_acc = fresh(position.shape[0], VALUE_TILE)
    hot = tl.minimum(tl.maximum(clear_first, first), stop)
    tail = tl.maximum(tl.minimum(clear_stop, stop // KEY_TILE * KEY_TILE), hot)
    if WINDOW > 0:
        row_max, row_sum, acc, merged_max, merged_sum, merged_acc, page = _scan(
            query, key_pages, value_pages, table, page_stride, slot_stride,
            first, hot, page, capacity, present_stop, position, first_column,
            row_max, row_sum, acc,
            merged_max, merged_sum, merged_acc,
            SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
            True, SPLITS, PRECISION, SUMS, EVICTION, key_box, value_box, box_column,
        )  # fmt: skip
    row_max, row_sum, acc, merged_max, merged_sum, merged_acc, page = _scan(
        query, key_pages, value_pages, table, page_stride, slot_stride,
        hot, tail, page, capacity, present_stop, position, first_column,
        row_max, row_sum, acc,
        merged_max, merged_sum, merged_acc,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        False, SPLITS, PRECISION, SUMS, EVICTION, key_box, value_box, box_column,
    )  # fmt: skip
    row_max, row_sum, acc, merged_max, merged_sum, merged_acc, page = _scan(
        query, key_pages, value_pages, table, page_stride, slot_stride,
        tail, stop, page, capacity, present_stop, position, first_column,
        row_max, row_sum, acc,
        merged_max, merged_sum, merged_acc,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        True, SPLITS, PRECISION, SUMS, EVICTION, key_box, value_box, box_column,
    )  # fmt: skip
    row_sum = _total(row_sum, SUMS)
    if SPLITS == "merge":
        row_max, row_sum, acc = merge(
            merged_max, merged_sum, merged_acc, row_max, row_sum, acc, SCALE
        )
    return row_max, row_sum, acc
