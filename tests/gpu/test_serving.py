"""On a GPU: memory stays within its budget, nothing is compiled and nothing runs eagerly late."""

from __future__ import annotations

import random

import pytest
import torch

from dflash_serve.config import EngineConfig
from dflash_serve.engine.messages import Submit
from dflash_serve.errors import CapacityError
from dflash_serve.sampling import SamplingParams
from tests.engine.harness import engine_config
from tests.engines import ids_of, run, start
from tests.tiny import TinyPair, make_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def config(pair: TinyPair, **fields: object) -> EngineConfig:
    settings = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running": 9,
        "page_size": 16,
        "kv_cache_gib": 0.5,
        "prefill_chunk": 256,
    }
    return engine_config(pair, **(settings | fields))  # type: ignore[arg-type]


def submits(count: int, lengths: list[int], **params: float) -> list[Submit]:
    generator = random.Random(1)
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=[generator.randrange(2, 290) for _ in range(lengths[i % len(lengths)])],
            params=SamplingParams(max_tokens=24, seed=i, ignore_eos=True, **params),  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def test_the_largest_work_stays_within_the_memory_that_was_given(pair: TinyPair) -> None:
    fraction = 0.3
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = start(config(pair, kv_cache_gib=None, gpu_memory_fraction=fraction, max_running=64))
    try:
        engine.collect(submits(64, [200, 100], temperature=1.0, top_p=0.9))
    finally:
        engine.shutdown()
    assert torch.cuda.max_memory_reserved() <= fraction * torch.cuda.mem_get_info()[1]


def test_too_small_a_share_names_the_least_that_works(pair: TinyPair) -> None:
    with pytest.raises(CapacityError, match="smallest gpu_memory_fraction that works"):
        start(config(pair, kv_cache_gib=None, gpu_memory_fraction=1e-4))


def test_nothing_is_compiled_once_the_engine_is_ready(pair: TinyPair) -> None:
    import triton

    compiled: list[str] = []
    engine = start(config(pair))
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(
        str(given.get("repr"))
    )
    try:
        for batch in (1, 2, 3, 5, 8, 9):
            engine.collect(submits(batch, [1, 2, 15, 16, 17, 31, 48, 63, 100, 128, 131, 200]))
            engine.collect(submits(batch, [7, 64, 33], temperature=1.0))
            engine.collect(submits(batch, [5, 80], temperature=0.8, top_p=0.9, top_k=20))
        stats = engine.stats
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        engine.shutdown()
    assert compiled == []
    assert stats.eager_steps == 0
    assert stats.replayed_steps > 0
    assert stats.late_graphs <= 8  # truncated steps are captured when the first one comes


def test_memory_does_not_grow_with_requests(pair: TinyPair) -> None:
    engine = start(config(pair))
    try:
        engine.collect(submits(100, [3, 40, 90]))
        before = torch.cuda.memory_reserved()
        for seed in range(10):
            engine.collect(submits(100, [5 + seed, 33, 120]))
        assert torch.cuda.memory_reserved() - before <= 16 << 20
    finally:
        engine.shutdown()


def test_requests_that_enter_decode_by_any_door_get_the_ids_of_plain_decoding(
    pair: TinyPair,
) -> None:
    """Resumed with ids of their own, found whole in the prefix cache, alone after an empty batch,
    joining a running batch. In float32: a resumed request computes its output anew in a prefill."""
    some = submits(6, [40, 17, 64], temperature=1.0)
    plain = run(config(pair, draft=False, dtype="float32"), some).ids
    engine = start(config(pair, max_running=4, dtype="float32"))
    try:
        for emitted in (0, 1, 9):
            resumed = [
                Submit(
                    request_id=s.request_id,
                    prompt_ids=s.prompt_ids,
                    params=s.params,
                    emitted_ids=ids[:emitted],
                )
                for s, ids in zip(some, plain, strict=True)
            ]
            for batch in (resumed, resumed[:1], resumed):
                events = engine.collect(batch)
                for submit, ids in zip(batch, plain, strict=False):
                    assert ids[:emitted] + ids_of(events[submit.request_id]) == ids
    finally:
        engine.shutdown()
