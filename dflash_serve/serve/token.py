"""The token without which nobody talks to a Ray started here.

Ray makes one itself where there is none, readable for everyone who can read the home folder.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from dflash_serve.errors import ConfigError

__all__ = ["ensure_token"]

_BITS = 256
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def ensure_token() -> Path | None:
    """Make sure that there is a token, in a file that only its owner can read.

    Ray reads `RAY_AUTH_TOKEN`, then the file that `RAY_AUTH_TOKEN_PATH` names, then
    `~/.ray/auth_token`. What the first two give is left as it is; the last is made, or made
    private.

    Returns:
        The file, or None where the token is in the environment.

    Raises:
        ConfigError: `RAY_AUTH_TOKEN_PATH` names no file, or one without a token.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if named:
        path = Path(named)
        if not path.is_file() or not path.read_text().strip():
            raise ConfigError(
                f"RAY_AUTH_TOKEN_PATH is {named!r}, which holds no token; name a file that does, "
                "or unset it and one is made"
            )
        return path
    path = Path.home() / ".ray" / "auth_token"
    if path.is_file() and path.read_text().strip():
        if path.stat().st_mode & _FOR_OTHERS:
            path.chmod(0o600)
        return path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    # Private from the first byte on, and nobody else's file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_BITS // 8))
    return path
