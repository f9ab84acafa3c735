"""A temporary folder for a Ray of one's own, and the environment of every process in it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ROOT", "own_folder"]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def own_folder(prefix: str, keep: bool) -> Iterator[Path]:
    """A temporary folder for all that is started, with a short name: sockets lie deep in it.

    Args:
        prefix: of its name.
        keep: leave it behind, and say where it is.
    """
    folder = tempfile.mkdtemp(prefix=prefix)
    # Read by Ray when it is imported, and inherited by every process it starts.
    os.environ |= {
        "TMPDIR": folder,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    tempfile.tempdir = None
    try:
        yield Path(folder)
    finally:
        if keep:
            print(f"logs and records are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
