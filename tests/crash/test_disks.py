"""Trainings on real ext4 and xfs file systems, with power cuts at random times."""

import random
import threading
import time

import pytest

from limpet.storage.local.store import LocalStore
from tests.crash.killed_saver import run_until_call
from tests.crash.promises import check_promises
from tests.fork_server import FORK_SERVER

pytestmark = [pytest.mark.slow, pytest.mark.root]

ROUNDS = 4
MAX_ROUNDS = 40


def test_promises_hold_after_power_cuts_during_saves(disk):
    rng = random.Random(5)
    cuts_during_save = 0
    for round_number in range(MAX_ROUNDS):
        # The times are random, so repeat until a cut hits a save.
        if round_number >= ROUNDS and cuts_during_save:
            break
        root = disk.mount_point / f"round{round_number}" / "runs" / "a"
        returned_steps = train_until_cut(disk, root, rng)
        disk.unmount()
        disk.mount()
        store = LocalStore(root)
        cuts_during_save += bool(list(store.partials("")) or len(list(store.list(""))) % 3)
        # Retention keeps three versions, one of which can be the version that was being saved.
        steps = check_promises(store, returned_steps[-2:], assume_dead_pins=False)
        assert steps[-1] <= returned_steps[-1] + 1
    assert cuts_during_save, "no power cut hit a save, so the test proves nothing"


def train_until_cut(disk, root, rng):
    """Train in a separate process, and cut the power after a few saves.

    Return the steps whose save had returned.
    """
    reader, output = FORK_SERVER.Pipe(duplex=False)
    program = FORK_SERVER.Process(target=run_until_call, args=(output, str(root), "loops", 2))
    program.start()
    output.close()
    kill_timer = threading.Timer(20, program.kill)
    with open(reader.fileno(), closefd=False) as printed:
        try:
            for _ in range(rng.randrange(1, 12)):
                last_line = printed.readline()
            time.sleep(rng.random() * 0.05)
            disk.cut_power()
            kill_timer.start()
            remaining_lines = printed.read().split()
            program.join(20)
        finally:
            kill_timer.cancel()
            program.kill()
    assert program.exitcode == 1
    assert remaining_lines.pop() == "StoreError"
    return [int(line) for line in [last_line, *remaining_lines]]
