import os
import signal
import subprocess
import sys

from dflash_serve.serve.rundir import RunDir

HOLDER = """
import sys, time
from pathlib import Path
from dflash_serve.serve.rundir import RunDir
folder = RunDir(Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(60)
"""


def test_folder_is_private_and_removed(tmp_path):
    folder = RunDir(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_killed_owner_is_swept_and_a_live_one_kept(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        left = holder.stdout.readline().strip()
        mine = RunDir(tmp_path)
        assert os.path.isdir(left)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    other = RunDir(tmp_path)
    assert not os.path.exists(left)
    assert mine.path.is_dir()
    mine.remove()
    other.remove()
