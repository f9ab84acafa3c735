"""From a family name to its class."""

from __future__ import annotations

from dflash_serve.models.decoder import DenseDecoder
from dflash_serve.models.llama import Llama
from dflash_serve.models.qwen3 import Qwen3

__all__ = ["target_class"]

_FAMILIES: dict[str, type[DenseDecoder]] = {"llama": Llama, "qwen3": Qwen3}


def target_class(family: str) -> type[DenseDecoder]:
    """Class of a family that `TargetConfig` accepted."""
    return _FAMILIES[family]
