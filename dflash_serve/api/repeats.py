"""The same request sent again while it still runs: a client that lost its connection and retries.

What makes two requests the same is the id their client gave them (x-request-id) and their body.
Gateways give one id to several calls of a user, so the id alone says nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import msgspec
from starlette.datastructures import Headers

from dflash_serve.api.failures import RepeatedRequestError

__all__ = ["RunningRequests"]

Key: TypeAlias = tuple[str, bytes]


class RunningRequests:
    """The requests of one front end that carry an id of their client's, while they run."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()

    def begin(self, headers: Headers, path: str, body: dict[str, Any]) -> Key | None:
        """Note a request; None where its client gave it no id.

        Raises:
            RepeatedRequestError: the same one runs already.
        """
        request_id = headers.get("x-request-id")
        if request_id is None:
            return None
        data = path.encode() + b"\0" + msgspec.json.encode(body, order="sorted")
        key = (request_id, hashlib.blake2b(data, digest_size=16).digest())
        if key in self._keys:
            raise RepeatedRequestError(
                f"request {request_id!r:.140} with this very body is being answered already; wait "
                "for that answer, or send it again once its connection is closed"
            )
        self._keys.add(key)
        return key

    def end(self, key: Key | None) -> None:
        """Forget a request that `begin` noted."""
        if key is not None:
            self._keys.discard(key)
