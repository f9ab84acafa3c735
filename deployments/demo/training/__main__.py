"""Make the data, train the draft, measure it: ``python -m deployments.demo.training``."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from .generate import generate
from .settings import DataSettings, DraftSettings, TrainSettings
from .target import Target
from .train import Benchmark, Conversations, Trainer, train


def read_benchmarks(path: Path | None) -> list[Benchmark]:
    """Read prompts and answers written by ``deployments.demo.evaluate --answers``."""
    if path is None:
        return []
    return [Benchmark(name, *pair) for name, pair in json.loads(path.read_text()).items()]


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="prepared checkpoint folder")
    parser.add_argument("--data", type=Path, default=Path("conversations.npz"))
    parser.add_argument("--output", type=Path, default=Path("draft"))
    parser.add_argument("--benchmarks", type=Path, help="JSON of prompts and greedy answers")
    parser.add_argument("--data-seconds", type=float, default=190)
    parser.add_argument("--data-only", action="store_true")
    parser.add_argument("--steps", type=int, default=12_161)
    parser.add_argument("--seconds", type=float, default=0, help="schedule by time, not by steps")
    parser.add_argument("--evaluate-every", type=int, default=1_500)
    parser.add_argument("--train", default="{}", help="JSON overrides of TrainSettings")
    parser.add_argument("--draft", default="{}", help="JSON overrides of DraftSettings")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    """Run whatever is missing: data first, then training."""
    arguments = parse()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Target(arguments.target.expanduser(), device, dtype)
    if not arguments.data.exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.target.expanduser())
        held_out = [row for b in read_benchmarks(arguments.benchmarks) for row in b.prompts]
        seconds, path = arguments.data_seconds, arguments.data
        generate(target, tokenizer, DataSettings(), seconds, path, held_out)
    if arguments.data_only:
        return
    shape = json.loads(arguments.draft)
    if "target_layer_ids" in shape:
        shape["target_layer_ids"] = tuple(shape["target_layer_ids"])
    settings = replace(
        TrainSettings(), draft=replace(DraftSettings(), **shape), **json.loads(arguments.train)
    )
    print("train:", json.dumps(settings.describe()), flush=True)
    data = Conversations(arguments.data, settings, device)
    trainer = Trainer(target, data, settings, arguments.steps, arguments.seconds)
    train(
        trainer,
        read_benchmarks(arguments.benchmarks),
        arguments.output,
        arguments.evaluate_every,
    )


if __name__ == "__main__":
    main()
