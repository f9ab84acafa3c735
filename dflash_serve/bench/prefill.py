"""Time of prompts alone, through the engine, at several sizes of a prefill chunk.

With the prompts of a step computed one after the other, in one pass, or both.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from dflash_serve.bench.engines import random_prompts, requests, running, variant
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.model_config import TargetConfig, TransformerConfig

__all__ = ["prefill", "prefill_flops"]


def prefill(
    config: EngineConfig,
    modes: Sequence[str],
    *,
    loads: Sequence[tuple[int, int]],
    chunks: Sequence[int],
    repeats: int,
    packed: Sequence[bool] = (False,),
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Median seconds from the submission of prompts to the first token of the last of them.

    Args:
        modes: "plain" computes the target alone, others also the context of the draft.
        loads: (prompts, tokens of each).
        chunks: values of `prefill_chunk`.
        packed: values of `pack_prompts`.
    """
    shape = TargetConfig.load(config.target).model
    cells: list[dict[str, Any]] = []
    for mode, chunk, pack in itertools.product(modes, chunks, packed):
        # Nothing is decoded, so that no step need be captured.
        sized = dataclasses.replace(
            variant(config, mode), prefill_chunk=chunk, pack_prompts=pack, eager=True
        )
        way = {"mode": mode, "chunk": chunk, "packed": pack}
        with running(sized) as engine:
            for count, length in loads:
                seconds = [_seconds(engine, count, length, i) for i in range(repeats + 1)]
                cells.append(way | _cell(count, length, seconds[1:], shape))
                progress(
                    "{mode}, chunk {chunk}, {prompts} x {length}{how}: {seconds:.4f} s, "
                    "{tflops:.1f} TFLOP/s".format(how=" packed" if pack else "", **cells[-1])
                )
    return {"cells": cells}


def _seconds(engine: EngineClient, count: int, length: int, seed: int) -> float:
    """From the submission of random prompts to the first token of the last of them."""
    texts = random_prompts(count, (length, length), engine.info.vocab_size, seed)
    submits = requests("prefill", texts, 1, 0.0)
    began = time.perf_counter()
    engine.collect(submits)
    return time.perf_counter() - began


def _cell(count: int, length: int, runs: list[float], shape: TransformerConfig) -> dict[str, Any]:
    flops, seconds = prefill_flops(shape, count, length), statistics.median(runs)
    return {
        "prompts": count,
        "length": length,
        "runs": runs,
        "seconds": seconds,
        "flops": flops,
        "tflops": flops / seconds / 1e12,
    }


def prefill_flops(model: TransformerConfig, prompts: int, length: int) -> float:
    """Operations of the target's layers on prompts of one length.

    Products with the weights of attention and MLP, and causal attention at half of its square;
    no head, no norms, no draft.
    """
    heads = model.num_heads + model.num_kv_heads
    attention = 2 * model.hidden_size * heads * model.head_dim
    weights = attention + 3 * model.hidden_size * model.intermediate_size
    linear = 2 * weights * length
    causal = 2 * length**2 * model.num_heads * model.head_dim
    return float(prompts * model.num_layers * (linear + causal))
