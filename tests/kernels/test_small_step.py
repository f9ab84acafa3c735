"""What a step gathers from the device tables and what it commits: Triton against plain torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_serve.errors import ConfigError
from dflash_serve.kernels.accept import Committed, commit
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.block import block_ids, gather_step

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BATCHES = [1, 2, 8, 33, 257] if GPU else [1, 2, 9]
COLUMNS = 8
MASK = 151_669


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def flat(record: Any) -> list[Tensor]:
    """Tensors of nested dataclasses, on the CPU."""
    if isinstance(record, Tensor):
        return [record.cpu()]
    values = (getattr(record, field.name) for field in dataclasses.fields(record))
    return [tensor for value in values for tensor in flat(value)]


def same(mine: Any, reference: Any) -> None:
    pairs = list(zip(flat(mine), flat(reference), strict=True))
    assert pairs
    for left, right in pairs:
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


# -- gather -------------------------------------------------------------------------------------


def tables(size: int, pages: int, page_size: int, rows: int) -> tuple[Tensor, Tensor]:
    """Slot rows whose blocks fit the page table, some of them at its very end, and page ids."""
    state = integers(-(2**62), 2**62, size, COLUMNS)
    state[:, 0] = integers(0, MASK, size, seed=1)
    last = pages * page_size - rows
    state[:, 1] = integers(0, last + 1, size, seed=2)
    state[::3, 1] = last
    state[1::3, 1] = min(page_size - 1, last)
    return state, integers(0, 2**33, size, pages, seed=3)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("rows", "ahead"), [(1, 1), (7, 1), (16, 1), (16, 16), (600, 600)])
@pytest.mark.parametrize("batch", BATCHES)
def test_gathered_step_equals_torch(batch: int, rows: int, ahead: int, page_size: int) -> None:
    state, table = tables(batch + 1, 1 + 700 // page_size, page_size, rows)
    slots = integers(0, batch + 1, batch)
    with interpreted():
        mine = gather_step(
            state.to(DEVICE), table.to(DEVICE), slots.to(DEVICE), rows, page_size, MASK, ahead=ahead
        )
    reference = gather_step(state, table, slots, rows, page_size, MASK, ahead=ahead)
    same(mine, reference)
    assert torch.equal(reference.state, state[slots])
    assert reference.first.tolist() == (state[slots, 1] + ahead).tolist()
    assert torch.equal(reference.ids, block_ids(state[slots, 0], rows, MASK))


def test_positions_past_the_page_table_go_to_the_dummy_page() -> None:
    table, state = torch.tensor([[7, 9]], device=DEVICE), torch.tensor([[5, 6]], device=DEVICE)
    with interpreted():
        step = gather_step(state, table, torch.tensor([0], device=DEVICE), 4, 4, MASK)
    assert step.block.slots.tolist() == [38, 39, 0, 1]


# -- commit -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A verified batch over tables whose last row is nobody's."""

    drafted: Tensor
    picked: Tensor
    faults: Tensor
    slots: Tensor
    page_slots: Tensor
    state: Tensor

    def run(self, device: str, synthetic: float | None = None) -> tuple[Committed, Tensor]:
        """What the batch brought, and the tables after it."""
        state = self.state.to(device, copy=True)
        parts = (self.drafted, self.picked, self.faults, self.slots, self.page_slots)
        moved = [part.to(device) for part in parts]
        done = commit(*moved, state[:, 0], state[:, 1], synthetic=synthetic)
        return done, state


def verified(batch: int, rows: int, idle: int = 0, seed: int = 0) -> Case:
    """Two ids only, so that runs of every length occur; `idle` rows pad the batch."""
    size = batch + 4
    slots = torch.randperm(size - 1, generator=torch.Generator().manual_seed(seed))[:batch]
    if idle:
        slots[-idle:] = size - 1
    state = integers(0, 2**40, size, COLUMNS, seed=seed)
    state[-1, 0] = 0
    state[:, 1] = integers(0, 5000, size, seed=seed + 1)
    return Case(
        drafted=(integers(0, 100, batch, rows - 1, seed=seed + 2) < 80).long(),
        picked=(integers(0, 100, batch, rows, seed=seed + 3) < 80).long(),
        faults=integers(0, 100, batch, rows, seed=seed + 4) < 5,
        slots=slots,
        page_slots=integers(16, 2**40, batch * rows, seed=seed + 5),
        state=state,
    )


def check(case: Case, synthetic: float | None = None) -> None:
    with interpreted():
        mine = case.run(DEVICE, synthetic)
    reference = case.run("cpu", synthetic)
    same(mine[0], reference[0])
    same(mine[1], reference[1])


@pytest.mark.parametrize("synthetic", [None, 0.7])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17])
@pytest.mark.parametrize("batch", BATCHES)
def test_commit_equals_torch(batch: int, rows: int, synthetic: float | None) -> None:
    check(verified(batch, rows), synthetic)


@pytest.mark.parametrize("synthetic", [None, 1.0])
def test_padding_rows_leave_their_row_of_the_tables_alone(synthetic: float | None) -> None:
    case = verified(7, 5, idle=3)
    check(case, synthetic)
    with interpreted():
        _, state = case.run(DEVICE, synthetic)
    assert torch.equal(state[-1].cpu(), case.state[-1])


def test_commit_reads_strided_picks() -> None:
    case = verified(5, 6)
    case.drafted = case.drafted.t().contiguous().t()
    case.picked = case.picked.repeat(1, 2)[:, 3:9]
    case.faults = case.faults.repeat_interleave(2, dim=1)[:, ::2]
    check(case)


@pytest.mark.parametrize("batch", [4])
def test_every_run_length_commits_as_many_rows(batch: int) -> None:
    rows = 4
    case = verified(batch, rows)
    case.picked = torch.arange(batch * rows).view(batch, rows)
    case.drafted = case.picked[:, :-1].clone()
    for request in range(batch - 1):
        case.drafted[request, request] = -1
    with interpreted():
        done, state = case.run(DEVICE)
    assert done.accepted.tolist() == [0, 1, 2, 3]
    kept = (done.slots.view(batch, rows) != 0).sum(dim=1)
    assert kept.tolist() == [1, 2, 3, 4]
    moved = (state.cpu() - case.state)[case.slots]
    assert moved[:, 1].tolist() == [1, 2, 3, 4]
    assert state.cpu()[case.slots, 0].tolist() == [0, 5, 10, 15]


# -- acceptance by chance, for benchmarks -------------------------------------------------------


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.8, 1.0])
def test_synthetic_runs_are_geometric_whatever_was_drafted(probability: float) -> None:
    case = verified(4000, 8)
    done, _ = case.run("cpu", probability)
    for length in range(8):
        share = (done.accepted >= length).float().mean().item()
        assert abs(share - probability**length) < 0.03


def test_synthetic_runs_follow_from_slot_and_start_alone() -> None:
    one, two = verified(50, 8), verified(50, 8, seed=9)
    two.slots, two.state = one.slots, one.state
    assert torch.equal(one.run("cpu", 0.6)[0].accepted, two.run("cpu", 0.6)[0].accepted)
    two.state = one.state.clone()
    two.state[:, 1] += 1
    assert not torch.equal(one.run("cpu", 0.6)[0].accepted, two.run("cpu", 0.6)[0].accepted)


def test_synthetic_runs_take_the_targets_tokens() -> None:
    case = verified(20, 8)
    done, state = case.run("cpu", 0.6)
    assert torch.equal(
        state[case.slots, 0], case.picked.gather(1, done.accepted[:, None]).squeeze(1)
    )


@pytest.mark.parametrize("probability", [-0.1, 1.5, float("nan")])
def test_synthetic_acceptance_must_be_a_probability(probability: float) -> None:
    with pytest.raises(ConfigError, match="give a probability from 0 to 1"):
        verified(1, 2).run("cpu", probability)
