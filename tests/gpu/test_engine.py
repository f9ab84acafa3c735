"""On a GPU: captured steps, eager steps and plain decoding give the same ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.engine.cases import SAMPLINGS
from tests.engine.harness import engine_config, prompts
from tests.engines import ids_of, run, start
from tests.tiny import TinyPair, make_pair

pytestmark = pytest.mark.gpu

TOKENS = 48
EDGES = [1, 2, 3, 4, 5, 6, 7, 8, 9]
"""Around the batch sizes that are captured."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def config(pair: TinyPair, *, draft: bool = True, **fields: object) -> EngineConfig:
    settings = {"device": "cuda", "max_running": 9, "page_size": 8, "kv_cache_gib": 0.5} | fields
    return engine_config(pair, draft=draft, **settings)


def submits(count: int, sampling: str, salt: str = "") -> list[Submit]:
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=TOKENS,
                seed=i,
                ignore_eos=True,
                **SAMPLINGS[sampling],  # type: ignore[arg-type]
            ),
            cache_salt=salt,
        )
        for i, prompt in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_captured_eager_and_plain_steps_agree_at_every_batch(
    pair: TinyPair, sampling: str, dtype: str
) -> None:
    """bfloat16 too: every kernel of a decode step computes a row the same way in any batch."""
    plain = {}
    engine = start(config(pair, draft=False, dtype=dtype))
    try:
        for submit in submits(max(EDGES), sampling):
            plain[submit.request_id] = ids_of(engine.collect([submit])[submit.request_id])
    finally:
        engine.shutdown()
    for eager in (False, True):
        engine = start(config(pair, dtype=dtype, eager=eager))
        try:
            for batch in EDGES:
                for warm in (False, True):
                    some = submits(batch, sampling, salt=str(batch))
                    got = engine.collect(some)
                    for submit in some:
                        assert ids_of(got[submit.request_id]) == plain[submit.request_id], (
                            f"eager {eager}, batch {batch}, warm {warm}, {submit.request_id}"
                        )
            assert engine.stats.pages_used == 0
        finally:
            engine.shutdown()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pages", [None, 40])
def test_overlapped_and_plain_loops_agree(pair: TinyPair, overlap: bool, pages: int | None) -> None:
    settings = {} if pages is None else {"kv_cache_gib": None, "pages": pages}
    expected = run(config(pair, draft=False), submits(9, "mixed")).ids
    outcome = run(config(pair, overlap=overlap, **settings), submits(9, "mixed"))
    assert outcome.ids == expected
    if pages is not None:
        assert outcome.stats.preemptions > 0


def test_two_ranks_on_one_gpu_give_the_ids_of_one(tmp_path: Path, pair: TinyPair) -> None:
    alone = run(config(pair, draft=False), submits(5, "sampled")).ids
    shared = config(pair, tp=2, share_gpu=True, hang_timeout_s=120.0)
    assert run(shared, submits(5, "sampled")).ids == alone


def test_the_pool_takes_what_the_largest_steps_leave(pair: TinyPair) -> None:
    engine = start(config(pair, kv_cache_gib=None, gpu_memory_fraction=0.5))
    try:
        assert engine.info.num_pages > 9 * 32
        assert engine.info.fallbacks == []
    finally:
        engine.shutdown()
