"""Telling a real difference of ids from one that rounding explains."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_serve.engine.messages import Submit
from dflash_serve.kernels.noise import gumbel
from tests.engine.rows import kept_ids

__all__ = ["TIE", "count_difference", "defined_ids", "greedy_ids", "reference_model"]

TIE = 1e-5
"""Perturbed scores closer than this may come out in either order: products of different row
counts round differently."""


@functools.lru_cache(maxsize=4)
def reference_model(folder: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A target as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def greedy_ids(folder: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Continuation by transformers' own greedy generate, end-of-sequence ids ignored."""
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


@torch.inference_mode()
def score_gap(folder: str, submit: Submit, prefix: Sequence[int], a: int, b: int) -> float:
    """Distance of two ids' scores, logit + T · G, after prompt and `prefix`, in float64."""
    tokens = [*submit.prompt_ids, *prefix]
    model = reference_model(folder, torch.float64)
    scores = model(torch.tensor([tokens])).logits[0, -1]
    if submit.params.temperature > 0:
        seed, position = torch.tensor([submit.params.seed]), torch.tensor([len(tokens)])
        noise = gumbel(seed, position, 0, scores.shape[0])[0].double()
        scores = scores + submit.params.temperature * noise
    return float((scores[a] - scores[b]).abs())


@torch.inference_mode()
def defined_ids(folder: str, submit: Submit, ids: Sequence[int]) -> list[int]:
    """For each place of `ids`, the id that the sampling formula gives after those before it."""
    params, tokens = submit.params, [*submit.prompt_ids, *ids]
    first = len(submit.prompt_ids)
    logits = reference_model(folder, torch.float64)(torch.tensor([tokens[:-1]])).logits[0]
    chosen = []
    for position in range(first, len(tokens)):
        row = logits[position - 1]
        noise = gumbel(torch.tensor([params.seed]), torch.tensor([position]), 0, len(row))[0]
        score = row + params.temperature * noise.double()
        kept = kept_ids(row, params.temperature, params.top_k, params.top_p, params.min_p)
        chosen.append(max(sorted(kept), key=lambda i: float(score[i])))
    return chosen


def count_difference(
    folder: str, submit: Submit, expected: Sequence[int], got: Sequence[int]
) -> int:
    """0 where ids are equal, 1 where the first difference is a near tie; anything else fails."""
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a != b:
            gap = score_gap(folder, submit, expected[:i], a, b)
            assert gap <= TIE, (
                f"{submit.request_id}: output {i} is {b}, expected {a}; scores {gap} apart"
            )
            return 1
    return 0
