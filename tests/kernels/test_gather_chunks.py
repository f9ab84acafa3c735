"""What chunks of several prompts gather from the device tables: Triton against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.block import gather_chunks, gather_step
from tests.kernels.test_small_step import COLUMNS, DEVICE, integers, same, tables

COUNTS = [
    [1],
    [5, 1, 16],
    [0, 3, 0, 0, 7, 0],
    [1, 600, 2, 0, 513, 0, 0],
    [1] * 17,
]
"""Rows of each request; some have none, and some more than a program takes."""


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gathered_chunks_equal_torch(counts: list[int], page_size: int) -> None:
    batch, rows = len(counts), sum(counts)
    state, table = tables(batch + 1, 1 + 700 // page_size, page_size, max(counts))
    slots = torch.randperm(batch + 1, generator=torch.Generator().manual_seed(4))[:batch]
    starts = starts_of(counts)
    inputs = [x.to(DEVICE) for x in (state, table, slots, starts)]
    with interpreted():
        mine = gather_chunks(*inputs, rows, page_size)
    same(mine, gather_chunks(state, table, slots, starts, rows, page_size))


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_chunk_gathers_what_it_gathers_alone(counts: list[int], page_size: int) -> None:
    state, table = tables(len(counts), 1 + 700 // page_size, page_size, max(counts))
    slots, starts = torch.arange(len(counts)), starts_of(counts)
    whole = gather_chunks(state, table, slots, starts, sum(counts), page_size)
    for i, count in [(i, count) for i, count in enumerate(counts) if count]:
        alone = gather_step(state, table, slots[i : i + 1], count, page_size, 0, ahead=count)
        mine = slice(int(starts[i]), int(starts[i + 1]))
        assert torch.equal(whole.block.positions[mine], alone.block.positions)
        assert torch.equal(whole.block.slots[mine], alone.block.slots)
        assert torch.equal(whole.block.page_table[i : i + 1], alone.block.page_table)
        assert int(whole.stop[i]) == int(alone.first[0])
        assert torch.equal(whole.state[i : i + 1], alone.state)


def test_chunk_positions_past_the_page_table_go_to_the_dummy_page() -> None:
    state = torch.zeros((2, COLUMNS), dtype=torch.int64)
    state[:, 1] = torch.tensor([6, 2])
    inputs = [state, integers(3, 9, 2, 2), torch.tensor([0, 1]), torch.tensor([0, 4, 5])]
    with interpreted():
        found = gather_chunks(*(x.to(DEVICE) for x in inputs), 5, 4)
    pages = inputs[1].tolist()
    assert found.block.slots.tolist() == [
        4 * pages[0][1] + 2,
        4 * pages[0][1] + 3,
        0,
        1,
        4 * pages[1][0] + 2,
    ]
    assert found.stop.tolist() == [10, 3]
