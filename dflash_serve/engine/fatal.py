"""Rank 0's last words, as the error they were there (no torch)."""

from __future__ import annotations

from dflash_serve import errors
from dflash_serve.errors import DFlashError, EngineDeadError

__all__ = ["startup_error"]


def startup_error(fatal: str) -> DFlashError:
    """What rank 0 said before it was ready, as the error it was there."""
    name, _, text = fatal.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.ConfigError):
        return kind(text)
    return EngineDeadError(fatal)
