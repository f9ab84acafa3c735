"""Private folders for the local sockets of one engine, removed even after a SIGKILL.

A folder lives as long as its owner holds the lock on the file inside. Whoever creates the next
one on the same host removes those whose owner is gone; nothing depends on a killed process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["RunDir"]

_LOCK = "owner.lock"


class RunDir:
    """A folder only this user can enter, for socket files.

    Args:
        base: parent folder; the default keeps socket paths below the 107 bytes a Unix socket
            address may have.
    """

    def __init__(self, base: Path | None = None) -> None:
        parent = base or Path(tempfile.gettempdir()) / f"dflash-serve-{os.getuid()}"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{parent} belongs to another user; set TMPDIR to your own")
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(dir=parent))
        # Locked first and named second, so that a sweeper never sees it unlocked.
        unnamed = self.path / "new.lock"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Delete the folder and all in it. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path)
        os.close(self._lock)
        self._lock = -1


def _sweep(parent: Path) -> None:
    for folder in parent.iterdir():
        if _abandoned(folder / _LOCK):
            # A second sweeper may be at it as well: losing that race is fine.
            shutil.rmtree(folder, ignore_errors=True)


def _abandoned(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # being created or being removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
