"""Prompts computed in one pass come out as those computed one after the other."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_serve.engine import runner as runner_module
from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.engine.runner import Runner
from dflash_serve.engine.step import prefill_packed
from dflash_serve.kernels.backend import interpreted
from dflash_serve.parallel.group import Single
from dflash_serve.scheduler.plan import PrefillChunk, SlotSetup, StepPlan, StepResult
from tests.engine import harness as harness_module
from tests.engine.cases import SAMPLINGS, Case, EngineKey, matrix, pairwise
from tests.engine.drafting import Recorder, read_records
from tests.engine.harness import PAGE, SHORT, Harness, engine_config
from tests.engine.neartie import count_difference
from tests.engines import run
from tests.tiny import TinyPair

POISON = 295
TOLERANCE = 2e-5
"""Of keys and values, whose products have other row counts."""

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compiles the kernels")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of chunks of every pass over several."""
    seen: list[int] = []

    def counted(pair: Pair, state: object, chunks: list[PrefillChunk]) -> torch.Tensor:
        seen.append(len(chunks))
        return prefill_packed(pair, state, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "prefill_packed", counted)
    return seen


@pytest.fixture
def packing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """The harness with engines that pack; its references come from one that does not."""
    for family in ("qwen3", "llama"):
        harness.plain(family)
    packs = functools.partial(engine_config, pack_prompts=True)
    monkeypatch.setattr(harness_module, "engine_config", packs)
    return harness


# -- whole engines ------------------------------------------------------------------------------


def test_packed_prompts_give_the_ids_of_plain_decoding(packing: Harness, passes: list[int]) -> None:
    """Cold and warm prefixes, prompts in chunks, preemption and every kind of sampling."""
    tally = packing.run(case for case in pairwise(matrix(tp=1)) if case.batch > 1)
    assert tally.preemptions > 0
    assert tally.cached_tokens > 0
    assert tally.near_ties <= 2
    assert set(range(2, 8)) & set(passes)


def test_packed_prompts_give_the_ids_of_plain_decoding_across_ranks(packing: Harness) -> None:
    key = EngineKey("qwen3", block=8, chunk=64, small_pool=True, tp=2)
    cases = [
        Case(key, "greedy", "random", batch=7, warm=False),
        Case(key, "sampled", "half", batch=7, warm=True),
        Case(key, "mixed", "real", batch=7, warm=False),
    ]
    assert packing.run(cases).near_ties <= 2


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlapped"])
def test_draft_pages_and_proposals_are_those_of_prompts_one_after_the_other(
    harness: Harness, pair: TinyPair, tmp_path: Path, passes: list[int], overlap: bool
) -> None:
    submits = [s for name in SAMPLINGS for s in harness.submits(name, SHORT)]
    found = {}
    for pack in (False, True):
        folder = tmp_path / str(pack)
        folder.mkdir()
        config = engine_config(
            pair, pack_prompts=pack, prefill_chunk=24, max_running=16, overlap=overlap
        )
        outcome = run(config, submits, Recorder(folder).install)
        found[pack] = (outcome.ids, *read_records(folder, 1))
        assert bool(passes) == pack
    same = 0
    for submit, expected, ids in zip(submits, found[False][0], found[True][0], strict=True):
        if count_difference(pair.target, submit, expected, ids):
            continue
        same += 1
        seed = submit.params.seed
        context, proposals = found[True][2][seed], found[True][1][seed]
        torch.testing.assert_close(context, found[False][2][seed], rtol=0, atol=TOLERANCE)
        assert proposals == found[False][1][seed]
    assert same >= len(submits) - 2


# -- one plan -----------------------------------------------------------------------------------

SLOTS = 6


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request of a plan: tokens computed before it, the chunk, and how it goes on."""

    before: int
    tokens: int
    sample: bool
    sampling: str = "greedy"


MIXED = [
    Prompt(0, 1, sample=True),
    Prompt(11, 30, sample=False, sampling="sampled"),
    Prompt(0, 40, sample=True, sampling="mixed"),
    Prompt(16, 5, sample=True, sampling="sampled"),
    Prompt(3, 17, sample=False),
    Prompt(0, 33, sample=True, sampling="nucleus"),
]
"""Several page boundaries; the slots are taken from the last to the first."""


def ids(index: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(2, 290, (count,), generator=generator).tolist()


def plans(prompts: list[Prompt]) -> list[StepPlan]:
    """What comes before, each alone, and then all chunks in one plan."""
    setups, pages, before, chunks = [], [], [], []
    page = 1
    for index, prompt in enumerate(prompts):
        slot, tokens = SLOTS - 1 - index, ids(index, prompt.before + prompt.tokens)
        setup = SlotSetup(slot=slot, start=0, anchor=7, seed=index, **SAMPLINGS[prompt.sampling])  # type: ignore[arg-type]
        setups.append(setup)
        need = -(-len(tokens) // PAGE)
        pages.append((slot, 0, list(range(page, page + need))))
        page += need
        if prompt.before:
            first = PrefillChunk(
                slot=slot, start=0, token_ids=tokens[: prompt.before], sample=False
            )
            before.append(StepPlan(step=0, prefill=[first]))
        chunks.append(
            PrefillChunk(
                slot=slot,
                start=prompt.before,
                token_ids=tokens[prompt.before :],
                sample=prompt.sample,
                noisy=prompt.sampling != "greedy",
                truncates=prompt.sampling in ("nucleus", "mixed"),
            )
        )
    whole = StepPlan(step=1, prefill=chunks)
    return [StepPlan(step=0, setups=setups, pages=pages), *before, whole]


def execute(
    pair: TinyPair, prompts: list[Prompt], *, pack: bool, chunk: int = 256
) -> tuple[StepResult, Runner]:
    """The last plan's result, and the runner with what was written."""
    config = engine_config(pair, max_running=SLOTS, prefill_chunk=chunk, pack_prompts=pack)
    runner = Runner(load_pair(config, Single()), config)
    results = [runner.execute(plan) for plan in plans(prompts)]
    return results[-1], runner


def pools(runner: Runner) -> list[torch.Tensor]:
    kvs = (runner.pair.target_kv, runner.pair.draft_kv)
    return [kv.pool[:, :, 1:] for kv in kvs if kv is not None]  # all but the dummy page


def same_state(mine: Runner, reference: Runner) -> None:
    assert mine.state.start.tolist() == reference.state.start.tolist()
    assert mine.state.anchor.tolist() == reference.state.anchor.tolist()
    for left, right in zip(pools(mine), pools(reference), strict=True):
        assert bool(right.any())
        torch.testing.assert_close(left, right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "prompts",
    [MIXED, MIXED[:2], [dataclasses.replace(p, sample=False) for p in MIXED], MIXED[2:3] * 6],
    ids=["mixed", "two", "none-samples", "all-sample"],
)
def test_a_plan_in_one_pass_leaves_what_its_chunks_leave(
    pair: TinyPair, passes: list[int], prompts: list[Prompt]
) -> None:
    expected, reference = execute(pair, prompts, pack=False)
    assert passes == []
    result, runner = execute(pair, prompts, pack=True)
    assert passes == [len(prompts)]
    assert result == expected
    assert [token is not None for token in result.sampled] == [p.sample for p in prompts]
    same_state(runner, reference)


def test_a_plan_of_one_chunk_is_not_packed(pair: TinyPair, passes: list[int]) -> None:
    execute(pair, MIXED[:1], pack=True)
    assert passes == []


@pytest.fixture
def poisoned(pair: TinyPair, tmp_path: Path) -> TinyPair:
    """The pair with one id whose embedding is NaN; the head is tied, but its row is padding."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in Path(pair.target).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return TinyPair(str(folder), pair.draft)


@pytest.mark.parametrize("bad", range(len(MIXED)))
def test_a_nan_in_one_prompt_faults_that_one_only(poisoned: TinyPair, bad: int) -> None:
    """Whether or not its chunk samples; nothing of it stays in a page."""
    config = engine_config(
        poisoned, max_running=SLOTS, prefill_chunk=256, pack_prompts=True, valid_vocab_size=POISON
    )
    outcomes = []
    for spoiled in (False, True):
        *first, last = plans(MIXED)
        if spoiled:
            last.prefill[bad].token_ids[0] = POISON
        runner = Runner(load_pair(config, Single()), config)
        for plan in first:
            runner.execute(plan)
        outcomes.append((runner.execute(last), runner))
    (expected, reference), (result, runner) = outcomes
    assert result.sampled[bad] == -1
    others = [i for i in range(len(MIXED)) if i != bad]
    assert [result.sampled[i] for i in others] == [expected.sampled[i] for i in others]
    start = 1 + sum(-(-(p.before + p.tokens) // PAGE) for p in MIXED[:bad])
    stop = start + -(-(MIXED[bad].before + MIXED[bad].tokens) // PAGE)
    for mine, theirs in zip(pools(runner), pools(reference), strict=True):
        assert bool(mine.isfinite().all())
        for part in (slice(0, start - 1), slice(stop - 1, None)):
            assert torch.equal(mine[:, :, part], theirs[:, :, part])


# -- kernels and start-up -----------------------------------------------------------------------


@no_gpu
def test_a_plan_in_one_pass_through_triton_leaves_what_torch_leaves(pair: TinyPair) -> None:
    prompts = [
        Prompt(0, 1, sample=True),
        Prompt(3, 6, sample=False),
        Prompt(0, 17, sample=True, sampling="sampled"),
        Prompt(8, 5, sample=True),
    ]
    expected, reference = execute(pair, prompts, pack=False)
    config = engine_config(pair, max_running=SLOTS, prefill_chunk=256, pack_prompts=True)
    runner = Runner(load_pair(config, Single()), config)
    *first, last = plans(prompts)
    for plan in first:
        runner.execute(plan)
    with interpreted():
        result = runner.execute(last)
    assert result == expected
    same_state(runner, reference)


@pytest.mark.parametrize("chunk", [4, 24, 2048])
def test_what_is_compiled_at_the_start_covers_every_number_of_chunks(
    pair: TinyPair, passes: list[int], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    config = engine_config(pair, max_running=20, prefill_chunk=chunk, pack_prompts=True)
    runner = Runner(load_pair(config, Single()), config)
    rows: list[int] = []
    alignments: set[int] = set()
    target = runner.pair.target

    def counted(ids: torch.Tensor, *rest: object) -> object:
        rows.append(ids.shape[0])
        alignments.add(ids.data_ptr() % 16)
        return target(ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.pair, "target", _Calling(target, counted))
    before = runner.state._memory.clone()
    with torch.inference_mode():
        runner._compile_prefill()
    most = min(20, chunk)
    assert {1, 2, most} <= set(passes)
    assert max(passes) == most
    assert max(rows) == chunk
    assert alignments == {0, 8}  # chunks in turn begin at any id
    # Nothing of a request changed.
    slots = runner.state.dummy * 8
    assert torch.equal(runner.state._memory[:slots], before[:slots])
    assert int(runner.state.start[runner.state.dummy]) == 0
    rows.clear()
    runner.rehearse_prefill()
    assert max(rows) == chunk
    assert passes[-1] == most


class _Calling:
    """A model whose calls go elsewhere first."""

    def __init__(self, model: object, call: object) -> None:
        self._model, self._call = model, call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)
