"""A draft in 8 bits proposes something else now and then; the ids stay those of plain decoding."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from dflash_serve.bench.grid import grid_table
from dflash_serve.bench.step import step_table
from dflash_serve.cli import app
from dflash_serve.config import EngineConfig
from dflash_serve.engine import pair as pair_module
from dflash_serve.engine.messages import EngineInfo
from dflash_serve.engine.pair import load_pair, prepare
from dflash_serve.errors import ConfigError
from dflash_serve.kernels import fp8
from dflash_serve.kernels.fp8 import Fp8Weight
from dflash_serve.parallel.group import Single
from tests.engine.cases import SAMPLINGS
from tests.engine.harness import LONG, SHORT, Harness, engine_config
from tests.engine.neartie import count_difference
from tests.engines import run, start
from tests.tiny import TinyPair


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_ids_equal_plain_decoding(
    harness: Harness, pairs: dict[str, TinyPair], family: str, sampling: str
) -> None:
    submits = harness.submits(sampling, LONG)
    outcome = run(engine_config(pairs[family], draft_quantization="fp8"), submits)
    plain = harness.plain(family)
    ties = sum(
        count_difference(pairs[family].target, submit, plain[submit.request_id][:LONG], ids)
        for submit, ids in zip(submits, outcome.ids, strict=True)
    )
    assert ties <= 1
    assert max(outcome.stats.by_length) > 1


def test_ids_equal_plain_decoding_across_ranks(harness: Harness, pair: TinyPair) -> None:
    """Each rank quantises its own slices."""
    submits = harness.submits("mixed", SHORT)
    outcome = run(engine_config(pair, tp=2, draft_quantization="fp8"), submits)
    plain = harness.plain("qwen3")
    for submit, ids in zip(submits, outcome.ids, strict=True):
        assert ids == plain[submit.request_id][:SHORT]


def test_the_draft_is_computed_in_8_bits_and_the_target_is_not(pair: TinyPair) -> None:
    plain = load_pair(engine_config(pair), Single())
    loaded = load_pair(engine_config(pair, draft_quantization="fp8"), Single())
    assert plain.draft is not None
    assert loaded.draft is not None
    assert plain.draft_head is None
    assert loaded.draft_head is not None
    for layer in loaded.draft.layers:
        for weight in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down):
            assert isinstance(weight, Fp8Weight)
    assert isinstance(loaded.draft.fc, Fp8Weight)
    assert isinstance(loaded.draft.kv_weight, Fp8Weight)
    copy = loaded.draft_head.weight
    assert isinstance(copy, Fp8Weight)
    head = loaded.target.head.weight
    assert isinstance(head, torch.Tensor)
    assert torch.equal(head, plain.target.head.weight)
    error = (copy.dequantized() - head).abs().amax(1)
    assert bool((error <= head.abs().amax(1) * 16.1 / 448).all())
    assert not bool((error == 0).all())
    assert all(isinstance(layer.mlp.down, torch.Tensor) for layer in loaded.target.layers)


def test_the_memory_counted_is_that_of_the_quantised_weights(pair: TinyPair) -> None:
    plain = load_pair(engine_config(pair), Single())
    loaded = load_pair(engine_config(pair, draft_quantization="fp8"), Single())
    assert plain.draft is not None
    assert loaded.draft is not None
    assert loaded.draft_head is not None
    assert loaded.draft.weight_bytes < 0.35 * plain.draft.weight_bytes  # float32 before
    copy = fp8.weight_nbytes(loaded.draft_head.weight)
    saved = plain.draft.weight_bytes - loaded.draft.weight_bytes
    assert plain.weight_bytes - loaded.weight_bytes == saved - copy


def test_originals_of_the_draft_are_freed(pair: TinyPair) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    honest: Callable[[torch.Tensor], Fp8Weight] = fp8.quantize_weight

    def watched(weight: torch.Tensor) -> Fp8Weight:
        seen.append(weakref.ref(weight))
        return honest(weight)

    with mock.patch("dflash_serve.models.dflash.quantize_weight", watched):
        loaded = load_pair(engine_config(pair, draft_quantization="fp8"), Single())
    gc.collect()
    assert len(seen) == 2 + 4 * 2
    assert [ref for ref in seen if ref() is not None] == []
    assert loaded.draft is not None


def test_the_engine_says_what_it_drafts_in(pair: TinyPair) -> None:
    def info(**fields: object) -> EngineInfo:
        engine = start(engine_config(pair, **fields))  # type: ignore[arg-type]
        try:
            return engine.info
        finally:
            engine.shutdown()

    assert info(draft_quantization="fp8").draft_quantization == "fp8"
    assert info().draft_quantization is None
    assert info(draft_quantization="fp8", draft=False).draft_quantization is None


def test_an_unknown_quantization_is_refused(pair: TinyPair) -> None:
    with pytest.raises(ConfigError, match="draft_quantization is 'int4'; allowed: fp8"):
        engine_config(pair, draft_quantization="int4")


def test_a_gpu_without_8_bit_products_is_refused(pair: TinyPair) -> None:
    config = engine_config(pair, draft_quantization="fp8")
    settings, _, _ = prepare(config)
    gpu = torch.device("cuda", 0)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        mock.patch("torch.cuda.get_device_name", return_value="A100"),
        pytest.raises(ConfigError, match=r"A100 has compute capability 8\.0.*8\.9"),
    ):
        pair_module._check_quantization(settings, 1, gpu)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        pair_module._check_quantization(settings, 1, gpu)
        with pytest.raises(ConfigError, match="intermediate_size of a rank is 24"):
            pair_module._check_quantization(settings, 4, gpu)


def test_reports_name_it() -> None:
    """A step's time with an 8-bit draft is never taken for one without."""
    for draft_quantization in (None, "fp8"):
        shown = "" if draft_quantization is None else "draft in fp8"
        console = Console(file=io.StringIO(), record=True, width=200)
        step_table([], console, draft_quantization)
        grid_table([], [3.0], 8, console, draft_quantization)
        text = console.export_text()
        assert text.count("draft in") == (2 if shown else 0)
        assert shown in text


def test_the_command_line_passes_it_on(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def generate(config: EngineConfig, *_: object, **__: object) -> None:
        seen.append(config.draft_quantization)

    monkeypatch.setattr("dflash_serve.bench.generate.generate", generate)
    command = ["generate", "hello", "--target", pair.target, "--draft", pair.draft]
    for more in ([], ["--draft-quantization", "fp8"]):
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
    assert seen == [None, "fp8"]
    assert CliRunner().invoke(app, [*command, "--draft-quantization", "int4"]).exit_code == 2
