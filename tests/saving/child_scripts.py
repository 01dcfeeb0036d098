"""Scripts that save to a slow file system, each in its own process."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

SLOW_DISK_PRELUDE = """
import os, resource, sys, time
import numpy as np
import limpet
from limpet.run.policy import EverySteps
from limpet.storage.local import os_calls as fs
real = fs.Fs.fsync
def fsync(self, fd):
    time.sleep(0.02)
    real(self, fd)
fs.Fs.fsync = fsync
state = {"x": np.arange(500_000), "progress": limpet.Progress()}
root = sys.argv[1]
def break_writer():
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
"""


def run_script(tmp_path, body):
    """Run a script with a slow file system. In the script, ``break_writer()`` makes large writes
    fail."""
    command = [sys.executable, "-c", SLOW_DISK_PRELUDE + body, str(tmp_path / "run")]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )


SAVE = 'pending = limpet.save_async(f"{root}/version_1", state)\n'
STEP = "ckpt = limpet.Checkpointer(root, state, save=EverySteps(1)); ckpt.step()\n"
