"""POST /admin/trace and the command that asks for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from dflash_serve import cli
from dflash_serve.api.app import create_app
from dflash_serve.api.codec import TextCodec
from dflash_serve.api.replica import LocalBackend, TextEngine
from dflash_serve.errors import ConflictError, EngineDeadError
from tests.api.answers import connect, error_of
from tests.api.fakes import MODEL, FakeEngine


@pytest.fixture
def backend(engine: FakeEngine, codec: TextCodec) -> LocalBackend:
    """One model over the scripted engine."""
    return LocalBackend(TextEngine(engine, codec, MODEL))


async def post(backend: LocalBackend, body: object, *, admin: bool = True) -> httpx.Response:
    async with connect(create_app(backend, admin=admin)) as client:
        return await client.post("/admin/trace", json=body)


async def test_admin_is_refused_with_what_to_do_unless_switched_on(backend: LocalBackend) -> None:
    async with connect(create_app(backend)) as client:
        response = await client.post("/admin/trace", json={"steps": 3})
    assert response.status_code == 403
    assert "admin: true" in error_of(response)["message"]


async def test_an_order_reaches_the_engine_and_its_files_come_back(backend: LocalBackend) -> None:
    response = await post(backend, {"steps": 3, "timeout_s": 5, "model": MODEL})
    assert response.status_code == 200, response.text
    assert response.json()["paths"] == ["3 in 5 s"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "steps"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": "three"}, "steps"),
        ({"steps": 1, "timeout_s": 10_000}, "timeout_s is 10000"),
        ({"steps": 1, "folder": "/etc"}, "folder"),
        ({"steps": 1, "model": "other"}, "other"),
        ({"steps": 1, "replica": "7"}, "'7'"),
    ],
)
async def test_an_order_out_of_bounds_is_refused_by_name(
    body: dict[str, object], word: str, backend: LocalBackend
) -> None:
    response = await post(backend, body)
    assert response.status_code == 400
    assert word in error_of(response)["message"]


@pytest.mark.parametrize(
    ("error", "status"), [(ConflictError("taken already"), 409), (EngineDeadError("gone"), 503)]
)
async def test_what_the_engine_says_becomes_a_status(
    error: Exception, status: int, backend: LocalBackend, engine: FakeEngine
) -> None:
    engine.health = error
    response = await post(backend, {"steps": 1})
    assert response.status_code == status


@pytest.fixture
def url(backend: LocalBackend) -> Iterator[str]:
    """The application on a real socket."""
    app = create_app(backend, admin=True)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()  # the listener takes connections already
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_the_command_names_the_files_or_copies_them(
    url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    source = tmp_path / "trace-rank0.json"
    source.write_text("{}")
    engine.trace_files = [str(source)]
    run = CliRunner().invoke
    assert run(cli.app, ["trace", "3", "--url", url]).output.split() == [str(source)]
    result = run(cli.app, ["trace", "3", "--url", url, "--output", str(tmp_path / "out")])
    copy = tmp_path / "out" / source.name
    assert result.output.split() == [str(copy)]
    assert copy.read_text() == "{}"
    source.unlink()
    result = run(cli.app, ["trace", "3", "--url", url, "--output", str(tmp_path / "out")])
    assert (result.exit_code, "cannot be copied" in result.output) == (2, True)


def test_the_command_says_why_there_is_no_trace(url: str, engine: FakeEngine) -> None:
    engine.health = ConflictError("a trace is being taken already")
    result = CliRunner().invoke(cli.app, ["trace", "3", "--url", url])
    assert result.exit_code == 2
    assert "a trace is being taken already" in result.output
    for wrong in ("file:///etc/passwd", "http://127.0.0.1:1"):
        assert CliRunner().invoke(cli.app, ["trace", "3", "--url", wrong]).exit_code == 2
