"""Who may talk to a Ray that local mode starts, and from where."""

import contextlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_serve.errors import ConfigError
from dflash_serve.serve.processes import descendants
from dflash_serve.serve.token import ensure_token

TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """An empty home folder, and no token in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_for_its_owner_only(home):
    path = ensure_token()
    token = path.read_text()
    assert path == home / ".ray" / "auth_token"
    assert mode(path) == 0o600
    assert len(token) >= 32
    assert ensure_token() == path
    assert path.read_text() == token


def test_a_token_that_is_there_is_kept_and_made_private(home):
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("mine")
    path.chmod(0o644)
    assert ensure_token() == path
    assert path.read_text() == "mine"
    assert mode(path) == 0o600


def test_an_empty_token_file_is_replaced(home):
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.touch()
    assert ensure_token().read_text()


def test_a_token_in_the_environment_is_taken(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    assert ensure_token() is None
    assert not (home / ".ray").exists()


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_named_file_without_a_token_is_refused(home, monkeypatch, text):
    named = home / "named"
    if text is not None:
        named.write_text(text)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    with pytest.raises(ConfigError, match="which holds no token; name a file that does"):
        ensure_token()


SERVER = """
from dflash_serve.serve import local
from dflash_serve.serve.settings import ServeSettings
local._set_environment()
local._start_ray(local._Plan(ServeSettings(target="/m/t"), {}, {}, None))
import ray
print("address", ray.get_runtime_context().gcs_address, flush=True)
input()
local.stop()
"""
CLIENT = """
import sys, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
print("answer", ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@contextlib.contextmanager
def started_locally(environment):
    """A Ray as local mode starts it: its process and address."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            line = next(line for line in server.stdout if line.startswith("address "))
            yield server.pid, line.split()[1]
        finally:
            server.communicate("\n", timeout=60)


def listening(pids):
    """Addresses these processes listen on for TCP, as the kernel writes them."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    sockets.update(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].rpartition(":")[0])
    return found


LOOPBACK = {
    "0100007F",  # 127.0.0.1
    "0000000000000000FFFF00000100007F",  # the same in IPv6's form
    "00000000000000000000000001000000",  # ::1
}


def run(command, environment):
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


@pytest.mark.ray
@pytest.mark.slow
def test_only_who_has_the_token_submits_and_joins_and_only_from_this_host(home, tmp_path):
    plain = {key: value for key, value in os.environ.items() if key not in TOKENS}
    plain["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or a client looks elsewhere than here
    own = plain | {"HOME": str(home)}
    (tmp_path / "other").mkdir()
    stranger = plain | {"HOME": str(tmp_path / "other"), "RAY_AUTH_MODE": "token"}
    ray_command = str(Path(sys.executable).with_name("ray"))
    with started_locally(own) as (pid, address):
        addresses = listening({pid, *descendants(pid)})
        assert addresses
        assert set(addresses) <= LOOPBACK
        submit = [sys.executable, "-c", CLIENT, address]
        token_path = str(home / ".ray" / "auth_token")
        for environment in (
            stranger,
            stranger | {"RAY_AUTH_TOKEN": "guessed"},
            plain | {"RAY_AUTH_MODE": "disabled"},
        ):
            refused = run(submit, environment)
            assert refused.returncode != 0
            assert "answer" not in refused.stdout
            joined = run(
                [ray_command, "start", f"--address={address}", "--num-cpus=1"], environment
            )
            assert joined.returncode != 0, joined.stdout + joined.stderr
        allowed = run(submit, stranger | {"RAY_AUTH_TOKEN_PATH": token_path})
        assert "answer 42" in allowed.stdout, allowed.stderr
