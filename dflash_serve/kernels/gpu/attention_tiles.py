"""What all attention kernels share: key splits, one key tile, and the merge of splits.

Everything whose rounding could depend on the compiler is spelled out: each multiply-add is an
explicit `fma`, and no other product feeds a sum. Two kernels that call these functions with the
same tile shapes therefore compute the same bits.

A tile of rows is packed from R tokens and the G query heads that share a key head: row m is token
m // G, head m % G of the group. K columns of scores are K keys.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = [
    "SPLIT_TIERS",
    "attend_keys",
    "fresh",
    "load_query",
    "merge",
    "row_tokens",
    "split_count",
    "split_first",
    "split_index",
    "store_rows",
]

SPLIT_TIERS = ((2048, 256), (8192, 512))
"""(limit, size): splits of `size` keys below position `limit`; 1,024 keys past the last limit.

The partition depends on positions only. Sizes grow so that a long context does not drown in
partial results, and divide the limits so that no split straddles one.
"""

_LIMIT_0, _SIZE_0 = tl.constexpr(SPLIT_TIERS[0][0]), tl.constexpr(SPLIT_TIERS[0][1])
_LIMIT_1, _SIZE_1 = tl.constexpr(SPLIT_TIERS[1][0]), tl.constexpr(SPLIT_TIERS[1][1])
_SIZE_2 = tl.constexpr(1024)
_COUNT_0 = tl.constexpr(SPLIT_TIERS[0][0] // SPLIT_TIERS[0][1])
_COUNT_1 = tl.constexpr(
    SPLIT_TIERS[0][0] // SPLIT_TIERS[0][1]
    + (SPLIT_TIERS[1][0] - SPLIT_TIERS[0][0]) // SPLIT_TIERS[1][1]
)


def split_count(length: int) -> int:
    """Splits that hold at least one of the keys 0…length−1."""
    first, count = 0, 0
    for limit, size in (*SPLIT_TIERS, (max(length, 1), 1024)):
        count += max(0, -(-(min(length, limit) - first) // size))
        first = limit
    return count


@triton.jit  # type: ignore[untyped-decorator]
def split_index(key: tl.tensor) -> Any:
    """Index of the split that holds the key at a position."""
    middle = _COUNT_0 + (key - _LIMIT_0) // _SIZE_1
    high = _COUNT_1 + (key - _LIMIT_1) // _SIZE_2
    return tl.where(key < _LIMIT_0, key // _SIZE_0, tl.where(key < _LIMIT_1, middle, high))


@triton.jit  # type: ignore[untyped-decorator]
def split_first(split: tl.tensor) -> Any:
    """Position of the first key of a split."""
    middle = _LIMIT_0 + (split - _COUNT_0) * _SIZE_1
    high = _LIMIT_1 + (split - _COUNT_1) * _SIZE_2
    return tl.where(split < _COUNT_0, split * _SIZE_0, tl.where(split < _COUNT_1, middle, high))


@triton.jit  # type: ignore[untyped-decorator]
def _ends_split(key: tl.tensor) -> Any:
    """Whether `key`, a multiple of the key tile above 0, is the first key after a split."""
    size = tl.where(key <= _LIMIT_0, _SIZE_0, tl.where(key <= _LIMIT_1, _SIZE_1, _SIZE_2))
    return key % size == 0


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
    value = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] + column[None, :], value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def fresh(ROW_TILE: tl.constexpr, VALUE_TILE: tl.constexpr) -> Any:
    """The state of rows that have seen no key: maximum, sum and weighted values."""
    return (
        tl.full((ROW_TILE,), float("-inf"), tl.float32),
        tl.zeros((ROW_TILE,), tl.float32),
        tl.zeros((ROW_TILE, VALUE_TILE), tl.float32),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _finite(row_max: tl.tensor) -> Any:
    """The maximum, or 0 for rows that have seen no key: −inf − (−inf) is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit  # type: ignore[untyped-decorator]
def merge(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    split_max: tl.tensor,
    split_sum: tl.tensor,
    split_acc: tl.tensor,
    SCALE: tl.constexpr,
) -> Any:
    """Merge the partial result of one more split; one without keys changes nothing."""
    peak = tl.maximum(row_max, split_max)
    base = _finite(peak)
    old = tl.exp2((row_max - base) * SCALE)
    new = tl.exp2((split_max - base) * SCALE)
    row_sum = tl.fma(row_sum, old, split_sum * new)
    acc = tl.fma(acc, old[:, None], split_acc * new[:, None])
    return peak, row_sum, acc


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    visible: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> Any:
    """Online softmax over one more tile of keys. SCALE holds log2(e), hence exp2."""
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    peak = tl.maximum(row_max, tl.max(score, 1))
    base = _finite(peak)
    old = tl.exp2((row_max - base) * SCALE)
    weight = tl.exp2(tl.fma(score, SCALE, -(base * SCALE)[:, None]))
    if SUM_BY_DOT:
        # All columns of the product are equal, so that their maximum is any of them.
        ones = tl.full((key.shape[0], 16), 1.0, value.dtype)
        total = tl.max(tl.dot(weight.to(value.dtype), ones, input_precision=PRECISION), 1)
    else:
        total = tl.sum(weight, 1)
    row_sum = tl.fma(row_sum, old, total)
    acc = tl.dot(weight.to(value.dtype), value, acc * old[:, None], input_precision=PRECISION)
    return peak, row_sum, acc


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
def _scan(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    table: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
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
    MERGE: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVICTION: tl.constexpr,
) -> Any:
    """Take the key tiles that begin in first…stop−1 into the state of a row tile."""
    column = tl.arange(0, BLOCK_D)
    value_column = first_column + tl.arange(0, VALUE_TILE)
    for begin in tl.range(first, stop, KEY_TILE):
        keys = begin + tl.arange(0, KEY_TILE)
        present = keys < present_stop
        if MASKED:
            page = tl.load(table + keys // PAGE, mask=present, other=0)
        else:
            page = tl.load(table + keys // PAGE)
        offset = page * page_stride + (keys % PAGE) * slot_stride
        key = _load_tile(
            key_pages, offset, column, present, HEAD_DIM, MASKED, BLOCK_D != HEAD_DIM, EVICTION
        )
        value = _load_tile(
            value_pages,
            offset,
            value_column,
            present,
            HEAD_DIM,
            MASKED,
            HEAD_DIM % VALUE_TILE != 0,
            EVICTION,
        )
        visible = present[None, :]
        if MASKED and CAUSAL:
            visible = visible & (keys[None, :] <= position[:, None])
        if MASKED and WINDOW > 0:
            visible = visible & (position[:, None] - keys[None, :] < WINDOW)
        row_max, row_sum, acc = _add_tile(
            query,
            key,
            value,
            visible,
            row_max,
            row_sum,
            acc,
            SCALE,
            MASKED,
            SUM_BY_DOT,
            PRECISION,
        )
        # Two conditions, one of compile time.
        if MERGE:  # noqa: SIM102
            if _ends_split(begin + KEY_TILE):
                merged_max, merged_sum, merged_acc = merge(
                    merged_max, merged_sum, merged_acc, row_max, row_sum, acc, SCALE
                )
                row_max, row_sum, acc = fresh(position.shape[0], VALUE_TILE)
    return row_max, row_sum, acc, merged_max, merged_sum, merged_acc


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
    MERGE: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    EVICTION: tl.constexpr,
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
        position: [ROW_TILE] absolute positions of the rows.
        first_column: first of the VALUE_TILE columns of the values to weigh.
        WINDOW: a row sees keys less than this far behind it; 0 for all.
        MERGE: keep splits apart and merge them.

    Returns:
        Maximum, sum and weighted values of all keys, or with MERGE those of the merged splits.
    """
    row_max, row_sum, acc = fresh(position.shape[0], VALUE_TILE)
    merged_max, merged_sum, merged_acc = fresh(position.shape[0], VALUE_TILE)
    hot = tl.minimum(tl.maximum(clear_first, first), stop)
    tail = tl.maximum(tl.minimum(clear_stop, stop // KEY_TILE * KEY_TILE), hot)
    if WINDOW > 0:
        row_max, row_sum, acc, merged_max, merged_sum, merged_acc = _scan(
            query, key_pages, value_pages, table, page_stride, slot_stride,
            first, hot, present_stop, position, first_column,
            row_max, row_sum, acc, merged_max, merged_sum, merged_acc,
            SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
            True, MERGE, SUM_BY_DOT, PRECISION, EVICTION,
        )  # fmt: skip
    row_max, row_sum, acc, merged_max, merged_sum, merged_acc = _scan(
        query, key_pages, value_pages, table, page_stride, slot_stride,
        hot, tail, present_stop, position, first_column,
        row_max, row_sum, acc, merged_max, merged_sum, merged_acc,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        False, MERGE, SUM_BY_DOT, PRECISION, EVICTION,
    )  # fmt: skip
    row_max, row_sum, acc, merged_max, merged_sum, merged_acc = _scan(
        query, key_pages, value_pages, table, page_stride, slot_stride,
        tail, stop, present_stop, position, first_column,
        row_max, row_sum, acc, merged_max, merged_sum, merged_acc,
        SCALE, HEAD_DIM, BLOCK_D, VALUE_TILE, KEY_TILE, PAGE, WINDOW, CAUSAL,
        True, MERGE, SUM_BY_DOT, PRECISION, EVICTION,
    )  # fmt: skip
    if MERGE:
        row_max, row_sum, acc = merge(
            merged_max, merged_sum, merged_acc, row_max, row_sum, acc, SCALE
        )
    return row_max, row_sum, acc
