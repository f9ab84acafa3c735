"""Who may write into the residual stream: the MLP into attention's sum, nobody into a tap."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.engine.pair import Pair
from dflash_serve.kernels.backend import interpreted
from dflash_serve.kernels.gpu.tiles import INVARIANT_ROWS
from dflash_serve.kernels.linear import linear_add, linear_add_norm
from dflash_serve.kernels.norm import rms_norm
from tests.models.forward import PAGE, load_target, row_batch
from tests.tiny import TinyPair, make_draft

ROWS = INVARIANT_ROWS + 1  # from here on a GPU's library adds to a stream in place
LENGTH = 43

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
THROUGH = [
    pytest.param(contextlib.nullcontext, id="torch"),
    pytest.param(interpreted, id="triton", marks=no_gpu),
]


@pytest.fixture
def pair(pairs: dict[str, TinyPair], tmp_path: Path) -> Pair:
    """A target of which every layer is tapped."""
    draft = str(make_draft(tmp_path / "draft", taps=(0, 1, 2, 3)))
    return load_target(pairs["qwen3"].target, draft)


@pytest.mark.parametrize("through", THROUGH)
@torch.inference_mode()
def test_a_product_adds_and_normalises_the_same_whether_or_not_it_keeps_the_stream(
    through: type[contextlib.nullcontext[None]], pair: Pair
) -> None:
    layer = pair.target.layers[0]
    mlp, norm = layer.mlp, layer.post_norm
    for rows in (2, ROWS):
        stream = torch.randn(rows, norm.shape[0], generator=torch.Generator().manual_seed(1))
        with through():
            wide = mlp(rms_norm(stream, norm, layer.eps))
            expected = linear_add(wide, mlp.down, stream)
            for consume in (False, True):
                total, normal = linear_add_norm(
                    wide, mlp.down, stream.clone(), norm, layer.eps, consume=consume
                )
                assert torch.equal(total, expected)
                assert torch.equal(normal, rms_norm(expected, norm, layer.eps))


@pytest.mark.parametrize("through", THROUGH)
@torch.inference_mode()
def test_later_layers_leave_a_tapped_stream_as_it_was(
    through: type[contextlib.nullcontext[None]], pair: Pair
) -> None:
    table = 1 + torch.arange(18).view(3, 6)
    batch = row_batch([0, 0, 0], LENGTH, table)
    ids = torch.arange(3 * LENGTH) % 40
    assert len(ids) >= ROWS
    with through():
        view = batch.view(PAGE, causal=True)
        stream, layers = pair.target.embed(ids), pair.target.layers
        normal = rms_norm(stream, layers[0].input_norm, layers[0].eps)
        norms = [layer.input_norm for layer in layers[1:]] + [pair.target.norm]
        kept: list[tuple[Tensor, Tensor]] = []
        for layer, norm, pages in zip(layers, norms, pair.target_kv.layers, strict=True):
            stream, normal = layer(stream, normal, norm, None, batch, pair.target.rope, pages, view)
            kept.append((stream, stream.clone()))
        _, taps = pair.target(ids, batch, pair.target_kv)
    assert taps is not None
    assert torch.equal(taps, torch.cat([before for _, before in kept], dim=-1))
    assert all(torch.equal(after, before) for after, before in kept)
