import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from dflash_serve.errors import ConfigError
from dflash_serve.serve import local, sample
from dflash_serve.serve.processes import await_exit, descendants
from dflash_serve.serve.validate import BUILDER, MODEL_BUILDER
from tests.tiny import VALID_VOCAB, make_pair

from .conftest import free_port, write_tokenizer
from .streams import StreamReader
from .waiting import until


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    application = {"name": "a", "import_path": BUILDER, "args": {"target": str(tmp_path / "t")}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def test_a_taken_port_gives_the_next_free_one(config, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1]
        plan = local._plan(config, None, wanted)
    assert plan.http["port"] > wanted
    assert f"port {wanted} is taken; using {plan.http['port']}" in capsys.readouterr().err


def test_tp_replaces_the_files(config):
    plan = local._plan(config, 3, None)
    assert plan.models[0].engine.tensor_parallel_size == 3
    assert local._logical_cpus(plan) >= 4


def test_tp_for_several_models_is_refused(config):
    raw = yaml.safe_load(config.read_text())
    raw["applications"][0]["args"] = {"models": [{"target": "/m/a"}, {"target": "/m/b"}]}
    config.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="--tp 3 for a, b; allowed: one model"):
        local._plan(config, 3, None)
    assert [m.model for m in local._plan(config, None, None).models] == ["a", "b"]


def test_impossible_tp_is_refused(config):
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0"):
        local._plan(config, 0, None)


def test_missing_target_of_another_file_is_named(config):
    plan = local._plan(config, None, None)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        local._prepare_target(plan.models[0], config)


def test_two_applications_are_refused(config):
    raw = yaml.safe_load(config.read_text())
    raw["applications"].append({**raw["applications"][0], "name": "b", "route_prefix": "/b"})
    config.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="holds 2 dflash-serve applications"):
        local._plan(config, None, None)


def test_the_reason_is_the_last_error_of_a_traceback():
    message = (
        "The deployment failed to start 3 times in a row. Error:\n"
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "replica.py", line 1, in initialize\n'
        "dflash_serve.errors.CapacityError: too small\nthe smallest that works is 3"
    )
    assert local.reason(message).startswith("dflash_serve.errors.CapacityError: too small\nthe")
    assert local.reason("no traceback") == "no traceback"


def test_figures_count_only_steps_that_drafted(monkeypatch):
    pages = iter(
        [
            {"replicas": [stats({"1": (50, 50), "8": (10, 25)})]},
            {
                "choices": [{"message": {"content": "an answer"}}],
                "usage": {"completion_tokens": 16},
            },
            {"replicas": [stats({"1": (60, 60), "8": (15, 40)})]},
        ]
    )
    monkeypatch.setattr(sample, "_call", lambda *_: next(pages))
    answer = sample.ask("http://here", "m")
    assert (answer.steps, answer.step_tokens) == (5, 15)
    assert "3.00 tokens per verify step over 5 steps" in answer.figures()


def stats(by_length):
    counts = {rows: {"drafts": d, "emitted": e} for rows, (d, e) in by_length.items()}
    return {"stats": {"by_length": counts}}


@contextlib.contextmanager
def served(config):
    """`make serve` of a file, ready: its process, its URL, the lines it has printed."""
    port = free_port()
    command = [sys.executable, "-m", "dflash_serve.serve.local"]
    command += ["--config", str(config), "--port", str(port)]
    # In a group of its own, as a shell would start it: Ctrl-C reaches Ray's processes too.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as server:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        yield server, f"http://127.0.0.1:{port}", lines


@pytest.mark.ray
@pytest.mark.slow
def test_serves_every_model_answers_and_leaves_nothing_after_ctrl_c(config, tmp_path):
    pair = make_pair(tmp_path / "pair")
    write_tokenizer(Path(pair.target), VALID_VOCAB)
    raw = yaml.safe_load(config.read_text())
    engine = {"target": pair.target, "draft": pair.draft, "device": "cpu"}
    wide = {"model": "wide", "engine": engine | {"tensor_parallel_size": 2}, "rank_cpus": 0.5}
    raw["applications"][0]["args"] = {"models": [wide, {"model": "other", "application": "b"}]}
    raw["applications"].append(
        {
            "name": "b",
            "route_prefix": None,
            "import_path": MODEL_BUILDER,
            "args": {"model": "other", "engine": engine},
        }
    )
    config.write_text(yaml.safe_dump(raw))
    with served(config) as (server, _, lines):
        started = descendants(server.pid)
        os.killpg(server.pid, signal.SIGINT)
        lines += server.stdout
        assert server.wait(timeout=60) == 0, "".join(lines)
    text = "".join(lines)
    assert "wide (tp 2), other (tp 1) are ready after" in text
    assert "curl -N http://127.0.0.1:" in text
    assert "tokens per verify step" in text
    assert text.rstrip().endswith("serve: stopped")
    assert started
    assert await_exit(started, 10) == set()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [60, 0.3])
def test_a_signal_refuses_new_requests_and_gives_the_others_their_grace(config, tmp_path, grace_s):
    pair = make_pair(tmp_path / "pair")
    write_tokenizer(Path(pair.target), VALID_VOCAB)
    raw = yaml.safe_load(config.read_text())
    engine = {"target": pair.target, "draft": pair.draft, "device": "cpu", "max_model_len": 512}
    arguments = {"model": "tiny", "engine": engine, "graceful_shutdown_timeout_s": grace_s}
    raw["applications"][0]["args"] = arguments
    config.write_text(yaml.safe_dump(raw))
    body = {"model": "tiny", "prompt": "t3", "ignore_eos": True, "max_tokens": 480}
    with served(config) as (server, url, lines):
        streams = [StreamReader(url, body | {"seed": seed}) for seed in range(8)]
        for stream in streams:
            assert stream.begun.wait(20)
        server.send_signal(signal.SIGTERM)
        if grace_s > 1:
            short = body | {"max_tokens": 1}
            refused = until(lambda: refusal(url, short), "new requests are refused", 10)
            assert refused.headers["retry-after"] == "10"
            assert "being stopped" in refused.json()["error"]["message"]
            assert httpx.get(f"{url}/ready", timeout=10).status_code == 503
        ends = [stream.events(60)[-1] for stream in streams]
        lines += server.stdout
        assert server.wait(timeout=60) == 0, "".join(lines)
    if grace_s > 1:
        assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"] * 8
    else:
        assert {end["error"]["code"] for end in ends} == {"engine_unavailable"}
        assert "8 requests took longer and ended with an error" in "".join(lines)


def refusal(url, body):
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=10)
    return answer if answer.status_code == 503 else None


def test_the_demo_file_is_where_the_default_says():
    assert Path(local._CONFIG).is_file()
