"""Prompts timed with and without `pack_prompts` in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.bench import longrun
from tests.tiny import make_pair


@pytest.mark.parametrize("pack", [False, True])
def test_packed_prompts_are_timed_beside_the_others(
    tmp_path: Path, pack: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, output = make_pair(tmp_path / "pair"), tmp_path / "out.json"
    longrun.main(
        [
            *("--what", "prefill", "--target", pair.target, "--draft", pair.draft),
            *("--loads", "3x16,1x40", "--chunks", "64", "--repeats", "1", "--device", "cpu"),
            *("--output", str(output), *(["--pack"] if pack else [])),
        ]
    )
    cells = json.loads(output.read_text())["cells"]
    loads = [(3, 16), (1, 40)]
    assert [(c["packed"], c["prompts"], c["length"]) for c in cells] == [
        (packed, *load) for packed in ([False, True] if pack else [False]) for load in loads
    ]
    assert capsys.readouterr().out.count(" packed: ") == (2 if pack else 0)


def test_packing_is_timed_with_many_short_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def work(options: object, config: object) -> dict[str, object]:
        found["loads"], found["batch"] = options.loads, config.max_running  # type: ignore[attr-defined]
        return {}

    monkeypatch.setattr(longrun, "_work", work)
    common = ["--what", "prefill", "--target", "dummy:qwen3-4b", "--draft", "dummy:qwen3-4b-b16"]
    longrun.main([*common, "--device", "cpu"])
    assert found == {"loads": [(8, 1024), (1, 8192)], "batch": 8}
    longrun.main([*common, "--device", "cpu", "--pack"])
    assert found == {"loads": [(8, 1024), (16, 64), (1, 8192)], "batch": 16}
