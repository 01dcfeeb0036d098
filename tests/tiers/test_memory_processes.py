"""The memory tier of a process that is killed: BEHAVIOURS.md, C5."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.run.run import Run

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys
import numpy as np, limpet
state = {"x": np.zeros(9), "progress": limpet.Progress()}
tier = limpet.MemoryTier(every=limpet.EverySteps(5), copies=1, path=sys.argv[2])
save = limpet.EverySteps(1000) | limpet.AtEnd()
with limpet.Checkpointer(sys.argv[1], state, save=save, tiers=[tier]) as ckpt:
    resumed = ckpt.resume()
    print(resumed and resumed.url, ckpt.current_step, *state["x"].tolist(), flush=True)
    while ckpt.current_step < int(sys.argv[3]):
        state["x"] += ckpt.current_step
        ckpt.step()
        ckpt._tiers.memory.wait()
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def start(run, memory, last_step, *args):
    """Train until a step in a new process. Return its exit code and what it had resumed."""
    command = [sys.executable, "-c", SCRIPT, str(run), memory, str(last_step), *args]
    environment = {**os.environ, "LIMPET_QUIET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


def test_sigkill_loses_no_captured_state(tmp_path, memory):
    """Each process finds in memory what the one before has left, and the run has no version."""
    run = tmp_path / "run"
    assert start(run, memory, 12, "kill") == (-signal.SIGKILL, ["None", "0", *["0.0"] * 9])
    for last_step, resumed in ((18, 10), (23, 15)):
        code, (url, step, *values) = start(run, memory, last_step, "kill")
        assert (code, step, values) == (
            -signal.SIGKILL,
            f"{resumed}",
            [f"{sum(range(resumed))}.0"] * 9,
        )
        assert url.startswith(memory)
    assert Run(run).snapshots() == []
    code, (url, step, *_) = start(run, memory, 25)
    assert (code, step) == (0, "20")
    assert [s.step for s in Run(run).snapshots()] == [25]
    assert Run(run).snapshots()[0]["x"][:].tolist() == [sum(range(25))] * 9
    assert not [p for p in Path(memory).rglob("*") if p.is_file()]


HANGING = """
import sys, threading, time
import numpy as np, limpet
from limpet.errors import RankFailed
from limpet.notices.notice import Notice
from limpet.tiers import memory_snapshots

class Source:
    name, interval, noticed = "a test", 0.05, False
    def poll(self):
        return Notice(self.name, 6.0) if self.noticed else None

memory_snapshots.finish_save = lambda job: threading.Event().wait(50)  # as for a rank that is dead
source = Source()
state = {"x": np.zeros(9), "progress": limpet.Progress()}
tier = limpet.MemoryTier(every=limpet.EverySteps(5), copies=1, path=sys.argv[2])
save, preemption = limpet.EverySteps(1000), limpet.Preemption(notices=[source])
with limpet.Checkpointer(
    sys.argv[1], state, save=save, tiers=[tier], preemption=preemption
) as ckpt:
    for _ in range(5):
        ckpt.step()
    source.noticed = True
    while not ckpt._preemption.is_pending:
        time.sleep(0.01)
    if sys.argv[3] == "SystemExit":
        raise SystemExit(0)
    raise {"ValueError": ValueError, "RankFailed": RankFailed}[sys.argv[3]]("another rank is dead")
"""


def test_a_capture_that_hangs_does_not_delay_the_exit_after_a_notice(tmp_path, memory):
    """A training that an error has ended waits for its capture, whose other ranks may be dead."""
    ends = {"RankFailed": 76, "ValueError": 1, "SystemExit": 76}
    processes = {
        error: subprocess.Popen(
            [sys.executable, "-c", HANGING, str(tmp_path / error), memory, error],
            stderr=subprocess.PIPE,
            text=True,
        )
        for error in ends
    }
    for error, process in processes.items():
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == ends[error], errors
        assert "this process ends now, before it is killed" in errors
        assert f"{error} had ended the training: " in errors
