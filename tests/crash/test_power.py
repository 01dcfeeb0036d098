"""The power cut at every call to the file system, with every so many choices of what survives:
what had returned as committed is there, and the promises hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import holdfast
from holdfast.format.names import Version
from holdfast.run.policy import EverySteps, KeepLast
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.testing.crashfs import CrashFs, PowerCut
from tests.crash.conftest import OpenedStore, PoolTracker
from tests.crash.promises import check_promises
from tests.trainings import initial_state, state_after, train

ROOT = "/a/run"
MOST = 3000

Work = Callable[[LocalStore, list[int]], None]


def save_twice(store: LocalStore, done: list[int]) -> None:
    for step in (1, 2):
        holdfast.save(f"{ROOT}/version_{step}", state_after(step))
        done.append(step)


def save_async(store: LocalStore, done: list[int]) -> None:
    pending = holdfast.save_async(f"{ROOT}/version_1", state_after(1))
    pending.wait()
    done.append(1)


def training(store: LocalStore, done: list[int]) -> None:
    """Four steps of which the newest two are kept; the last is saved by ``save``."""
    state = initial_state()
    with holdfast.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(2)) as ckpt:
        for step in (1, 2, 3):
            train(state, ckpt, step)
            ckpt.wait()
            done.append(step)
        ckpt.save()


def saves_sweeps(store: LocalStore, done: list[int]) -> None:
    """Leftovers of a crashed save are swept between two saves."""
    save_twice(store, done)
    run = Run(store)
    store.put_if_absent("version_3/shard-00003-of-00004.00000000000a.safetensors", b"stale")
    run.sweep(grace=0, now=1e12)
    holdfast.save(f"{ROOT}/version_3", state_after(3))
    done.append(3)


WORKS: dict[str, tuple[Work, int]] = {
    "save": (save_twice, 2),
    "save_async": (save_async, 1),
    "checkpointer": (training, 1),
    "sweep": (saves_sweeps, 3),
}


def cut_everywhere(
    work: Work,
    kept: int,
    pools: PoolTracker,
    opened: OpenedStore,
    *,
    every: int,
    choices: int,
    look: Work | None = None,
) -> int:
    """Cut the power before every ``every``-th call, with ``choices`` of what survives each time;
    ``kept``: how many of those saved last no retention can have deleted, if
    ``look`` does not look itself. How many states were seen."""
    states = 0
    for cut_at in range(1, MOST, every):
        fs, done = CrashFs(cut_at), list[int]()
        opened.store = store = LocalStore(ROOT, fs=fs)
        try:
            work(store, done)
        except PowerCut:
            pools.assert_all_freed()
        else:
            assert cut_at > fs.operations
            return states
        for left in fs.crashes(limit=choices, seed=cut_at):
            if look is not None:
                look(LocalStore(ROOT, fs=left), done)
            else:
                check_promises(LocalStore(ROOT, fs=left), done[-kept:])
            states += 1
    pytest.fail("no end to the calls")


def branches(store: LocalStore, done: list[int]) -> None:
    """Training goes back to version 1 and on from there; what comes after it counts no more."""
    save_twice(store, done)
    state = initial_state()
    with holdfast.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        ckpt.resume(at=1)
        done.append(BRANCHED)
        train(state, ckpt, 3)


BRANCHED = -1


@pytest.mark.parametrize(
    ("every", "choices"), [(29, 3), pytest.param(3, 5, marks=pytest.mark.slow)]
)
def test_a_branch_that_was_left_stays_left(
    every: int, choices: int, pools: PoolTracker, opened: OpenedStore
) -> None:
    def look(store: LocalStore, done: list[int]) -> None:
        run = Run(store)
        assert BRANCHED not in done or run.branch() == 1
        assert run.branch() == 0 or Version(2) not in run.line()
        assert run.branch() == 0 or run.read_branch(1).from_version == "version_1"
        check_promises(store, done[:1])

    cut_everywhere(branches, 1, pools, opened, every=every, choices=choices, look=look)


@pytest.mark.parametrize("name", WORKS)
def test_power_cuts_here_and_there(name: str, pools: PoolTracker, opened: OpenedStore) -> None:
    work, kept = WORKS[name]
    every = 11 if name == "save_async" else 29
    assert cut_everywhere(work, kept, pools, opened, every=every, choices=3) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_the_power_is_cut_at_every_call(name: str, pools: PoolTracker, opened: OpenedStore) -> None:
    work, kept = WORKS[name]
    every = 2 if name == "sweep" else 1
    assert cut_everywhere(work, kept, pools, opened, every=every, choices=5) > 200


def test_without_its_syncs_the_store_would_break_the_promises(
    pools: PoolTracker, opened: OpenedStore
) -> None:
    """The check itself is checked: it finds what a store without fsync leaves."""

    class Lazy(CrashFs):
        def fsync(self, fd: int) -> None:
            pass

    fs = Lazy()
    opened.store = LocalStore(ROOT, fs=fs)
    save_twice(opened.store, [])
    broken = 0
    for left in fs.crashes(limit=24):
        try:
            check_promises(LocalStore(ROOT, fs=left), [1, 2])
        except (AssertionError, holdfast.errors.HoldfastError):
            broken += 1
    assert broken > 12
