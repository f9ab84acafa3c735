"""Embedding rows are those of the table, and zeros for ids of other ranks."""

from __future__ import annotations

import pytest
import torch

from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.embedding import embed_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [64, 576, 1024, 2560])
@pytest.mark.parametrize(("first", "rows"), [(0, 50), (20, 10), (40, 0)])
@pytest.mark.parametrize("count", [1, 16, 129])
def test_rows_are_copied_exactly(width: int, first: int, rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn((50, width), generator=generator)
    ids = torch.randint(0, 50, (count,), generator=generator)
    mine = (ids >= first) & (ids < first + rows)
    expected = torch.where(mine[:, None], table[ids], 0)
    weight = table[first : first + rows]
    assert torch.equal(embed_rows(ids, weight, first), expected)
    with interpreted():
        out = embed_rows(ids.to(DEVICE), weight.to(DEVICE), first)
    assert torch.equal(out.cpu(), expected)
