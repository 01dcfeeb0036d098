"""Trainings with a memory tier in a real control group with a limit, as in a container."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.root]

LIMIT = 300 << 20
"""An interpreter with Limpet needs 60 MiB of it."""

TRAINING = """
import os, sys
import numpy as np
import limpet
from pathlib import Path

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
state = {"weights": np.zeros(int(sys.argv[4]) << 18, np.float32), "progress": limpet.Progress()}
tier = limpet.MemoryTier(every=limpet.EverySteps(2), copies=1, path=sys.argv[3])
with limpet.Checkpointer(sys.argv[2], state, save=limpet.EverySteps(5), tiers=[tier]) as ckpt:
    ckpt.resume()
    for _ in range(20):
        state["weights"] += 1
        ckpt.step()
        ckpt._tiers.memory.wait()
"""


@pytest.fixture
def group():
    """A control group for 300 MiB of memory, of version 1 or 2."""
    for parent, limit in ("memory", "memory.limit_in_bytes"), ("", "memory.max"):
        folder = Path("/sys/fs/cgroup", parent, f"limpet-test-{os.getpid()}")
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(LIMIT))
                yield folder
                return
            finally:
                _remove(folder)
    pytest.skip("no control group for memory can be created")


def _remove(folder):
    end = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
        except OSError:  # the kernel still removes the process that has ended
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return


def train(group, folder, memory, mib):
    command = [sys.executable, "-c", TRAINING, group, folder / f"run-{mib}", memory, str(mib)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_training_fits_into_its_container_or_does_not_start(group, tmp_path, memory):
    done = train(group, tmp_path, memory, 20)
    assert done.returncode == 0, done.stderr
    done = train(group, tmp_path, memory, 90)
    assert done.returncode == 1, "the kernel has killed it"
    assert "Expected 270 MiB (2 snapshots of 90.0 MiB, and one more while it is staged)" in (
        done.stderr
    )
    assert f"in the control group of this process ({group}/memory." in done.stderr
    assert not (tmp_path / "run-90" / "version_5").exists()
