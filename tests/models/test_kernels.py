"""Reference kernels against loops that spell out the definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from dflash_serve.kernels.accept import accept
from dflash_serve.kernels.attention import AttentionView, attend, write_pages
from dflash_serve.kernels.block import block_ids, block_positions, page_slots
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.linear import FEW_ROWS, linear
from dflash_serve.kernels.norm import rms_norm
from dflash_serve.kernels.rope import apply_rope, rope_table
from dflash_serve.model_config import RopeConfig

PAGE = 4
WIDTH = 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_attention(query: Tensor, key: Tensor, value: Tensor, start: int, causal: bool) -> Tensor:
    """One request: [R, heads, D] queries over [start + R, kv_heads, D] keys, one dot at a time."""
    rows, heads, width = query.shape
    group = heads // key.shape[1]
    out = torch.zeros_like(query)
    for row in range(rows):
        seen = start + row + 1 if causal else start + rows
        for head in range(heads):
            keys, values = key[:seen, head // group], value[:seen, head // group]
            weight = torch.softmax(keys @ query[row, head] / math.sqrt(width), dim=0)
            out[row, head] = weight @ values
    return out


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    start: Tensor,
    longest: int,
    *,
    causal: bool,
) -> Tensor:
    view = AttentionView(table, start, query.shape[1], longest, PAGE, causal)
    return attend(query, keys, values, view)


def paged_case(
    starts: list[int], rows: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Key and value pages in shuffled order with large numbers in every unused slot."""
    length = max(starts) + rows
    per_request = -(-length // PAGE) + 1
    order = torch.randperm(len(starts) * per_request, generator=torch.Generator().manual_seed(1))
    table = (order + 1).view(len(starts), per_request)
    pages = [
        torch.full((1 + table.numel(), PAGE, kv_heads, WIDTH), 1e3 * (1 + i)) for i in range(2)
    ]
    dense = []
    for request, start in enumerate(starts):
        count = start + rows
        both = (rand(count, kv_heads, WIDTH, seed=request), rand(count, kv_heads, WIDTH, seed=99))
        slots = page_slots(table[request : request + 1], torch.arange(count)[None], PAGE)[0]
        for store, part in zip(pages, both, strict=True):
            write_pages(store, slots, part)
        dense.append(both)
    return pages[0], pages[1], table, dense


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("starts", "rows"),
    [
        ([0], 1),
        ([0], PAGE),
        ([PAGE - 1], 1),
        ([PAGE], 1),
        ([2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1], 3),
        ([0, 1, 7, 13], 4),
        ([11, 0, 5], 9),
    ],
    ids=str,
)
def test_paged_attention_equals_dense_attention(
    starts: list[int], rows: int, group: int, causal: bool
) -> None:
    kv_heads = 2
    keys, values, table, dense = paged_case(starts, rows, kv_heads)
    query = rand(len(starts), rows, kv_heads * group, WIDTH, seed=7)
    out = paged_attention(
        query, keys, values, table, torch.tensor(starts), max(starts) + rows, causal=causal
    )
    for request, (key, value) in enumerate(dense):
        expected = naive_attention(query[request], key, value, starts[request], causal)
        assert (out[request] - expected).abs().max() < 1e-5


def test_paged_attention_reads_no_page_past_the_bound() -> None:
    keys, values, table, _ = paged_case([3], 2, 1)
    query = rand(1, 2, 1, WIDTH)
    expected = paged_attention(query, keys, values, table, torch.tensor([3]), 5, causal=True)
    keys[table[0, 2:]] = math.nan
    values[table[0, 2:]] = math.nan
    out = paged_attention(query, keys, values, table, torch.tensor([3]), 5, causal=True)
    assert torch.equal(out, expected)


def test_written_rows_land_in_their_slots_and_nowhere_else() -> None:
    pages = torch.zeros(3, PAGE, 2, WIDTH)
    rows = rand(3, 2, WIDTH)
    write_pages(pages, torch.tensor([5, 11, 4]), rows)
    assert torch.equal(pages[1, 1], rows[0])
    assert torch.equal(pages[2, 3], rows[1])
    assert torch.equal(pages[1, 0], rows[2])
    assert int((pages.abs().sum(dim=(2, 3)) > 0).sum()) == 3


def test_pages_keep_their_own_type() -> None:
    pages = torch.zeros(2, PAGE, 1, WIDTH, dtype=torch.bfloat16)
    rows = rand(1, 1, WIDTH)
    write_pages(pages, torch.tensor([PAGE]), rows)
    assert torch.equal(pages[1, 0], rows[0].bfloat16())


def test_slots_and_positions_follow_the_page_table() -> None:
    table = torch.tensor([[5, 2, 9], [1, 7, 3]])
    positions = block_positions(torch.tensor([3, 7]), 3)
    assert positions.tolist() == [[3, 4, 5], [7, 8, 9]]
    assert page_slots(table, positions, PAGE).tolist() == [[23, 8, 9], [31, 12, 13]]


def test_block_is_the_anchor_and_masks() -> None:
    assert block_ids(torch.tensor([4, 6]), 3, 9).tolist() == [[4, 9, 9], [6, 9, 9]]
    assert block_ids(torch.tensor([4]), 1, 9).tolist() == [[4]]


def test_accept_counts_the_leading_run_and_takes_the_next_pick() -> None:
    picked = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafted = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [1, 2, 0]])
    accepted, bonus = accept(drafted, picked)
    assert accepted.tolist() == [3, 0, 1, 2]
    assert bonus.tolist() == [4, 1, 2, 3]


def test_accept_without_proposals_takes_the_only_pick() -> None:
    accepted, bonus = accept(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[5], [6]]))
    assert accepted.tolist() == [0, 0]
    assert bonus.tolist() == [5, 6]


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 2, 16)], ids=str)
def test_rms_norm_equals_transformers(shape: tuple[int, ...]) -> None:
    reference = LlamaRMSNorm(shape[-1], eps=1e-5)
    with torch.no_grad():
        reference.weight.copy_(rand(shape[-1], seed=3))
        x = rand(*shape)
        assert (rms_norm(x, reference.weight, 1e-5) - reference(x)).abs().max() < 1e-6


def test_gated_activation_multiplies_silu_of_a_column_by_the_next_one() -> None:
    x = rand(3, 10)
    out = silu_mul(x)
    assert out.shape == (3, 5)
    for column in range(5):
        gate, up = x[:, 2 * column], x[:, 2 * column + 1]
        assert (out[:, column] - gate * torch.sigmoid(gate) * up).abs().max() < 1e-6


def test_gated_activation_rounds_a_row_the_same_in_any_company() -> None:
    x = rand(37, 2 * 53)  # no whole number of vectors
    out = silu_mul(x)
    for rows in (1, 2, 5, 36):
        assert torch.equal(silu_mul(x[:rows]), out[:rows])


@pytest.mark.parametrize("length", [1, 33])
def test_rope_equals_transformers(length: int) -> None:
    table = rope_table(RopeConfig(theta=10000.0), 16, 64, torch.device("cpu"))
    positions = torch.arange(64 - length, 64)
    rows = table[positions]
    cos, sin = rows[:, :8].repeat(1, 2), rows[:, 8:].repeat(1, 2)
    query, key = rand(length, 4, 16), rand(length, 2, 16, seed=1)
    expected = apply_rotary_pos_emb(query[None], key[None], cos[None], sin[None], unsqueeze_dim=2)
    assert (apply_rope(query, rows) - expected[0][0]).abs().max() < 1e-6
    assert (apply_rope(key, rows) - expected[1][0]).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 16, FEW_ROWS, FEW_ROWS + 1, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (64, 320), (320, 1)])
def test_linear_equals_the_library_product(rows: int, inputs: int, outputs: int) -> None:
    x, weight = rand(rows, inputs), rand(outputs, inputs, seed=1)
    out = linear(x, weight)
    assert out.shape == (rows, outputs)
    assert (out - F.linear(x, weight)).abs().max() < 1e-4


def test_linear_of_an_empty_vocabulary_shard_is_empty() -> None:
    for rows in (1, 4, FEW_ROWS + 1):
        assert linear(rand(rows, 8), torch.empty(0, 8)).shape == (rows, 0)
