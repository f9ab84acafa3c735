"""Checkpoint folders with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

__all__ = ["copy_of", "edit_config", "edit_tensors", "write_tokenizer"]

REMOVED = object()
"""As a value in `edit_config`: take the field away."""


def copy_of(folder: str | Path, into: Path) -> Path:
    """A private copy of a checkpoint."""
    shutil.copytree(folder, into)
    return into


def edit_config(folder: Path, fields: Mapping[str, object]) -> None:
    """Change fields of config.json; "a.b" names field b of object a."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        *parents, last = name.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        if value is REMOVED:
            place.pop(last, None)
        else:
            place[last] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite model.safetensors after `change` has had its way with the tensors."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def write_tokenizer(folder: Path, tokens: Mapping[str, int]) -> None:
    """A tokenizer.json with exactly these tokens."""
    Tokenizer(WordLevel(dict(tokens), unk_token="?")).save(str(folder / "tokenizer.json"))
