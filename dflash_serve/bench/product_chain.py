"""Times the products of all layers in their order, with the gaps that other kernels leave.

    python -m dflash_serve.bench.product_chain --rows 16 --output chain.json

A layer is norm and qkv, a gap as long as rope and attention, o and residual, norm and gate-up and
activation, down and residual. Variants: where the norm is computed, and how much of the next
weights every product asks for before it ends. Memory idles in the gaps; what is asked for then
lies in L2 when its product starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.bench.products import milliseconds
from dflash_serve.kernels.gated_mlp import silu_mul
from dflash_serve.kernels.gpu.linear import Ahead, product, row_norm
from dflash_serve.kernels.gpu.tiles import FOLDS, Fold, Tile, row_bucket, tile_for

__all__ = ["main"]

_EPS = 1e-6
_READ = 4.2e12  # bytes/s
_ORDER = ("qkv", "o", "gate_up", "down")

# How many leading elements of every row of the next weight are asked for, by that weight.
_AHEAD: dict[str, dict[str, int]] = {
    "o 512": {"o": 512},
    "o 1024": {"o": 1024},
    "o 2048": {"o": 2048},
    "o 4096": {"o": 4096},
    "all 256": {"qkv": 256, "o": 256, "gate_up": 128, "down": 256},
    "all 512": {"qkv": 512, "o": 512, "gate_up": 128, "down": 512},
    "o 1024, rest 512": {"qkv": 512, "o": 1024, "gate_up": 256, "down": 512},
    "o 2048, rest 256": {"qkv": 256, "o": 2048, "gate_up": 128, "down": 256},
}


@dataclasses.dataclass(frozen=True)
class Model:
    """Weights by layer and name, and the rows that pass through."""

    layers: list[dict[str, Tensor]]
    norm: Tensor
    stream: Tensor
    attended: Tensor

    @property
    def bytes_moved(self) -> int:
        """Of all weights, once."""
        return sum(w.nbytes for layer in self.layers for w in layer.values())


def _model(rows: int, device: str) -> Model:
    hidden, wide, qkv, count = (4096, 12288, 6144, 36) if device == "cuda" else (64, 96, 96, 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def rand(*shape: int) -> Tensor:
        made = torch.randn(shape, device=device, dtype=dtype)
        return made * shape[-1] ** -0.5 if len(shape) == 2 else made

    layers = [
        {
            "qkv": rand(qkv, hidden),
            "o": rand(hidden, hidden),
            "gate_up": rand(2 * wide, hidden),
            "down": rand(hidden, wide),
        }
        for _ in range(count)
    ]
    return Model(layers, rand(hidden).abs() + 0.5, rand(rows, hidden), rand(rows, hidden))


def _library(model: Model, gap: int) -> Tensor:
    stream = model.stream
    for layer in model.layers:
        F.linear(row_norm(stream, model.norm, _EPS, apply=True), layer["qkv"])
        _wait(model, gap)
        stream = torch.addmm(stream, model.attended, layer["o"].t())
        h = row_norm(stream, model.norm, _EPS, apply=True)
        stream = torch.addmm(stream, silu_mul(F.linear(h, layer["gate_up"])), layer["down"].t())
    return stream


def _own(model: Model, gap: int, fold: Fold, ahead: dict[str, int]) -> Tensor:
    """All layers through the Triton products."""
    stream, norm = model.stream, model.norm
    after = [*model.layers[1:], model.layers[0]]
    for layer, following in zip(model.layers, after, strict=True):
        tiles = {name: _tile(weight, stream, name) for name, weight in layer.items()}
        later = {
            name: Ahead(weight, ahead[name]) if name in ahead else None
            for name, weight in {**layer, "qkv": following["qkv"]}.items()
        }
        product(
            stream,
            layer["qkv"],
            tiles["qkv"],
            norm=norm,
            eps=_EPS,
            fold=fold,
            ahead=later["o"],
        )
        _wait(model, gap)
        stream = product(
            model.attended, layer["o"], tiles["o"], residual=stream, ahead=later["gate_up"]
        )
        wide = product(
            stream,
            layer["gate_up"],
            tiles["gate_up"],
            norm=norm,
            eps=_EPS,
            fold=fold,
            gated=True,
            ahead=later["down"],
        )
        stream = product(wide, layer["down"], tiles["down"], residual=stream, ahead=later["qkv"])
    return stream


def _tile(weight: Tensor, stream: Tensor, name: str) -> Tile:
    columns, depth = weight.shape
    gated = name == "gate_up"
    return tile_for(columns, depth, stream.shape[0], stream.dtype, gated=gated)


def _wait(model: Model, nodes: int) -> None:
    """Small kernels that leave memory idle, as rope and attention of a short context do."""
    for _ in range(nodes):
        row_norm(model.attended, model.norm, _EPS, apply=True)


def _gaps(model: Model, gap: int) -> None:
    for _ in model.layers:
        _wait(model, gap)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way through all layers."""

    fold: str
    ahead: str
    work: Callable[[], object]


def _variants(model: Model, rows: int, gap: int) -> list[Variant]:
    folds: tuple[Fold, ...] = ("rstd", "apart", "loop")
    usual = FOLDS[row_bucket(rows)]
    found = [Variant("library", "none", functools.partial(_library, model, gap))]
    for fold in folds:
        found.append(Variant(fold, "none", functools.partial(_own, model, gap, fold, {})))
    for title, ahead in _AHEAD.items():
        found.append(Variant(usual, title, functools.partial(_own, model, gap, usual, ahead)))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write what the flags ask for."""
    parser = argparse.ArgumentParser(description="The products of all layers, timed as a chain.")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--gap", type=int, default=6, help="small kernels in place of attention")
    parser.add_argument("--budget-s", type=float, default=60.0, help="start nothing after this")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--cpu-check", action="store_true", help="toy sizes in the interpreter")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.budget_s
    device = "cpu" if given.cpu_check else "cuda"
    model = _model(given.rows, device)
    empty = milliseconds(functools.partial(_gaps, model, given.gap), device)
    print(f"{given.rows} rows; the gaps alone take {empty:.3f} ms")
    results = []
    for variant in _variants(model, given.rows, given.gap):
        if time.monotonic() > deadline:
            print("out of time")
            break
        name = f"norm {variant.fold}, ahead {variant.ahead}"
        try:
            ms = milliseconds(variant.work, device)
        except Exception as error:
            print(f"not measured: {name}: {' '.join(str(error).split())[:160]}")
            continue
        alone = ms - empty
        rate = model.bytes_moved / alone * 1e3 if alone > 0 else 0.0
        share = f"{rate / 1e12:5.2f} TB/s {rate / _READ:4.0%}"
        print(f"{ms:8.3f} ms, {alone:8.3f} without the gaps: {share}  {name}")
        results.append({"fold": variant.fold, "ahead": variant.ahead, "ms": ms, "alone_ms": alone})
    if given.output is not None:
        found = {"rows": given.rows, "gap": given.gap, "gaps_ms": empty, "results": results}
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
