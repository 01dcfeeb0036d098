"""kill -9 at every system call of a save that changes a file system, and at a part of those that
only look: what is on the disk before two changes is the same whatever is looked at in between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from holdfast.run.policy import EverySteps
from holdfast.storage.local import LocalStore
from tests.crash.promises import check_promises
from tests.trainings import initial_state, train

pytestmark = [pytest.mark.slow, pytest.mark.root]

CHANGING = ["mkdir", "fallocate", "pwrite64", "fsync", "linkat", "unlink", "rmdir"]
LOOKING = ["openat", "close", "newfstatat", "getdents64", "preadv2"]
SAMPLE = 9


@pytest.fixture(autouse=True)
def strace() -> None:
    if not shutil.which("strace"):
        pytest.skip("no strace here")
    if subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("strace may not trace here")


def victim(root: Path, work: str, *strace: str, threads: int) -> subprocess.CompletedProcess[str]:
    command = [
        "strace",
        "-f",
        *strace,
        sys.executable,
        "-m",
        "tests.crash.killed_saver",
        str(root),
        work,
    ]
    return subprocess.run(
        command,
        env={**os.environ, "HOLDFAST_THREADS": str(threads)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def calls(root: Path, work: str, kinds: list[str], threads: int) -> list[tuple[str, int]]:
    """The system calls that touch ``root``, each as the how manieth of its kind in its thread:
    strace counts so as well."""
    log = root.with_suffix(".strace")
    trace = f"trace={','.join(kinds)}"
    done = victim(root, work, "-y", "-o", str(log), "-e", trace, threads=threads)
    assert done.returncode == 0, done.stderr
    made: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], None] = {}
    for line in log.read_text().splitlines():
        thread, _, call = line.partition(" ")
        kind = call.lstrip().partition("(")[0]
        if kind in kinds:
            made[thread, kind] += 1
            if str(root) in call:
                found[kind, made[thread, kind]] = None
    return list(found)


def kill(root: Path, work: str, call: tuple[str, int], threads: int) -> tuple[bool, list[int]]:
    """Whether the victim was killed at that call, and the steps whose save had returned."""
    inject = f"inject={call[0]}:signal=SIGKILL:when={call[1]}"
    options = ("-o", os.devnull, "-e", f"trace={call[0]}", "-e", inject)
    done = victim(root, work, *options, threads=threads)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9, [int(step) for step in done.stdout.split()]


def kill_everywhere(tmp_path: Path, work: str, kinds: list[str], *, threads: int = 1) -> None:
    begun = tmp_path / "begun"
    if work == "trains":
        state = initial_state()
        with holdfast.Checkpointer(begun, state, save=EverySteps(1)) as ckpt:
            train(state, ckpt, 1)
    else:
        begun.mkdir()
    shutil.copytree(begun, tmp_path / "dry" / "run")
    points = calls(tmp_path / "dry" / "run", work, kinds, threads)
    if kinds is LOOKING:
        points = points[::SAMPLE]

    def try_point(number: int) -> bool:
        root = tmp_path / str(number) / "run"
        if work == "trains":
            shutil.copytree(begun, root)
        killed, returned = kill(root, work, points[number], threads)
        # In ``saves``, the first version is deleted only after the second was saved.
        check_promises(LocalStore(root), returned[-1:], assume_dead_pins=False)
        shutil.rmtree(root.parent)
        return killed

    with ThreadPoolExecutor(2) as two:
        killed = list(two.map(try_point, range(len(points))))
    assert len(points) > (20 if kinds is CHANGING else 10)
    assert sum(killed) >= 0.9 * len(points)


@pytest.mark.parametrize("kinds", [CHANGING, LOOKING], ids=["changing", "looking"])
def test_saves_retention_and_sweep_on_one_thread(tmp_path: Path, kinds: list[str]) -> None:
    kill_everywhere(tmp_path, "saves", kinds)


def test_a_save_in_the_background_by_several_threads(tmp_path: Path) -> None:
    kill_everywhere(tmp_path, "trains", CHANGING, threads=3)


def test_the_victim_loads_no_torch(tmp_path: Path) -> None:
    """Saving arrays needs no torch: neither its memory nor its two seconds."""
    for work in ("saves", "trains"):
        command = [sys.executable, "-m", "tests.crash.killed_saver", str(tmp_path / work), work]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
