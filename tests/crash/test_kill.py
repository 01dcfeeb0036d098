"""Kill the program (kill -9) at the system calls of a save.

It dies before each call that changes what another process sees. A read or an fsync does not, so the
files are the same at each of them between two changes.
"""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import limpet
from limpet.run.policy import EverySteps
from limpet.storage.local.store import LocalStore
from tests.crash.killed_saver import run_until_call
from tests.crash.promises import check_promises
from tests.fork_server import FORK_SERVER
from tests.trainings import initial_state, train

pytestmark = pytest.mark.slow


def kill_at_call(root, work, number, threads):
    """Kill the program before its ``number``-th change. Return its exit code, and the steps whose
    save had returned."""
    steps, output = FORK_SERVER.Pipe(duplex=False)
    program = FORK_SERVER.Process(
        target=run_until_call, args=(output, str(root), work, threads, number)
    )
    program.start()
    output.close()
    with open(steps.fileno(), closefd=False) as lines:
        returned = [int(step) for step in lines.read().split()]
    program.join(60)
    return program.exitcode, returned


@pytest.mark.parametrize(("work", "threads"), [("saves", 1), ("trains", 3)])
def test_saves_retention_and_sweep_survive_a_kill_at_every_call(
    tmp_path, monkeypatch, work, threads
):
    monkeypatch.setenv("LIMPET_THREADS", "1")  # of the checks
    initial_run = tmp_path / "initial_run"
    if work == "trains":
        state = initial_state()
        with limpet.Checkpointer(initial_run, state, save=EverySteps(1)) as ckpt:
            train(state, ckpt, 1)
    for number in itertools.count(1):
        root = tmp_path / str(number) / "run"
        if work == "trains":
            shutil.copytree(initial_run, root)
        code, returned = kill_at_call(root, work, number, threads)
        assert code in (0, -9)
        if code == 0:
            break
        # In ``saves``, retention deletes the first version only after the second is saved.
        check_promises(LocalStore(root), returned[-1:], assume_dead_pins=False)
        shutil.rmtree(root.parent, ignore_errors=True)
    assert number > 40


def test_killed_program_does_not_import_torch(tmp_path):
    """A save of arrays does not pay the memory of torch or the two seconds of its import."""
    for work in ("saves", "trains"):
        command = [sys.executable, "-m", "tests.crash.killed_saver", str(tmp_path / work), work]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
