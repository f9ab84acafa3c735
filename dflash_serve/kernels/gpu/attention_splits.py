"""Where keys are cut into splits, and how the results of splits become one.

The partition depends on positions only. A row's bits depend on it, but not on which program
computes which split: results are merged one by one in ascending order, with explicit `fma`.

Sizes grow so that a long context does not drown in partial results, and divide the limits so that
no split straddles one: 256 keys below 1,024, then 512 below 4,096, 1,024 below 8,192, and 2,048.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "ends_split",
    "finite",
    "fresh",
    "merge",
    "merge_splits",
    "nearest_split",
    "set_split_sizes",
    "split_count",
    "split_first",
    "split_index",
    "split_stop",
    "store_part",
]

_TIERS: tuple[tuple[int, int], ...] = ((1024, 256), (4096, 512), (8192, 1024))
"""(limit, size below it)."""
_LAST_SIZE = 2048

_LIMIT_0, _LIMIT_1, _LIMIT_2 = (tl.constexpr(limit) for limit, _ in _TIERS)
_SIZE_0, _SIZE_1, _SIZE_2 = (tl.constexpr(size) for _, size in _TIERS)
_SIZE_3 = tl.constexpr(_LAST_SIZE)


def split_count(length: int) -> int:
    """Splits that hold at least one of the keys 0…length−1."""
    first, count = 0, 0
    for limit, size in (*_TIERS, (max(length, 1), _LAST_SIZE)):
        count += max(0, -(-(min(length, limit) - first) // size))
        first = limit
    return count


_COUNT_0, _COUNT_1, _COUNT_2 = (tl.constexpr(split_count(limit)) for limit, _ in _TIERS)


def set_split_sizes(tiers: Sequence[tuple[int, int]], last_size: int) -> None:
    """Three other tiers, to measure; before any kernel is compiled in the process.

    Each size is a power of two and divides the limits of its tier.
    """
    global _TIERS, _LAST_SIZE
    _TIERS, _LAST_SIZE = tuple(tiers), last_size
    for index, (limit, size) in enumerate(_TIERS):
        globals()[f"_LIMIT_{index}"] = tl.constexpr(limit)
        globals()[f"_SIZE_{index}"] = tl.constexpr(size)
        globals()[f"_COUNT_{index}"] = tl.constexpr(split_count(limit))
    globals()["_SIZE_3"] = tl.constexpr(last_size)


@triton.jit  # type: ignore[untyped-decorator]
def split_index(key: tl.tensor) -> Any:
    """Index of the split that holds the key at a position."""
    index = _COUNT_2 + (key - _LIMIT_2) // _SIZE_3
    index = tl.where(key < _LIMIT_2, _COUNT_1 + (key - _LIMIT_1) // _SIZE_2, index)
    index = tl.where(key < _LIMIT_1, _COUNT_0 + (key - _LIMIT_0) // _SIZE_1, index)
    return tl.where(key < _LIMIT_0, key // _SIZE_0, index)


@triton.jit  # type: ignore[untyped-decorator]
def _size_before(key: tl.tensor) -> Any:
    """Keys of the split that holds the key before this one."""
    size = tl.where(key <= _LIMIT_2, _SIZE_2, _SIZE_3)
    return tl.where(key <= _LIMIT_0, _SIZE_0, tl.where(key <= _LIMIT_1, _SIZE_1, size))


@triton.jit  # type: ignore[untyped-decorator]
def split_first(split: tl.tensor) -> Any:
    """Position of the first key of a split."""
    key = _LIMIT_2 + (split - _COUNT_2) * _SIZE_3
    key = tl.where(split < _COUNT_2, _LIMIT_1 + (split - _COUNT_1) * _SIZE_2, key)
    key = tl.where(split < _COUNT_1, _LIMIT_0 + (split - _COUNT_0) * _SIZE_1, key)
    return tl.where(split < _COUNT_0, split * _SIZE_0, key)


@triton.jit  # type: ignore[untyped-decorator]
def nearest_split(key: tl.tensor) -> Any:
    """First key of a split, as near to `key` as there is one."""
    return split_first(split_index(key + _size_before(key + 1) // 2))


@triton.jit  # type: ignore[untyped-decorator]
def split_stop(key: tl.tensor) -> Any:
    """First key after the split that holds the key at a position."""
    size = _size_before(key + 1)
    return (key // size + 1) * size


@triton.jit  # type: ignore[untyped-decorator]
def ends_split(key: tl.tensor) -> Any:
    """Whether `key`, a multiple of the key tile above 0, is the first key after a split."""
    return (key & (_size_before(key) - 1)) == 0


@triton.jit  # type: ignore[untyped-decorator]
def fresh(ROW_TILE: tl.constexpr, VALUE_TILE: tl.constexpr) -> Any:
    """The state of rows that have seen no key: maximum, sum and weighted values."""
    return (
        tl.full((ROW_TILE,), float("-inf"), tl.float32),
        tl.zeros((ROW_TILE,), tl.float32),
        tl.zeros((ROW_TILE, VALUE_TILE), tl.float32),
    )


@triton.jit  # type: ignore[untyped-decorator]
def finite(row_max: tl.tensor) -> Any:
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
    base = finite(peak)
    old = tl.exp2((row_max - base) * SCALE)
    new = tl.exp2((split_max - base) * SCALE)
    row_sum = tl.fma(row_sum, old, split_sum * new)
    acc = tl.fma(acc, old[:, None], split_acc * new[:, None])
    return peak, row_sum, acc


@triton.jit  # type: ignore[untyped-decorator]
def store_part(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    split: tl.tensor,
    packed: tl.tensor,
    width: tl.tensor,
    first_column: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Keep the result of one split for `merge_splits`: packed rows below `width`."""
    column = first_column + tl.arange(0, acc.shape[1])
    row = split.to(tl.int64) * width + packed
    once = (packed < width) & (first_column == 0)
    tl.store(part_max + row, row_max, mask=once)
    tl.store(part_sum + row, row_sum, mask=once)
    stored = (packed < width)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(part_acc + row[:, None] * HEAD_DIM + column[None, :], acc, mask=stored)


@triton.jit  # type: ignore[untyped-decorator]
def _load_part(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    present: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> Any:
    """Maximum, sum and weighted values of one split; of an absent one, those of no keys."""
    place = part_acc + row[:, None] * HEAD_DIM + column[None, :]
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    return (
        tl.load(part_max + row, mask=present, other=float("-inf")),
        tl.load(part_sum + row, mask=present, other=0.0),
        tl.load(place, mask=inside, other=0.0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_four(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    row: tl.tensor,
    width: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    split: tl.tensor,
    last: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> Any:
    """The parts of splits split…split+3, in a tuple each; those past `last` are absent."""
    return (
        _load_part(
            part_max, part_sum, part_acc, row, column, inside & (split <= last), HEAD_DIM
        ),
        _load_part(
            part_max, part_sum, part_acc, row + width, column, inside & (split < last), HEAD_DIM
        ),
        _load_part(
            part_max, part_sum, part_acc, row + 2 * width, column,
            inside & (split + 1 < last), HEAD_DIM,
        ),
        _load_part(
            part_max, part_sum, part_acc, row + 3 * width, column,
            inside & (split + 2 < last), HEAD_DIM,
        ),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def merge_splits(
    part_max: tl.tensor,
    part_sum: tl.tensor,
    part_acc: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    column: tl.tensor,
    split: tl.tensor,
    last: tl.tensor,
    width: tl.tensor,
    SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> Any:
    """State of a few rows after the splits split…last in ascending order.

    Args:
        part_max, part_sum: [.., width]; part_acc [.., width, HEAD_DIM].
        row: [ROWS] rows of the first split in these; a split further on is `width` further.
        inside: [ROWS] which rows exist.
        column: [COLUMNS] columns of the values to merge.
    """
    row_max, row_sum, acc = fresh(row.shape[0], column.shape[0])
    # Eight splits are read at once, since a merge waits for the one before it.
    while split <= last:
        near = _load_four(
            part_max, part_sum, part_acc, row, width, column, inside, split, last, HEAD_DIM
        )
        far = _load_four(
            part_max, part_sum, part_acc, row + 4 * width, width, column, inside,
            split + 4, last, HEAD_DIM,
        )  # fmt: skip
        for index in tl.static_range(4):
            part = near[index]
            row_max, row_sum, acc = merge(row_max, row_sum, acc, part[0], part[1], part[2], SCALE)
        for index in tl.static_range(4):
            part = far[index]
            row_max, row_sum, acc = merge(row_max, row_sum, acc, part[0], part[1], part[2], SCALE)
        split += 8
        row += 8 * width
    return row_sum, acc
