"""Why ranks ended, as Ray tells it, and which of several ends explains the others."""

from __future__ import annotations

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from dflash_serve.errors import DFlashError

__all__ = ["describe_death", "error_of", "weigh"]


def describe_death(rank: int, error: BaseException | None) -> str:
    """Why a rank ended, in one line: rank, kind, text."""
    if error is None:
        return f"rank {rank} stopped by itself"
    if isinstance(error, RayTaskError):
        cause = error.cause if error.cause is not None else error
        return f"rank {rank} failed: {type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        return f"rank {rank} died: its process was killed or crashed"
    return f"rank {rank} failed: {type(error).__name__}: {error}"


def error_of(ref: ray.ObjectRef) -> BaseException | None:
    """What a call that has ended raised, or None."""
    try:
        ray.get(ref)
    except RayError as error:
        cause: BaseException = error
        return cause
    return None


def weigh(error: BaseException | None) -> int:
    """0 for a death or an error raised on purpose; 1 for what may only be its echo."""
    if isinstance(error, RayTaskError):
        return 0 if isinstance(error.cause, DFlashError) else 1
    return 0 if isinstance(error, RayActorError) else 1
