"""A killed rank costs the time of a start, and no token."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.bench.recovery import recover
from tests.engine.harness import engine_config
from tests.tiny import make_pair


def test_a_request_goes_on_after_its_rank_was_killed(tmp_path: Path) -> None:
    config = engine_config(make_pair(tmp_path), executor="mp")
    found = recover(config, prompt=list(range(2, 30)), tokens=120, kill_after=20)
    assert found.continued
    assert 20 <= found.emitted < 120
    assert found.noticed_s <= found.ready_s <= found.first_token_s
