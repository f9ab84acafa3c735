"""On a GPU, with the demo pair in float32: captured, eager and plain steps give the same ids."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams
from tests.demo_pair import demo_pair, demo_prompts
from tests.engines import ids_of, run, start

pytestmark = [pytest.mark.gpu, pytest.mark.demo]

TOKENS = 64
EDGES = [1, 3, 4, 5, 7, 8, 9]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    ids = demo_prompts(4)
    return [ids[i % len(ids)][: 20 + 7 * i] for i in range(max(EDGES))]


def config(**fields: object) -> EngineConfig:
    pair = demo_pair()
    settings = {
        "target": pair.target,
        "draft": pair.draft,
        "device": "cuda",
        "dtype": "float32",
        "max_running": max(EDGES),
        "max_model_len": 512,
        "kv_cache_gib": 2.0,
    }
    return EngineConfig(**(settings | fields))  # type: ignore[arg-type]


def submits(prompts: list[list[int]], sampling: dict[str, float], salt: str = "") -> list[Submit]:
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=i, **sampling),  # type: ignore[arg-type]
            cache_salt=salt,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_captured_eager_and_plain_steps_agree(
    prompts: list[list[int]], sampling: dict[str, float]
) -> None:
    plain = run(config(draft=None), submits(prompts, sampling)).ids
    for eager in (False, True):
        engine = start(config(eager=eager))
        try:
            for batch in EDGES:
                for warm in (False, True):
                    some = submits(prompts[:batch], sampling, salt=str(batch))
                    got = engine.collect(some)
                    ids = [ids_of(got[s.request_id]) for s in some]
                    assert ids == plain[:batch], f"eager {eager}, batch {batch}, warm {warm}"
        finally:
            engine.shutdown()


def test_three_ranks_on_one_gpu_give_the_ids_of_one(prompts: list[list[int]]) -> None:
    alone = run(config(), submits(prompts, SAMPLINGS[1])).ids
    shared = dataclasses.replace(
        config(), tensor_parallel_size=3, executor="mp", share_gpu=True, hang_timeout_s=120.0
    )
    assert run(shared, submits(prompts, SAMPLINGS[1])).ids == alone
