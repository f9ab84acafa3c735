"""Proposals and accepted counts are those of the public DFlash implementations."""

from __future__ import annotations

import collections
import random
from pathlib import Path

import pytest

from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.engine.drafting import Recorder, read_records
from tests.engine.harness import engine_config
from tests.engines import ids_of, start
from tests.parity.conftest import VOCAB
from tests.parity.reference import Blocks, public_dflash, transformers_dflash
from tests.tiny import TinyPair

# The public package calls transformers by names that it is about to retire.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

BLOCK = {"qwen3": 8, "llama": 5, "wide": 8}
SIZES = [
    ("qwen3", 8, 48),
    ("llama", 8, 48),
    ("wide", 4, 32),
    *[pytest.param(name, 50, 128, marks=pytest.mark.slow) for name in BLOCK],
]


def random_prompts(name: str, count: int) -> list[list[int]]:
    """Prompts of 1 to 60 ids."""
    generator = random.Random(name)
    top = VOCAB - 1 if name != "wide" else 290
    return [
        [generator.randrange(top) for _ in range(generator.randrange(1, 61))] for _ in range(count)
    ]


def submits(prompts: list[list[int]], max_tokens: int) -> list[Submit]:
    """Greedy requests; the seed tells them apart."""
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, seed=i, temperature=0.0, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]


def ours(pair: TinyPair, prompts: list[list[int]], max_tokens: int, folder: Path) -> list[Blocks]:
    """Every prompt through the engine, many at once."""
    engine = start(engine_config(pair), Recorder(folder).install)
    try:
        events = engine.collect(submits(prompts, max_tokens))
    finally:
        engine.shutdown()
    proposals, _ = read_records(folder, 1)
    results = []
    for i, prompt in enumerate(prompts):
        committed, start_at = {}, len(prompt)
        for event in events[f"r{i}"]:
            if event.drafted:
                committed[start_at] = event.accepted + 1
                start_at += event.accepted + 1
        results.append(Blocks(ids_of(events[f"r{i}"]), proposals[i], committed))
    return results


@pytest.mark.parametrize(("name", "count", "max_tokens"), SIZES)
def test_every_complete_block_equals_the_public_package(
    pairs: dict[str, TinyPair], tmp_path: Path, name: str, count: int, max_tokens: int
) -> None:
    block, prompts = BLOCK[name], random_prompts(name, count)
    # Both run on past the ids compared, so that no block in question is cut short.
    theirs = public_dflash(pairs[name], prompts, max_tokens + 2 * block)
    mine = ours(pairs[name], prompts, max_tokens + 2 * block, tmp_path)
    lengths: collections.Counter[int] = collections.Counter()
    for prompt, expected, got in zip(prompts, theirs, mine, strict=True):
        assert got.ids[:max_tokens] == expected.ids[:max_tokens]
        end = len(prompt) + max_tokens
        complete = [s for s in expected.proposals if s < end]
        assert complete == [s for s in got.committed if s < end]
        for s in complete:
            assert len(got.proposals[s]) == block - 1
            assert got.proposals[s] == expected.proposals[s]
            assert got.committed[s] == expected.committed[s]
            lengths[got.committed[s] - 1] += 1
    print(f"{name}: {sum(lengths.values())} blocks, accepted {dict(sorted(lengths.items()))}")
    assert name == "wide" or len(lengths) >= 3


@pytest.mark.parametrize(("name", "count", "max_tokens"), SIZES)
def test_ids_equal_those_of_transformers_own_speculation(
    pairs: dict[str, TinyPair], tmp_path: Path, name: str, count: int, max_tokens: int
) -> None:
    prompts = random_prompts(name, count)
    theirs = transformers_dflash(pairs[name], prompts, max_tokens)
    mine = ours(pairs[name], prompts, max_tokens, tmp_path)
    assert [blocks.ids for blocks in mine] == theirs
