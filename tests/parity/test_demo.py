"""The demo pair, whose draft is trained: blocks of every length equal the public package's."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from tests.demo_pair import demo_pair, demo_prompts
from tests.engine.drafting import Recorder, read_records
from tests.engine.test_demo import config
from tests.engines import ids_of, start
from tests.parity.reference import public_dflash
from tests.parity.test_reference import submits

BLOCK, MAX_TOKENS = 8, 48


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_every_complete_block_of_the_demo_pair_equals_the_public_package(tmp_path: Path) -> None:
    pair, prompts = demo_pair(), demo_prompts(3)
    theirs = public_dflash(pair, prompts, MAX_TOKENS + 2 * BLOCK)
    engine = start(config(), Recorder(tmp_path).install)
    try:
        events = engine.collect(submits(prompts, MAX_TOKENS + 2 * BLOCK))
    finally:
        engine.shutdown()
    proposals, _ = read_records(tmp_path, 1)
    lengths: collections.Counter[int] = collections.Counter()
    for i, (prompt, expected) in enumerate(zip(prompts, theirs, strict=True)):
        assert ids_of(events[f"r{i}"])[:MAX_TOKENS] == expected.ids[:MAX_TOKENS]
        begin = len(prompt)
        for event in (e for e in events[f"r{i}"] if e.drafted):
            if begin >= len(prompt) + MAX_TOKENS:
                break
            assert proposals[i][begin] == expected.proposals[begin]
            assert event.accepted + 1 == expected.committed[begin]
            lengths[event.accepted] += 1
            begin += event.accepted + 1
    print(f"accepted {dict(sorted(lengths.items()))}")
    assert len(lengths) >= 4
