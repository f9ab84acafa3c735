"""On a GPU: prompts computed in one pass come out as those computed one after the other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dflash_serve.engine.messages import Submit
from dflash_serve.engine.runner import Runner
from tests.engine.cases import SAMPLINGS
from tests.engine.drafting import Recorder, read_records
from tests.engine.neartie import count_difference
from tests.engines import ids_of, run, start
from tests.gpu.test_engine import config, submits
from tests.tiny import TinyPair, make_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels in the order in which they are compiled, or fetched from the cache on disk."""
    import triton

    seen: list[str] = []

    def compiled(**given: object) -> None:
        seen.append(str(given.get("repr")))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
    return seen


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_packed_prompts_give_the_ids_of_plain_decoding(
    pair: TinyPair, sampling: str, overlap: bool
) -> None:
    expected = run(config(pair, draft=False), submits(9, sampling)).ids
    for chunk in (24, 1024):
        packs = config(pair, pack_prompts=True, prefill_chunk=chunk, overlap=overlap)
        engine = start(packs)
        try:
            for warm in (False, True):
                events = engine.collect(submits(9, sampling))
                ties = sum(
                    count_difference(pair.target, submit, ids, ids_of(events[submit.request_id]))
                    for submit, ids in zip(submits(9, sampling), expected, strict=True)
                )
                assert ties <= 1, f"chunk {chunk}, warm {warm}"
            assert engine.stats.pages_used == 0
        finally:
            engine.shutdown()


def test_packed_prompts_leave_the_draft_as_good_as_it_was(pair: TinyPair, tmp_path: Path) -> None:
    """A hole in the draft's context would change its proposals, which the output hides."""
    found = {}
    for pack in (False, True):
        folder = tmp_path / str(pack)
        folder.mkdir()
        settings = config(pair, pack_prompts=pack, prefill_chunk=64, eager=True)
        ids = run(settings, submits(9, "sampled"), Recorder(folder).install).ids
        found[pack] = (ids, *read_records(folder, 1))
    same = [i for i in range(9) if found[True][0][i] == found[False][0][i]]
    assert len(same) >= 8
    for seed in same:
        assert found[True][1][seed] == found[False][1][seed]
        difference = (found[True][2][seed] - found[False][2][seed]).abs().max()
        assert float(difference) < 1e-3


def prompts_alone(many: int, sampling: str) -> list[Submit]:
    """One token each: a decode step with truncation is captured, and compiled, when first met."""
    replace = msgspec.structs.replace
    return [
        replace(submit, params=replace(submit.params, max_tokens=1))
        for submit in submits(many, sampling, salt=str(many))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_while_packed_prompts_wait(
    pair: TinyPair, dtype: str, compilations: list[str]
) -> None:
    sizes: list[int] = []

    def count(runner: Runner) -> None:
        packed = runner._prefill_packed

        def counted(chunks):  # type: ignore[no-untyped-def]
            sizes.append(len(chunks))
            return packed(chunks)

        runner._prefill_packed = counted  # type: ignore[method-assign]

    packs = config(pair, dtype=dtype, pack_prompts=True, prefill_chunk=256, prefix_cache=False)
    engine = start(packs, count)
    try:
        compilations.clear()
        sizes.clear()
        for sampling in SAMPLINGS:
            for many in (2, 5, 9):
                engine.collect(prompts_alone(many, sampling))
    finally:
        engine.shutdown()
    assert len(set(sizes)) > 1
    assert compilations == []
