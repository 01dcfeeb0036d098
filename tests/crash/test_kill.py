"""Kill the program (kill -9) at the system calls of a save.

The tests kill it at every call that changes the file system, but only at a sample of the calls that
read. A read does not change the disk, so the disk is the same at every read between two changes.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import limpet
from limpet.run.policy import EverySteps
from limpet.storage.local.store import LocalStore
from tests.crash.killed_saver import run_when_traced
from tests.crash.promises import check_promises
from tests.fork_server import FORK_SERVER
from tests.trainings import initial_state, train

pytestmark = [pytest.mark.slow, pytest.mark.root]

WRITING_CALLS = ["mkdir", "fallocate", "pwrite64", "fsync", "linkat", "unlink", "rmdir"]
READING_CALLS = ["openat", "close", "newfstatat", "getdents64", "preadv2"]
SAMPLE = 9
STATUS = threading.Lock()
"""Starting a process reads the exit codes of all others. Each can be read once: a thread that reads
one at the same time gets 255."""


@pytest.fixture(scope="module", autouse=True)
def strace(tmp_path_factory):
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    root = tmp_path_factory.mktemp("strace") / "run"
    _, _, message = run_saver(root, "saves", "-o", os.devnull, threads=1)
    if "attached" not in message:
        pytest.skip(f"strace cannot trace: {message}")


@pytest.fixture(autouse=True)
def check_with_one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")


def run_saver(root, work, *options, threads):
    """Run the program under strace, from its first call on.

    Return its exit code, the steps whose save had returned, and the message of strace.
    """
    traced, release = FORK_SERVER.Pipe(duplex=False)
    steps, output = FORK_SERVER.Pipe(duplex=False)
    program = FORK_SERVER.Process(
        target=run_when_traced, args=(traced, output, str(root), work, threads)
    )
    with STATUS:
        program.start()
    output.close()
    command = ["strace", "-f", "-p", str(program.pid), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        message = tracer.stderr.readline()
        release.send_bytes(b"")
        wait([program.sentinel], 60)
        program.kill()
        tracer.communicate()
    with open(steps.fileno(), closefd=False) as lines:
        returned = [int(step) for step in lines.read().split()]
    with STATUS:
        program.join()
    assert program.exitcode is not None
    return program.exitcode, returned, message


def trace_calls(root, work, kinds, threads):
    """Return the system calls that use ``root``.

    Each call is its name and its ordinal among the calls of that name in its thread. ``strace``
    counts calls the same way.
    """
    log = root.with_suffix(".strace")
    trace = f"trace={','.join(kinds)}"
    code, _, _ = run_saver(root, work, "-y", "-o", str(log), "-e", trace, threads=threads)
    assert code == 0
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], None] = {}
    for line in log.read_text().splitlines():
        thread, _, call = line.partition(" ")
        kind = call.lstrip().partition("(")[0]
        if kind in kinds:
            counts[thread, kind] += 1
            if str(root) in call:
                found[kind, counts[thread, kind]] = None
    return list(found)


def kill_at_call(root, work, call, threads):
    """Kill the program at ``call``.

    Return True if it was killed there, and the steps whose save had returned.
    """
    inject = f"inject={call[0]}:signal=SIGKILL:when={call[1]}"
    options = ("-o", os.devnull, "-e", f"trace={call[0]}", "-e", inject)
    code, returned, message = run_saver(root, work, *options, threads=threads)
    assert code in (0, -9), message
    return code == -9, returned


def kill_at_every_call(tmp_path, work, kinds, *, threads=1):
    initial_run = tmp_path / "initial_run"
    if work == "trains":
        state = initial_state()
        with limpet.Checkpointer(initial_run, state, save=EverySteps(1)) as ckpt:
            train(state, ckpt, 1)
    else:
        initial_run.mkdir()
    shutil.copytree(initial_run, tmp_path / "dry" / "run")
    points = trace_calls(tmp_path / "dry" / "run", work, kinds, threads)
    if kinds is READING_CALLS:
        points = points[::SAMPLE]

    def try_point(number):
        root = tmp_path / str(number) / "run"
        if work == "trains":
            shutil.copytree(initial_run, root)
        killed, returned = kill_at_call(root, work, points[number], threads)
        # In ``saves``, retention deletes the first version only after the second is saved.
        check_promises(LocalStore(root), returned[-1:], assume_dead_pins=False)
        shutil.rmtree(root.parent)
        return killed

    with ThreadPoolExecutor(2) as pool:
        killed = list(pool.map(try_point, range(len(points))))
    assert len(points) > (20 if kinds is WRITING_CALLS else 10)
    # how often some calls are made depends on the speed of the threads
    assert sum(killed) >= (0.9 if kinds is WRITING_CALLS else 0.7) * len(points)


@pytest.mark.parametrize("kinds", [WRITING_CALLS, READING_CALLS], ids=["writing", "reading"])
def test_saves_retention_and_sweep_survive_a_kill_at_every_call(tmp_path, kinds):
    kill_at_every_call(tmp_path, "saves", kinds)


def test_background_save_survives_a_kill_at_every_call(tmp_path):
    kill_at_every_call(tmp_path, "trains", WRITING_CALLS, threads=3)


def test_killed_program_does_not_import_torch(tmp_path):
    """A save of arrays does not pay the memory of torch or the two seconds of its import."""
    for work in ("saves", "trains"):
        command = [sys.executable, "-m", "tests.crash.killed_saver", str(tmp_path / work), work]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
