"""`generate`: one prompt through the engine, with and without the draft."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.status import Status

from dflash_serve.api.codec import TextCodec
from dflash_serve.bench.measure import Measurement, StepTimer, measure, start_timed
from dflash_serve.config import EngineConfig
from dflash_serve.engine.checks import resolve_pair
from dflash_serve.engine.messages import Submit
from dflash_serve.sampling import SamplingParams

__all__ = ["generate"]


def generate(
    config: EngineConfig, prompt: str, params: SamplingParams, *, chat: bool, console: Console
) -> None:
    """Print the answer, tokens per step and step time, then the same without the draft.

    Raises:
        ConfigError, RequestError, EngineDeadError: as the engine does.
    """
    resolve_pair(config)  # a wrong folder is named before its missing tokenizer is
    codec = TextCodec.load(config.target)
    if chat and codec.has_chat_template:
        ids = codec.encode_chat([{"role": "user", "content": prompt}])
    else:
        ids = codec.encode(prompt)
    with_draft = _run(config, ids, params, console)
    console.print(codec.decode(with_draft.ids[0]), markup=False, highlight=False)
    console.rule(style="dim")
    drafted = "with the draft"
    if config.draft_quantization is not None:
        drafted = f"draft in {config.draft_quantization}"
    _describe(drafted if config.draft else "plain decoding", with_draft, console)
    if config.draft is None:
        return
    plain_config = dataclasses.replace(config, draft=None, verify_length=None, block_size=None)
    plain = _run(plain_config, ids, params, console)
    _describe("without it", plain, console)
    ratio = with_draft.tokens_per_second / plain.tokens_per_second
    same = "the same ids" if plain.ids == with_draft.ids else "DIFFERENT ids"
    console.print(f"{ratio:.2f} times plain decoding, {same}")


def _run(
    config: EngineConfig, prompt_ids: list[int], params: SamplingParams, console: Console
) -> Measurement:
    timer = StepTimer()
    what = "target and draft" if config.draft else "target"
    with Status(f"loading {what}", console=console):
        engine = start_timed(config, timer)
    try:
        submit = Submit(request_id="generate", prompt_ids=prompt_ids, params=params)
        with Status("generating", console=console):
            return measure(engine, timer, [submit], 1)
    finally:
        engine.shutdown()


def _describe(name: str, result: Measurement, console: Console) -> None:
    step = f"{result.percentile(0.5):.1f} ms per step, " if result.step_ms else ""
    console.print(
        f"{name:>14}: {len(result.ids[0])} tokens ({result.finish_reasons[0]}), "
        f"{result.tokens_per_step:.2f} tokens per step, {step}"
        f"{result.tokens_per_second:.1f} tokens/s"
    )
