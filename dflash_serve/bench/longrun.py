"""Proofs on one machine that take minutes: `python -m dflash_serve.bench.longrun --what …`.

identity: the ids of DFlash decoding are those of plain decoding. soak: tens of thousands of
sampled steps within all bounds and without a growing allocation. speed: tokens per second against
plain decoding. prefill: time of prompts alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_serve.bench.closed_loop import speed
from dflash_serve.bench.engines import pair_config
from dflash_serve.bench.identity import identity
from dflash_serve.bench.machine import describe_machine
from dflash_serve.bench.prefill import prefill
from dflash_serve.bench.soak import soak
from dflash_serve.config import EngineConfig
from dflash_serve.engine.checks import resolve_device
from dflash_serve.errors import DFlashError

__all__ = ["main"]

_FILLED_CHUNK = 8192
_MODES = {"identity": "block", "soak": "auto", "speed": "auto,plain", "prefill": "block"}


def _progress(text: str) -> None:
    print(text, flush=True)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _loads(text: str) -> list[tuple[int, int]]:
    """8x1024,1x8192 → [(8, 1024), (1, 8192)]."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(count), int(length)) for count, length in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dflash_serve.bench.longrun")
    parser.add_argument("--what", required=True, choices=list(_MODES))
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--target", default="dummy:qwen3-8b", help="a folder or a preset")
    parser.add_argument("--draft", default="dummy:qwen3-8b-b16", help="a folder or a preset")
    parser.add_argument("--layers", type=int, help="target layers of a preset")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--draft-quantization", choices=["fp8"], help="compute the draft in it")
    parser.add_argument("--kv-gib", type=float, help="memory for pages; enough if left out")
    parser.add_argument("--verify-length", help="by commas: plain, block, auto or numbers")
    parser.add_argument("--alpha", type=float, help="speed, soak: synthetic acceptance")
    parser.add_argument("--temperature", type=float, default=0.0, help="identity, speed")
    parser.add_argument("--batches", type=_integers, default=[1, 8], help="identity, speed")
    parser.add_argument("--plain-batches", type=_integers, default=[8], help="identity")
    parser.add_argument("--prompts", type=int, default=200, help="identity")
    parser.add_argument("--prompt-lengths", type=_integers, default=[8, 96], help="least, most")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40_000, help="soak")
    parser.add_argument("--sample-every", type=int, default=1000, help="soak")
    parser.add_argument("--settled-after", type=int, default=2000, help="soak")
    parser.add_argument("--context", type=int, default=1024, help="speed: tokens of a prompt")
    parser.add_argument(
        "--filled", action="store_true", help="speed: random contexts in place of prefill"
    )
    parser.add_argument("--rounds", type=int, default=3, help="speed: requests in each place")
    parser.add_argument("--repeats", type=int, help="speed: 3; prefill: 5")
    parser.add_argument("--loads", type=_loads, help="prefill: 8x1024,1x8192; packed 16x64 too")
    parser.add_argument("--chunks", type=_integers, default=[1024, 2048, 8192], help="prefill")
    parser.add_argument(
        "--pack", action="store_true", help="prefill: with and without pack_prompts"
    )
    return parser


def _config(options: argparse.Namespace, folder: Path) -> EngineConfig:
    """The pair with room for the largest batch of the longest requests."""
    what = options.what
    batch = 8 if what == "soak" else max(options.batches + options.plain_batches)
    length = max(options.prompt_lengths) + options.max_tokens
    if what == "speed":
        batch, length = max(options.batches), options.context + options.max_tokens
    if what == "prefill":
        batch = max(count for count, _ in options.loads)
        length = max(length for _, length in options.loads) + 1
    length = -(-(length + 1) // 64) * 64
    config = pair_config(
        options.target,
        options.draft,
        folder,
        layers=options.layers,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        draft_quantization=options.draft_quantization,
        kv_cache_gib=options.kv_gib,
        max_running=batch,
        max_model_len=length,
        prefix_cache=False,
        synthetic_acceptance=options.alpha if what in ("speed", "soak") else None,
    )
    if what == "speed" and options.filled:
        # Prompts that take no time still enter by the chunk: large ones fill the batch sooner.
        config = dataclasses.replace(config, prefill_chunk=max(_FILLED_CHUNK, options.context))
    return config


def _work(options: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    modes = (options.verify_length or _MODES[options.what]).split(",")
    shortest, longest = options.prompt_lengths
    if options.what == "identity":
        return identity(
            config,
            modes,
            batches=options.batches,
            plain_batches=options.plain_batches,
            prompts=options.prompts,
            prompt_lengths=(shortest, longest),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            progress=_progress,
        )
    if options.what == "soak":
        return soak(
            config,
            modes[0],
            steps=options.steps,
            prompt_lengths=(shortest, longest),
            max_tokens=options.max_tokens,
            sample_every=options.sample_every,
            settled_after=options.settled_after,
            progress=_progress,
        )
    if options.what == "speed":
        return speed(
            config,
            modes,
            batches=options.batches,
            context=options.context,
            max_tokens=options.max_tokens,
            rounds=options.rounds,
            repeats=options.repeats or 3,
            temperature=options.temperature,
            progress=_progress,
            filled=options.filled,
        )
    return prefill(
        config,
        modes,
        loads=options.loads,
        chunks=options.chunks,
        repeats=options.repeats or 5,
        packed=[False, True] if options.pack else [False],
        progress=_progress,
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    options = _parser().parse_args(arguments)
    if options.loads is None:
        options.loads = [(8, 1024), *([(16, 64)] if options.pack else []), (1, 8192)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = _config(options, Path(folder))
            device, _ = resolve_device(config)
            if config.draft_quantization is not None:
                _progress(f"the draft is computed in {config.draft_quantization}")
            found = _work(options, config)
        except DFlashError as error:
            sys.exit(f"error: {error}")
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    report = {
        "machine": describe_machine(device),
        "settings": settings,
        "wall_seconds": time.perf_counter() - began,
        **found,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
