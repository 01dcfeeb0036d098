"""The crash tests skip a check only if both the files and the reports equal those of another."""

from __future__ import annotations

from threading import Event, Thread

import limpet
from limpet.format.names import random_id
from limpet.run.policy import EverySteps, KeepLast
from limpet.storage.local.store import LocalStore
from limpet.testing.crashfs import CrashFs
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.trainings import flip_bit, initial_state, train


def train_on(fs: CrashFs, steps: int = 2) -> LocalStore:
    store, state = LocalStore("/a/run", fs=fs), initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(1)) as ckpt:
        train(state, ckpt, steps)
    return store


def test_equal_trainings_leave_one_state() -> None:
    checked = CheckedStates()
    with equal_bytes() as restart_ids:
        for _ in range(2):
            restart_ids()
            fs = CrashFs()
            train_on(fs)
            checked.add(fs, [1, 2])
    assert len(checked) == 1


def test_any_difference_makes_a_new_state() -> None:
    checked = CheckedStates()
    with equal_bytes() as restart_ids:
        fs = CrashFs()
        store = train_on(fs)
        assert checked.add(fs, [1, 2])
        assert not checked.add(fs, [1, 2])
        assert checked.add(fs, [1])
        keys = [stat.key for stat in store.list("")]
        for key in keys:
            flip_bit(store, key)
            assert checked.add(fs, [1, 2]), key
        fs.mkdir("/a/run/version_9")
        assert checked.add(fs, [1, 2])
        fs.rename_noreplace(f"/a/run/{keys[0]}", "/a/run/renamed")
        assert checked.add(fs, [1, 2])
        restart_ids()
        other = CrashFs()
        train_on(other, 3)
        assert checked.add(other, [1, 2])


def test_the_threads_of_an_earlier_test_take_none_of_the_ids() -> None:
    """An earlier test may have left a training whose save is still in flight."""
    go, others = Event(), list[str]()

    def save() -> None:
        assert go.wait(30)
        shard = Thread(target=lambda: others.append(random_id()))
        shard.start()
        shard.join(30)
        others.append(random_id())

    earlier = Thread(target=save)
    earlier.start()
    with equal_bytes() as restart_ids:
        restart_ids()
        expected = [random_id(), random_id()]
        restart_ids()
        ids = [random_id()]
        go.set()
        earlier.join(30)
        ids.append(random_id())
    assert ids == expected
    assert len({*ids, *others}) == 4
