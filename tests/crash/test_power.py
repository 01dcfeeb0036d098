"""A power cut at every file system call, with several choices of the data that survives.

Every version whose save had returned still exists, and the promises hold.
"""

from collections.abc import Callable

import pytest

import limpet
from limpet.format.names import Version
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.testing.crashfs import CrashFs, PowerCut
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.crash.promises import check_promises
from tests.trainings import initial_state, state_after, train

ROOT = "/a/run"
MAX_CALLS = 3000

Work = Callable[[LocalStore, list[int]], None]


def save_twice(store, done):
    for step in (1, 2):
        limpet.save(f"{ROOT}/version_{step}", state_after(step))
        done.append(step)


def save_async(store, done):
    pending = limpet.save_async(f"{ROOT}/version_1", state_after(1))
    pending.wait()
    done.append(1)


def training(store, done):
    """Train with retention of the two newest versions. ``save`` saves the last version."""
    state = initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(2)) as ckpt:
        for step in (1, 2, 3):
            train(state, ckpt, step)
            ckpt.wait()
            done.append(step)
        ckpt.save()


def save_and_sweep(store, done):
    """Sweep the files of a crashed save between two saves."""
    save_twice(store, done)
    run = Run(store)
    store.put_if_absent("version_3/shard-00003-of-00004.00000000000a.safetensors", b"stale")
    run.sweep(grace=0, now=1e12)
    limpet.save(f"{ROOT}/version_3", state_after(3))
    done.append(3)


def check_last(kept):
    """Return a check that the ``kept`` last saved steps exist, and that the promises hold."""

    def check(store, done):
        check_promises(store, done[-kept:])

    return check


WORKS: dict[str, tuple[Work, Work]] = {
    "save": (save_twice, check_last(2)),
    "save_async": (save_async, check_last(1)),
    "checkpointer": (training, check_last(1)),  # retention may have deleted the others
    "sweep": (save_and_sweep, check_last(3)),
}


def cut_everywhere(work, check, pools, opened, *, every, choices):
    """Cut the power before every ``every``-th call, and check the states that can result.

    A state that an earlier cut has left too is not checked again. Return the number of states, with
    these.

    Args:
        work: The saves to run.
        check: Checks a state. It receives the store and the steps that ``work`` had saved.
        pools: The buffer pools of the test.
        opened: Receives the store.
        every: The interval between the calls to cut at.
        choices: The number of surviving states of each cut after a change.
    """
    states, checked = 0, CheckedStates()
    before: tuple[int, list[int]] | None = None
    with equal_bytes() as restart_ids:
        for cut_at in range(1, MAX_CALLS, every):
            restart_ids()
            fs, done = CrashFs(cut_at), list[int]()
            opened.store = store = LocalStore(ROOT, fs=fs)
            try:
                work(store, done)
            except PowerCut:
                pools.assert_all_freed()
            else:
                assert cut_at > fs.operations
                return states
            if before == (fs.changes, done):
                continue
            before = (fs.changes, done)
            for crashed in fs.crashes(limit=choices, seed=cut_at):
                states += 1
                if checked.add(crashed, done):
                    check(LocalStore(ROOT, fs=crashed), done)
    pytest.fail(f"the power is still cut after {MAX_CALLS} calls")


def resume_on_branch(store, done):
    """Resume training from version 1 on a new branch. The later versions no longer count."""
    save_twice(store, done)
    state = initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        ckpt.resume(at=1)
        done.append(BRANCHED)
        train(state, ckpt, 3)


BRANCHED = -1


@pytest.mark.parametrize(
    ("every", "choices"), [(29, 3), pytest.param(3, 8, marks=pytest.mark.slow)]
)
def test_abandoned_versions_stay_abandoned_after_a_power_cut(every, choices, pools, opened):
    def check(store, done):
        run = Run(store)
        assert BRANCHED not in done or run.branch() == 1
        assert run.branch() == 0 or Version(2) not in run.line()
        assert run.branch() == 0 or run.read_branch(1).from_version == "version_1"
        check_promises(store, done[:1])

    cut_everywhere(resume_on_branch, check, pools, opened, every=every, choices=choices)


@pytest.mark.parametrize("name", WORKS)
def test_promises_hold_after_a_power_cut_at_some_calls(name, pools, opened):
    work, check = WORKS[name]
    every = 11 if name == "save_async" else 29
    assert cut_everywhere(work, check, pools, opened, every=every, choices=3) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_promises_hold_after_a_power_cut_at_every_call(name, pools, opened):
    work, check = WORKS[name]
    assert cut_everywhere(work, check, pools, opened, every=1, choices=8) > 200


def test_check_detects_a_store_without_fsync(pools, opened):
    """This proves that ``check_promises`` finds the damage that missing fsync calls cause."""

    class NoFsync(CrashFs):
        def fsync(self, fd):
            pass

    fs = NoFsync()
    opened.store = LocalStore(ROOT, fs=fs)
    save_twice(opened.store, [])
    broken = 0
    for crashed in fs.crashes(limit=24):
        try:
            check_promises(LocalStore(ROOT, fs=crashed), [1, 2])
        except (AssertionError, limpet.errors.LimpetError):
            broken += 1
    assert broken > 12
