"""On a GPU: a draft in 8 bits proposes the same captured or eager, and never changes the ids."""

from __future__ import annotations

import pytest
import torch

from dflash_serve.errors import ConfigError
from tests.engine.cases import SAMPLINGS
from tests.engines import ids_of, run, start
from tests.gpu.test_engine import EDGES, config, submits
from tests.tiny import TinyPair, make_pair

pytestmark = pytest.mark.gpu

SUPPORTED = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_8_bits = pytest.mark.skipif(not SUPPORTED, reason="no 8-bit products")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@needs_8_bits
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_captured_and_eager_steps_agree_with_plain_decoding(
    pair: TinyPair, sampling: str, dtype: str
) -> None:
    expected = run(config(pair, draft=False, dtype=dtype), submits(max(EDGES), sampling)).ids
    accepted = {}
    for eager in (False, True):
        fields = {"dtype": dtype, "eager": eager, "draft_quantization": "fp8"}
        engine = start(config(pair, **fields))
        try:
            assert engine.info.draft_quantization == "fp8"
            for batch in EDGES:
                some = submits(batch, sampling, salt=str(batch))
                got = engine.collect(some)
                for submit, ids in zip(some, expected, strict=False):
                    assert ids_of(got[submit.request_id]) == ids, f"eager {eager}, batch {batch}"
                    steps = [(event.drafted, event.accepted) for event in got[submit.request_id]]
                    seen = accepted.setdefault((batch, submit.request_id), steps)
                    assert steps == seen, f"batch {batch}, {submit.request_id}"
        finally:
            engine.shutdown()


@needs_8_bits
def test_two_ranks_on_one_gpu_give_the_ids_of_one(pair: TinyPair) -> None:
    alone = run(config(pair, draft=False), submits(5, "sampled")).ids
    shared = config(pair, tp=2, share_gpu=True, hang_timeout_s=120.0, draft_quantization="fp8")
    assert run(shared, submits(5, "sampled")).ids == alone


@pytest.mark.skipif(SUPPORTED, reason="has 8-bit products")
def test_a_gpu_without_8_bit_products_is_refused(pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="compute capability"):
        run(config(pair, draft_quantization="fp8"), submits(1, "greedy"))
