"""Trainings with tables in processes of their own: signals, kills, and memory."""

import os
import signal
import subprocess
import sys
import time
from functools import cache

import pytest

import limpet
from limpet import tables
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from tests.fork_server import FORK_SERVER
from tests.memory_peak import numbers_of
from tests.tables.contents import differing, live, saved
from tests.tables.runs import make_state, train_step
from tests.unreliable_stores import HookedStore


def run_training(run, phase, at, steps):
    """Train in this process, which gets a signal: SIGTERM in a ``phase`` of step ``at``, or SIGKILL
    at the ``at``-th call of the store."""
    store, state, calls = HookedStore(LocalStore(run)), make_state(2), []

    def stop(where):
        if where == phase:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # its handler runs

    def before(method, key):
        calls.append(method)
        if method == "write_at" and f"version_{at}/" in key:
            stop("save")
        if phase == "kill" and len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    store.before = before
    every = limpet.EverySteps(1)
    with limpet.Checkpointer(store, state, save=every, incremental=3, quiet=True) as ckpt:
        ckpt.resume()
        while ckpt.current_step < steps:
            step = ckpt.current_step + 1
            train_step(state, step)
            if step == at:
                stop("in a step")
            ckpt.step()
            if step == at:
                stop("after a step")


def start(run, phase="none", at=0, steps=8):
    """Return the exit code of a process that trains."""
    process = FORK_SERVER.Process(target=run_training, args=(str(run), phase, at, steps))
    process.start()
    process.join(60)
    return process.exitcode


@cache
def undisturbed(steps):
    state, found = make_state(2), {}
    for step in range(1, steps + 1):
        train_step(state, step)
        found[step] = live(state["tables"])
    return found


def check(run, steps):
    found = undisturbed(steps)
    versions = Run(run).snapshots()
    assert versions[-1].step == steps
    for version in versions:
        assert not differing(saved(version), found[version.step])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["in a step", "after a step", "save"])
def test_sigterm_saves_the_step_and_the_restart_is_exact(tmp_path, phase):
    assert start(tmp_path, phase, at=4) == 75
    newest = Run(tmp_path).latest()
    # the training goes on while a version is saved
    assert newest.step in ([4] if phase == "in a step" else [4, 5, 6, 7, 8])
    assert not differing(saved(newest), undisturbed(newest.step)[newest.step])
    assert start(tmp_path) == 0
    check(tmp_path, 8)


@pytest.mark.slow
def test_a_killed_process_leaves_versions_that_are_exact(tmp_path):
    """EDL does not test: a crash in the middle of a save. The kills are at calls of the store."""
    for at in (25, 37, 48, 61):
        assert start(tmp_path, "kill", at=at, steps=30) == -signal.SIGKILL
    newest = Run(tmp_path).latest().step
    assert start(tmp_path, steps=newest + 2) == 0
    check(tmp_path, newest + 2)


def test_a_second_job_on_a_run_is_refused(tmp_path):
    """EDL does not test: two jobs in one dir."""
    table = tables.Table("words", 2, optimizer=tables.SGD(0.1))
    program = """
import sys, limpet
from limpet import tables
servers = tables.Servers([tables.Table("words", 2, optimizer=tables.SGD(0.1))])
with limpet.Checkpointer(sys.argv[1], {"tables": servers}, save=limpet.EverySteps(1)) as ckpt:
    ckpt.resume()
    servers.step()
    ckpt.step()
"""
    servers = tables.Servers([table])
    with limpet.Checkpointer(tmp_path, {"tables": servers}, save=limpet.EverySteps(1)) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.wait()
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Another" in done.stderr.splitlines()[-1], done.stderr
        ckpt.step()
    assert [version.step for version in Run(tmp_path).snapshots()] == [1, 2]


MEMORY = """
import sys
import numpy as np, torch
import limpet
from limpet import tables
from limpet.storage.local.store import LocalStore
from tests.memory_peak import memory, print_peak_memory
from tests.unreliable_stores import HookedStore

torch.set_num_threads(1)
run, what, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
ROWS, DIM = 700_000, 64
read = 0

class Store(HookedStore):
    def get_range(self, key, offset, length, into):
        global read
        read += length if key.endswith(".safetensors") else 0
        super().get_range(key, offset, length, into)

servers = tables.Servers([tables.Table("words", DIM, optimizer=tables.Adagrad(0.1))], count)
state, store = {"tables": servers}, Store(LocalStore(run))
if what == "save":
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, ROWS)
    for part in np.split(ids, 10):
        servers.fill("words", part, torch.ones(len(part), DIM))
    limpet.save(f"{run}/warm", {"tables": tables.Servers([*servers.specs.values()])})
with print_peak_memory():
    if what == "save":
        limpet.save(store, state)
    else:
        limpet.load(store, into=state)
print(servers.statistics()["words"]["rows"], read)
"""


@pytest.mark.slow
def test_a_save_and_a_restore_take_little_more_memory_than_the_table(tmp_path):
    """A table of 370 MB, saved by two servers and restored by three."""
    payload = 700_000 * (8 + 2 * 4 * 64 + 4 + 8)
    growth, rows, _ = numbers_of(MEMORY, tmp_path / "run", "save", 2)
    assert rows == 700_000
    assert growth <= 0.25 * payload + (256 << 20)
    growth, rows, read = numbers_of(MEMORY, tmp_path / "run", "load", 3)
    assert rows == 700_000
    assert growth <= 1.15 * payload + (256 << 20)
    assert read <= 1.1 * payload + 2 * 5 * (4 << 20)
