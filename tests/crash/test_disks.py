"""Whole trainings on a real ext4 and a real xfs whose power is cut at random moments."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.local import LocalStore
from tests.crash.promises import check_promises

pytestmark = [pytest.mark.slow, pytest.mark.root]

ROUNDS = 5
MOST = 40


def test_the_power_is_cut_while_a_training_saves(disk: Any) -> None:
    chance = random.Random(5)
    cut_within = 0
    for turn in range(MOST):
        if turn >= ROUNDS and cut_within:  # when it falls is chance: until one fell into a save
            break
        root = disk.mount_point / f"round{turn}" / "runs" / "a"
        returned = train_until_cut(disk, root, chance)
        disk.unmount()
        disk.mount()
        store = LocalStore(root)
        cut_within += bool(list(store.partials("")) or len(list(store.list(""))) % 3)
        # Three are kept, and of those one may be the one that was on its way.
        steps = check_promises(store, returned[-2:], assume_dead_pins=False)
        assert steps[-1] <= returned[-1] + 1
    assert cut_within, "no cut fell into a save: it proves nothing"


def train_until_cut(disk: Any, root: Path, chance: random.Random) -> list[int]:
    """Train in a process of its own and cut the power after a few saves; the steps whose save
    had returned by then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.killed_saver", str(root), "loops"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for _ in range(chance.randrange(1, 12)):
            first = process.stdout.readline()
        time.sleep(chance.random() * 0.05)
        disk.cut_power()
        told = threading.Timer(20, process.kill)
        told.start()
        rest, errors = process.communicate()
        told.cancel()
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert "StoreError" in errors
    return [int(line) for line in [first, *rest.split()]]
