"""A draft that scores each position as the target does has every row accepted.

This holds only if draft and target rows for one position use the same noise, temperature and
truncation: an off-by-one in either shows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_serve.engine.messages import Submit, TokenEvent
from dflash_serve.engine.runner import Runner
from dflash_serve.sampling import SamplingParams
from tests.engine.drafting import Replay
from tests.engine.harness import accepted_lengths, engine_config, prompts
from tests.engines import ids_of, start
from tests.tiny import TinyPair

BLOCK, MAX_TOKENS = 8, 41
SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.6, "min_p": 0.1},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
]


def submits(max_tokens: int) -> list[Submit]:
    """One request per setting."""
    return [
        Submit(
            request_id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens,
                seed=70 + i,
                ignore_eos=True,
                **SETTINGS[i],  # type: ignore[arg-type]
            ),
        )
        for i, prompt in enumerate(prompts(len(SETTINGS)))
    ]


def record(pair: TinyPair) -> tuple[dict[int, tuple[int, Tensor]], dict[str, list[int]]]:
    """Logits of every position by seed, and ids, from plain decoding one request at a time."""
    rows: list[Tensor] = []

    def listen(runner: Runner) -> None:
        head = runner.pair.target.head
        apply = head.apply

        def recording(hidden: Tensor) -> Tensor:
            rows.append(apply(hidden))
            return rows[-1]

        head.apply = recording  # type: ignore[method-assign]

    engine = start(engine_config(pair, draft=False), listen)
    logits, ids = {}, {}
    try:
        for submit in submits(MAX_TOKENS + BLOCK):
            rows.clear()
            ids[submit.request_id] = ids_of(engine.collect([submit])[submit.request_id])
            logits[submit.params.seed] = (len(submit.prompt_ids), torch.cat(rows))
    finally:
        engine.shutdown()
    return logits, ids


def check(events: dict[str, list[TokenEvent]], ids: dict[str, list[int]]) -> None:
    """Every row of every block that was not cut short is accepted."""
    for request_id, mine in events.items():
        assert ids_of(mine) == ids[request_id][:MAX_TOKENS]
        lengths = accepted_lengths(mine)
        assert len(lengths) >= (MAX_TOKENS - 1) // BLOCK - 1
        assert set(lengths) == {BLOCK - 1}, request_id


def test_replayed_target_scores_are_always_accepted(pair: TinyPair) -> None:
    logits, ids = record(pair)
    engine = start(engine_config(pair), Replay(logits).install)
    try:
        check(engine.collect(submits(MAX_TOKENS)), ids)
        for submit in submits(MAX_TOKENS):
            check(engine.collect([submit]), ids)
    finally:
        engine.shutdown()


def test_replayed_target_scores_are_always_accepted_across_two_ranks(pair: TinyPair) -> None:
    logits, ids = record(pair)
    engine = start(engine_config(pair, tp=2), Replay(logits).install)
    try:
        check(engine.collect(submits(MAX_TOKENS)), ids)
    finally:
        engine.shutdown()
