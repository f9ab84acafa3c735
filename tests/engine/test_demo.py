"""The demo pair decodes what its target alone decodes, on one rank and on three."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.demo_pair import demo_pair, demo_prompts
from tests.engine.cases import SAMPLINGS, pairwise_of
from tests.engine.drafting import Switched
from tests.engine.harness import accepted_lengths
from tests.engine.neartie import count_difference
from tests.engines import ids_of, run, start

pytestmark = [pytest.mark.slow, pytest.mark.demo]

TOKENS, SPARE = 64, 9


@dataclasses.dataclass(frozen=True)
class DemoCase:
    """One run of one or three requests."""

    tp: int
    sampling: str
    drafter: str
    batch: int
    chunk: int


CASES = pairwise_of(
    [
        DemoCase(*values)
        for values in itertools.product(
            (1, 3), SAMPLINGS, ("real", "perfect", "half"), (1, 3), (4, 256)
        )
    ],
    dataclasses.asdict,
)


def config(*, tp: int = 1, draft: bool = True, chunk: int = 256) -> EngineConfig:
    """An engine of the demo pair, float32 on CPU."""
    pair = demo_pair()
    return EngineConfig(
        target=pair.target,
        draft=pair.draft if draft else None,
        tensor_parallel_size=tp,
        executor="inproc" if tp == 1 else "mp",
        device="cpu",
        dtype="float32",
        max_model_len=320,
        max_running=12,
        prefill_chunk=chunk,
        hang_timeout_s=600.0,
    )


def submits(sampling: str, max_tokens: int) -> list[Submit]:
    """One request per prompt; the seed tells sampling and prompt."""
    index = list(SAMPLINGS).index(sampling)
    return [
        Submit(
            request_id=f"{sampling}-{i}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                seed=100 * index + i,
                ignore_eos=True,
                **SAMPLINGS[sampling],  # type: ignore[arg-type]
            ),
        )
        for i, prompt in enumerate(demo_prompts(3))
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """Request id → ids of the engine without its draft."""
    every = [s for name in SAMPLINGS for s in submits(name, TOKENS + SPARE)]
    outcome = run(config(draft=False), every)
    return {s.request_id: ids for s, ids in zip(every, outcome.ids, strict=True)}


def test_the_sample_of_cases_is_small_and_covers_both_widths() -> None:
    assert {case.tp for case in CASES} == {1, 3}
    assert len(CASES) <= 24


@pytest.mark.parametrize(("tp", "chunk"), sorted({(c.tp, c.chunk) for c in CASES}))
def test_ids_equal_plain_decoding(
    plain: dict[str, list[int]], tmp_path: Path, tp: int, chunk: int
) -> None:
    control = tmp_path / "behaviour"
    known = {
        s.params.seed: s.prompt_ids + plain[s.request_id]
        for name in SAMPLINGS
        for s in submits(name, 1)
    }
    engine = start(config(tp=tp, chunk=chunk), Switched(known, 49_000, control).install)
    lengths: Counter[int] = Counter()
    ties = requests = 0
    try:
        for case in [c for c in CASES if (c.tp, c.chunk) == (tp, chunk)]:
            control.write_text(case.drafter)
            some = submits(case.sampling, TOKENS)[: case.batch]
            events = engine.collect(some)
            for submit in some:
                mine = events[submit.request_id]
                expected = plain[submit.request_id][:TOKENS]
                ties += count_difference(demo_pair().target, submit, expected, ids_of(mine))
                requests += 1
                if case.drafter == "real":
                    lengths.update(accepted_lengths(mine))
    finally:
        engine.shutdown()
    print(f"tp {tp}, chunk {chunk}: {requests} requests, {ties} near ties, real {dict(lengths)}")
