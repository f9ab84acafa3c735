"""Loading a pair in tests, and what it refuses."""

from __future__ import annotations

import pytest

from dflash_serve.config import EngineConfig
from dflash_serve.engine.pair import Pair, load_pair
from dflash_serve.errors import ConfigError
from dflash_serve.models.loader import Checkpoint
from dflash_serve.parallel.group import Single
from tests.tiny import TinyPair

__all__ = ["load", "refusal"]


def load(pair: TinyPair, **fields: object) -> Pair:
    """Load on one CPU rank."""
    settings = {"device": "cpu", "max_model_len": 64} | fields
    return load_pair(EngineConfig(target=pair.target, draft=pair.draft, **settings), Single())  # type: ignore[arg-type]


def refusal(
    pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[ConfigError] = ConfigError,
    **fields: object,
) -> str:
    """Text of the error that loading ends with; fails when a weight was read before."""

    def read(_self: Checkpoint, piece: object) -> None:
        raise AssertionError(f"{piece} was read before the refusal")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(ConfigError) as caught:
        load(pair, **fields)
    assert isinstance(caught.value, kind), f"{type(caught.value).__name__}: {caught.value}"
    return str(caught.value)
