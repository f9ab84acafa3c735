import copy
import os

import pytest

from .__main__ import grown, unbalanced
from .vitals import by_kind

PAGE = {
    "dflash_engine_requests_accepted_total": 10.0,
    "dflash_engine_requests_ended_total": 6.0,
    "vllm:num_requests_running": 3.0,
    "vllm:num_requests_waiting": 1.0,
}
HELD = {"processes": 1.0, "rss_mib": 100.0, "pss_mib": 90.0, "files": 30.0, "threads": 9.0}
SAMPLE = {"processes": {"rank": HELD}, "shm": {"files": 3.0}, "series": 50.0}


@pytest.mark.parametrize("name", PAGE)
def test_a_request_too_many_anywhere_is_unbalanced(name):
    assert unbalanced(PAGE) is None
    assert unbalanced(PAGE | {name: PAGE[name] + 1}) is not None


def test_what_grows_is_named():
    later = copy.deepcopy(SAMPLE)
    assert grown(SAMPLE, later) == []
    later["processes"]["rank"]["files"] += 100
    later["processes"]["other"] = HELD
    later["shm"]["files"] += 1
    later["series"] += 1
    text = "; ".join(grown(SAMPLE, later))
    for part in ("rank files: 30 then 130", "other processes: 0 then 1", "/dev/shm", "/metrics"):
        assert part in text


def test_this_process_children_are_seen_with_their_memory():
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    try:
        found = by_kind(os.getpid())["other"]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert found["processes"] >= 1
    assert found["rss_mib"] > 0
    assert found["files"] > 0
