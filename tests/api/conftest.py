"""Fixtures of the API tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import LocalBackend, TextEngine
from tests.api.answers import STORY, connect
from tests.api.fakes import MODEL, FakeEngine, save_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer files and no weights."""
    return save_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def codec(checkpoint: Path) -> TextCodec:
    """The tokenizer of `checkpoint`."""
    return TextCodec.load(str(checkpoint))


@pytest.fixture
def make_text_engine(codec: TextCodec) -> Callable[..., tuple[TextEngine, FakeEngine]]:
    """Makes a text engine over a scripted one that writes a text."""

    def make(text: str, block: int = 8, **options: Any) -> tuple[TextEngine, FakeEngine]:
        engine = FakeEngine(codec.encode(text), block, **options)
        return TextEngine(engine, codec, MODEL), engine

    return make


@pytest.fixture
def engine(codec: TextCodec) -> FakeEngine:
    """Writes the story, eight ids per step."""
    return FakeEngine(codec.encode(STORY), 8)


@pytest.fixture
def app(engine: FakeEngine, codec: TextCodec) -> FastAPI:
    """The application over `engine`."""
    return create_app(LocalBackend(TextEngine(engine, codec, MODEL, {"target": "folder"})))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to `app` without a socket."""
    async with connect(app) as connected:
        yield connected
