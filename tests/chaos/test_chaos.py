"""The suite itself, shortened: one round of a fault that is survived and of one that is seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ray
def test_one_round_of_two_faults_keeps_its_promises(tmp_path):
    output = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.chaos", "--faults", "rank0,leave", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rank, leave = json.loads(output.read_text())["rounds"]
    assert rank["resumed"] >= rank["hit"] == 8
    assert rank["ends"] == {"finished": rank["accepted"]}
    assert rank["restarts"] == 1
    assert leave["ends"]["left"] > 8
    assert leave["resumed"] == 0
