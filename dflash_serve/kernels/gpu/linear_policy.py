"""Which products go to the library: speed against the promise about a row's bits.

Up to 64 rows a layer's own products take no longer than the library's, and always run. Above
`INVARIANT_ROWS` nothing is promised, and the faster one runs. Between the two the promise costs
time, and the process chooses once whether it holds: before the first step is captured, since a
captured step keeps what it was captured with.
"""

from __future__ import annotations

import dataclasses

import torch

from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS, large_tile

__all__ = ["OWN_FASTER", "ProductPolicy", "policy", "set_row_invariant", "use_library"]

_FEW_ROWS = 64

OWN_FASTER = frozenset([(4096, 4096), (4096, 12288), (24576, 4096)])
"""Shapes (N, K) whose own product is faster than the library's up to `INVARIANT_ROWS` rows too."""


@dataclasses.dataclass
class ProductPolicy:
    """What this process promises.

    Attributes:
        row_invariant: a row's bits do not depend on how many rows there are, up to
            `INVARIANT_ROWS`; else only up to 64.
    """

    row_invariant: bool = True


_policy = ProductPolicy()


def policy() -> ProductPolicy:
    """A copy of the process's policy."""
    return dataclasses.replace(_policy)


def set_row_invariant(kept: bool) -> None:
    """Choose for the whole process whether 65 to `INVARIANT_ROWS` rows keep their bits."""
    _policy.row_invariant = kept


def use_library(rows: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a product of `rows` rows with a weight of `shape` (N, K) goes to the library."""
    if rows > INVARIANT_ROWS:
        return large_tile(*shape, rows, dtype) is None
    return rows > _FEW_ROWS and not _policy.row_invariant and shape not in OWN_FASTER
