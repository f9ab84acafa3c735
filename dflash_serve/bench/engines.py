"""What the long runs share: a pair by name, its variants, and engines that leave no memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_serve.bench.dummy import is_dummy, resolve_dummy
from dflash_serve.config import EngineConfig
from dflash_serve.engine.client import EngineClient
from dflash_serve.engine.executors import start_engine
from dflash_serve.engine.inproc import InprocExecutor
from dflash_serve.engine.messages import Submit
from dflash_serve.engine.rank import OnReady
from dflash_serve.errors import ConfigError
from dflash_serve.sampling import SamplingParams

__all__ = ["pair_config", "random_prompts", "requests", "running", "variant"]


def pair_config(
    target: str, draft: str, folder: Path, *, layers: int | None = None, **fields: Any
) -> EngineConfig:
    """Configuration of checkpoints in folders, or of presets of `bench.dummy`.

    Args:
        folder: where presets are written.
        layers: target layers of a preset, in place of its own; the draft taps as many of them.
        fields: further fields of EngineConfig; `load_format` is "dummy" for presets.

    Raises:
        ConfigError: an unknown preset, or settings that are no configuration.
    """
    if is_dummy(target):
        fields["load_format"] = "dummy"
    return EngineConfig(
        target=_resolve(target, folder, layers), draft=_resolve(draft, folder, layers), **fields
    )


def _resolve(name: str, folder: Path, layers: int | None) -> str:
    if not is_dummy(name):
        return str(Path(name).expanduser())
    path = resolve_dummy(name, folder)
    if layers is None:
        return str(path)
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if "dflash_config" in fields:
        taps = len(fields["dflash_config"]["target_layer_ids"])
        places = [1 + i * (layers - 4) // (taps - 1) for i in range(taps)]
        fields["dflash_config"]["target_layer_ids"] = places
        fields["num_target_layers"] = layers
    else:
        fields["num_hidden_layers"] = layers
    cut = path.with_name(f"{path.name}-{layers}")
    cut.mkdir(exist_ok=True)
    (cut / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(cut)


def variant(config: EngineConfig, mode: str) -> EngineConfig:
    """The pair with another verify length: "plain", "block", "auto" or a number of rows.

    Raises:
        ConfigError: another mode.
    """
    if mode == "plain":
        return dataclasses.replace(
            config, draft=None, verify_length=None, block_size=None, synthetic_acceptance=None
        )
    if mode == "block":
        return dataclasses.replace(config, verify_length=None)
    if mode == "auto":
        return dataclasses.replace(config, verify_length="auto")
    if not mode.isdigit():
        raise ConfigError(f"verify length {mode!r}; allowed: plain, block, auto or a number")
    return dataclasses.replace(config, verify_length=int(mode))


@contextlib.contextmanager
def running(config: EngineConfig, on_ready: OnReady | None = None) -> Iterator[EngineClient]:
    """An engine in this process, whose memory is free again afterwards."""
    engine = start_engine(config, InprocExecutor(config, on_ready))
    try:
        yield engine
    finally:
        engine.shutdown()
        # The engine took its objects away from the collector, and some of them lie in cycles.
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def random_prompts(
    count: int, lengths: tuple[int, int], vocab: int, seed: int = 0
) -> list[list[int]]:
    """Prompts of random ids below `vocab`, with lengths from the first to the last inclusive."""
    rng = random.Random(seed)
    return [rng.choices(range(vocab), k=rng.randint(*lengths)) for _ in range(count)]


def requests(
    name: str, prompts: Sequence[list[int]], max_tokens: int, temperature: float
) -> list[Submit]:
    """A request for each prompt, seeded by its number, that ends at `max_tokens` only."""
    return [
        Submit(
            request_id=f"{name}-{i}",
            prompt_ids=prompt,
            params=SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
