"""Hosts of their own addresses: what a cut cable costs.

Skipped where the kernel lets nobody make network namespaces, which takes root: without them one
machine has no second host, and the other tests of a silent rank (SIGSTOP) still run.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .hosts import require_namespaces

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ray
def test_requests_outlive_the_host_they_ran_on_or_end_with_an_error_event(tmp_path):
    try:
        require_namespaces()
    except PermissionError as error:
        pytest.skip(str(error))
    output = tmp_path / "multihost.json"
    command = [sys.executable, "-m", "tests.multihost", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1140)
    assert done.returncode == 0, done.stdout + done.stderr
    spare, none, *spread = json.loads(output.read_text())
    for entry in (spare, *spread):
        assert entry["ends"] == {"finished": entry["hit"]}
        assert entry["hit"] == 8
        assert entry["differ"] == 0
    assert none["ends"] == {"failed": 8}
