"""Which beginning of a request a replica has seen, and which session it serves (no Ray).

The front end has no tokenizer, so a prefix is one of bytes: of the prompt's text, of the roles and
contents of the messages, or of the token ids where the client sent ids. It is cut into blocks of
equal size, each hashed together with all before it, as `cache.pages.page_key` does with tokens;
equal blocks then mean equal beginnings. Blocks are hints only: what a replica really has cached
is its own to find.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["BYTES_PER_TOKEN", "Asked", "PrefixIndex", "SessionTable", "read_asked"]

_DIGEST_BYTES = 8
BYTES_PER_TOKEN = 4
"""Bytes a token counts as: text is about that, ids are written so."""


class _Message(msgspec.Struct):
    role: str = ""
    content: str = ""


class _Fields(msgspec.Struct):
    """The fields of a `GenerationRequest` that routing reads; the others are skipped."""

    messages: list[_Message] | None = None
    prompt: str | list[int] | None = None
    cache_salt: str = ""
    session: str = ""


_fields = msgspec.msgpack.Decoder(_Fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What routing knows of a request.

    Attributes:
        blocks: a key for each full block of its beginning; equal keys, equal beginnings.
        session: a key of the client's session, or None.
    """

    blocks: tuple[bytes, ...] = ()
    session: bytes | None = None


def read_asked(data: bytes, block_bytes: int, max_blocks: int) -> Asked:
    """Read what routing needs out of an encoded `GenerationRequest`.

    Anything that cannot be read has no prefix and no session: it is the replica that refuses it.

    Args:
        data: as `wire.encode_request` wrote it.
        block_bytes: size of a block in bytes.
        max_blocks: blocks looked at; what comes after them is not.
    """
    try:
        fields = _fields.decode(data)
        content = _content(fields, block_bytes * max_blocks)
    except (msgspec.DecodeError, OverflowError, UnicodeEncodeError):
        return Asked()
    session = _digest(b"session", fields.session.encode()) if fields.session else None
    return Asked(_block_keys(content, fields.cache_salt, block_bytes, max_blocks), session)


def _content(fields: _Fields, limit: int) -> bytes:
    """The request's beginning, `limit` bytes or more of it."""
    if fields.messages is None:
        if isinstance(fields.prompt, str):
            return fields.prompt[:limit].encode()
        return array("I", (fields.prompt or [])[: limit // BYTES_PER_TOKEN + 1]).tobytes()
    parts: list[bytes] = []
    size = 0
    for message in fields.messages:
        # Lengths stay out: a message that goes on where a shorter one ended begins like it.
        parts.append(f"{message.role}\0{message.content[:limit]}\0".encode())
        size += len(parts[-1])
        if size >= limit:
            break
    return b"".join(parts)


def _block_keys(content: bytes, salt: str, block_bytes: int, max_blocks: int) -> tuple[bytes, ...]:
    keys = []
    key = _digest(b"prefix", salt.encode())
    for number in range(min(len(content) // block_bytes, max_blocks)):
        key = _digest(key, content[number * block_bytes : (number + 1) * block_bytes])
        keys.append(key)
    return tuple(keys)


def _digest(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=parent, digest_size=_DIGEST_BYTES).digest()


class PrefixIndex:
    """The blocks that each replica was sent, the least recently used ones dropped.

    Args:
        max_blocks: most blocks kept per replica.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks kept, of all replicas together."""
        return sum(map(len, self._blocks.values()))

    def size(self, replica: str) -> int:
        """Blocks kept of one replica."""
        return len(self._blocks.get(replica, ()))

    def limit(self, replica: str, blocks: int) -> None:
        """Keep at most so many of a replica's blocks: it cannot have more cached itself."""
        self._limits[replica] = min(self._max_blocks, max(1, blocks))
        self._trim(replica)

    def learn(self, replica: str, keys: Sequence[bytes]) -> None:
        """Note that a replica has been sent these blocks, a request's beginning."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        for key in reversed(keys):  # so that beginnings outlive ends
            blocks[key] = None
            blocks.move_to_end(key)
        self._trim(replica)

    def overlap(self, replica: str, keys: Iterable[bytes]) -> int:
        """How many of the leading `keys` a replica has been sent."""
        blocks = self._blocks.get(replica)
        count = 0
        if blocks:
            for key in keys:
                if key not in blocks:
                    break
                count += 1
        return count

    def forget(self, replica: str) -> None:
        """Drop what is known of a replica: it is gone, or its cache is."""
        self._blocks.pop(replica, None)
        self._limits.pop(replica, None)

    def _trim(self, replica: str) -> None:
        blocks = self._blocks.get(replica)
        most = self._limits.get(replica, self._max_blocks)
        while blocks and len(blocks) > most:
            blocks.popitem(last=False)


class SessionTable:
    """The replica that served each session last, the sessions longest unheard of dropped.

    Args:
        max_sessions: most sessions kept.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        """Sessions kept."""
        return len(self._replicas)

    def replica(self, session: bytes) -> str | None:
        """Where a session was served last, if that is known."""
        return self._replicas.get(session)

    def served(self, session: bytes, replica: str) -> None:
        """Note where a session is served now."""
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Drop the sessions of a replica."""
        for session in [s for s, name in self._replicas.items() if name == replica]:
            del self._replicas[session]
