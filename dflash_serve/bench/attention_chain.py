"""Time of whole layers around attention, with the next weight brought into L2 meanwhile or not.

A part of `dflash_serve.bench.attention`. A layer is qkv, attention, o and residual, gate-up and
activation, down and residual, at Qwen3-8B's shapes with the weights and pages of all layers
resident; its small kernels are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dflash_serve.bench.products import milliseconds
from dflash_serve.kernels.attention import AttentionView
from dflash_serve.kernels.gpu.attention import Merge, decode_attention
from dflash_serve.kernels.gpu.linear import linear, linear_add, norm_gated

__all__ = ["run"]

_CASES = ((1, 16), (1, 1), (8, 16), (8, 1))
_MB = 1 << 20
_PREFETCH: tuple[tuple[int, int], ...] = ((0, 0), (8, 64), (16, 64), (32, 64), (16, 256), (32, 256))
_MERGES: tuple[Merge, ...] = ("launch", "last")
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the model, and tokens of context."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    context: int


_QWEN3_8B = Shape(36, 4096, 32, 8, 128, 12288, 1024)
_TOY = Shape(2, 128, 4, 2, 32, 96, 64)
_PAGE = 16


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights [N, K] and pages [2, pages, page, kv_heads, head_dim]."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    pages: Tensor


def _layers(shape: Shape, device: torch.device, dtype: torch.dtype, pages: int) -> list[Layer]:
    def rand(*sizes: int) -> Tensor:
        return torch.empty(sizes, device=device, dtype=dtype).normal_(std=0.02)

    width = shape.heads * shape.head_dim
    qkv = width + 2 * shape.kv_heads * shape.head_dim
    return [
        Layer(
            rand(qkv, shape.hidden),
            rand(shape.hidden, width),
            rand(2 * shape.wide, shape.hidden),
            rand(shape.hidden, shape.wide),
            rand(2, pages, _PAGE, shape.kv_heads, shape.head_dim),
        )
        for _ in range(shape.layers)
    ]


def _work(
    layers: list[Layer],
    query: Tensor,
    stream: Tensor,
    norm: Tensor,
    view: AttentionView,
    *,
    products: bool,
    **options: Any,
) -> Tensor:
    """All layers; without the other products, attention and o alone."""
    for layer in layers:
        if products:
            linear(stream, layer.qkv)
        if options.get("prefetch_bytes"):
            options["prefetch"] = layer.o
        out = decode_attention(query, layer.pages[0], layer.pages[1], view, **options)
        stream = linear_add(out.view(stream.shape[0], -1), layer.o, stream)
        if products:
            stream = linear_add(norm_gated(stream, norm, _EPS, layer.gate_up), layer.down, stream)
    return stream


def run(device: torch.device, deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of the result, printed as they come; none starts past the deadline."""
    toy = device.type != "cuda"
    shape, dtype = (_TOY, torch.float32) if toy else (_QWEN3_8B, torch.bfloat16)
    width = -(-shape.context // _PAGE)
    layers = _layers(shape, device, dtype, 1 + max(batch for batch, _ in _CASES) * width)
    norm = torch.ones(shape.hidden, device=device, dtype=dtype)
    for batch, rows in _CASES[:2] if toy else _CASES:
        table = (torch.randperm(batch * width, device=device) + 1).view(batch, width)
        start = torch.full((batch,), shape.context - rows, device=device)
        view = AttentionView(table, start, rows, shape.context, _PAGE, True)
        sizes = (batch, rows, shape.heads, shape.head_dim)
        query = torch.randn(sizes, device=device, dtype=dtype)
        stream = torch.randn((batch * rows, shape.hidden), device=device, dtype=dtype)
        for products in (False, True):
            for merge in _MERGES:
                for megabytes, programs in _PREFETCH[:2] if toy else _PREFETCH:
                    if time.perf_counter() > deadline:
                        return
                    work = functools.partial(
                        _work, layers, query, stream, norm, view, products=products, merge=merge,
                        prefetch_bytes=megabytes * _MB, prefetch_programs=programs,
                    )  # fmt: skip
                    name = f"{merge}, {megabytes} MB by {programs}"
                    part = "all products" if products else "o"
                    row = {"chain": part, "batch": batch, "rows": rows, "variant": name}
                    try:
                        row["ms"] = round(milliseconds(work, device.type), 4)
                    except Exception as error:
                        row["error"] = " ".join(str(error).split())[:160]
                    print(f"chain {part:12} batch {batch} g{rows:<2} {name:24} ", end="")
                    print(row.get("error") or f"{row['ms']:8.3f} ms", flush=True)
                    yield row
