"""Filling declared parameters: from safetensors, only the slices a rank needs, memory-mapped, or
with random values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_serve.errors import CheckpointError
from dflash_serve.models.weights import Piece, WeightPlan

__all__ = ["Checkpoint", "check", "load", "load_dummy"]

_DUMMY_BOUND = 1e-3
"""As vLLM and SGLang fill dummy weights: on a card that its power limit slows down, a step's time
depends on the values that are multiplied (measured: 5 % between these and wider normal ones)."""

_STORED_DTYPES = ("BF16", "F16", "F32")

Progress = Callable[[int, int], None]


class Checkpoint:
    """The tensors of a checkpoint folder (every *.safetensors in it).

    Raises:
        CheckpointError: no such files, or one that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            others = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt"))
            found = (
                f" (found {', '.join(others)}: pickled weights are never read)" if others else ""
            )
            raise CheckpointError(
                f"{self.folder} holds no *.safetensors file{found}; convert the checkpoint to "
                "safetensors"
            )
        for path in files:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}); the file may be cut off, "
                "fetch it again"
            ) from error
        for name in file.keys():  # noqa: SIM118 - not a dict
            # Some writers put "model." in front of every name and some do not.
            plain = name.removeprefix("model.")
            if plain in self._file_of:
                raise CheckpointError(
                    f"{plain} is in {self.folder} twice, the second time in {path.name}; "
                    "keep one set of *.safetensors files"
                )
            self._file_of[plain] = (file, name)

    @property
    def names(self) -> set[str]:
        """Tensor names, without a leading "model."."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that exists."""
        file, stored = self._file_of[name]
        return tuple(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Stored type of a tensor that exists, as safetensors names it."""
        file, stored = self._file_of[name]
        return str(file.get_slice(stored).get_dtype())

    def read(self, piece: Piece) -> Tensor:
        """The selected part of a tensor."""
        file, stored = self._file_of[piece.name]
        tensor: Tensor = file.get_slice(stored)[piece.select]
        return tensor

    def close(self) -> None:
        """Close every file."""
        self._stack.close()


def load(
    checkpoint: Checkpoint,
    plan: WeightPlan,
    *,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
) -> None:
    """Fill every declared parameter.

    Args:
        ignored: endings of tensor names that may be present and are not needed.
        progress: called with (pieces read, pieces in all).

    Raises:
        CheckpointError: as `check`, before the first tensor is read.
    """
    check(checkpoint, plan, ignored=ignored)
    for done, (parameter, piece) in enumerate(plan.pieces, start=1):
        parameter[piece.into].copy_(checkpoint.read(piece))
        if progress is not None:
            progress(done, len(plan.pieces))


def load_dummy(plan: WeightPlan, seed: int = 0, *, progress: Progress | None = None) -> None:
    """Fill every declared parameter with random values, norm weights with 1.

    What a slice holds follows from `seed`, its tensor's name and its place in that tensor, so that
    ranks which hold the same slice hold the same values. Other devices and other numbers of ranks
    see other models.

    Args:
        progress: called with (pieces filled, pieces in all).
    """
    generator = torch.Generator(plan.device)
    for done, (parameter, piece) in enumerate(plan.pieces, start=1):
        values = parameter[piece.into]
        if piece.name.endswith("norm.weight"):
            values.fill_(1.0)
        else:
            place = f"{seed} {piece.name} {[part.start for part in piece.select]}"
            generator.manual_seed(crc32(place.encode()))
            # What is drawn for rows that lie apart would differ from what is drawn side by side.
            drawn = values if values.is_contiguous() else values.new_empty(values.shape)
            drawn.uniform_(-_DUMMY_BOUND, _DUMMY_BOUND, generator=generator)
            if drawn is not values:
                values.copy_(drawn)
        if progress is not None:
            progress(done, len(plan.pieces))


def check(checkpoint: Checkpoint, plan: WeightPlan, *, ignored: Iterable[str] = ()) -> None:
    """Compare every declared parameter with what the checkpoint holds; reads no tensor.

    Raises:
        CheckpointError: tensors that are missing, left over, of another shape, or stored in a
            type that is no plain floating-point one.
    """
    endings = (*ignored, "rotary_emb.inv_freq")
    wanted = {piece.name: piece.shape for _, piece in plan.pieces}
    missing = sorted(set(wanted) - checkpoint.names)
    unexpected = sorted(n for n in checkpoint.names - set(wanted) if not n.endswith(endings))
    if missing:
        raise CheckpointError(f"{checkpoint.folder} lacks {_listing(missing)}")
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.folder} holds tensors no supported model has: {_listing(unexpected)}"
        )
    for name, shape in wanted.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{name} in {checkpoint.folder} is {list(checkpoint.shape(name))}, "
                f"but its config asks for {list(shape)}"
            )
        if checkpoint.dtype(name) not in _STORED_DTYPES:
            raise CheckpointError(
                f"{name} in {checkpoint.folder} is stored as {checkpoint.dtype(name)}; "
                f"supported: {', '.join(_STORED_DTYPES)} (quantised weights are not)"
            )


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
