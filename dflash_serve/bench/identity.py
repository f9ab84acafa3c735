"""Whether DFlash decoding gives the ids of plain decoding, over many random prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from dflash_serve.bench.engines import random_prompts, requests, running, variant
from dflash_serve.bench.measure import Measurement, StepTimer, measure
from dflash_serve.config import EngineConfig

__all__ = ["compare", "identity"]

Ids = Sequence[Sequence[int]]


def identity(
    config: EngineConfig,
    modes: Sequence[str],
    *,
    batches: Sequence[int],
    plain_batches: Sequence[int],
    prompts: int,
    prompt_lengths: tuple[int, int],
    max_tokens: int,
    temperature: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Decode the same prompts plainly and in every mode, and compare the ids.

    The first plain batch is what all other runs are compared with. Above temperature 0 the same
    holds, since the noise of a request follows from its seed.

    Args:
        modes: verify lengths, see `engines.variant`.
        batches: requests that run together, in each mode.
        prompt_lengths: least and most tokens of a prompt.
    """
    expected: Ids | None = None
    runs: list[dict[str, Any]] = []
    for mode in ("plain", *modes):
        timer = StepTimer()
        with running(variant(config, mode), timer.install) as engine:
            texts = random_prompts(prompts, prompt_lengths, engine.info.vocab_size)
            submits = requests("identity", texts, max_tokens, temperature)
            measure(engine, timer, submits[:1], 1)  # warm up
            for batch in plain_batches if mode == "plain" else batches:
                result = measure(engine, timer, submits, batch)
                expected = result.ids if expected is None else expected
                runs.append(_outcome(mode, batch, result, expected))
                progress(
                    "{mode} at batch {batch}: {identical} of {requests} alike".format(**runs[-1])
                )
    return {"temperature": temperature, "max_tokens": max_tokens, "runs": runs}


def _outcome(mode: str, batch: int, result: Measurement, expected: Ids) -> dict[str, Any]:
    differing = compare(expected, result.ids)
    return {
        "mode": mode,
        "batch": batch,
        "requests": len(result.ids),
        "identical": len(result.ids) - len(differing),
        "differing": differing,
        "tokens": sum(len(ids) for ids in result.ids),
        "steps": result.steps,
        "tokens_per_step": result.tokens_per_step,
        "tokens_per_second": result.tokens_per_second,
    }


def compare(expected: Ids, found: Ids) -> list[dict[str, int | None]]:
    """The requests whose ids differ: their number, and place and ids of the first difference.

    An id is None where the sequence has ended.
    """
    differing: list[dict[str, int | None]] = []
    for request, (one, other) in enumerate(zip(expected, found, strict=True)):
        for place, (a, b) in enumerate(itertools.zip_longest(one, other)):
            if a != b:
                differing.append({"request": request, "place": place, "expected": a, "found": b})
                break
    return differing
