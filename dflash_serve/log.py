"""One logger per module, with the rank in front once a process knows it."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["configure", "get_logger"]


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure(level: str = "INFO", rank: int | None = None) -> None:
    """Send this package's log lines to stderr, once per process.

    Args:
        level: a level name of the logging module.
        rank: tensor-parallel rank of this process, shown in each line.
    """
    where = f"rank {rank}" if rank is not None else f"pid {os.getpid()}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{where}] %(message)s"))
    root = logging.getLogger("dflash_serve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
