"""The crash tests skip a check only if both the files and the reports equal those of another."""

import limpet
from limpet.run.policy import EverySteps, KeepLast
from limpet.storage.local.store import LocalStore
from limpet.testing.crashfs import CrashFs
from tests.crash.equal_states import CheckedStates, equal_bytes
from tests.trainings import flip_bit, initial_state, train


def train_on(fs, steps=2):
    store, state = LocalStore("/a/run", fs=fs), initial_state()
    with limpet.Checkpointer(store, state, save=EverySteps(1), keep=KeepLast(1)) as ckpt:
        train(state, ckpt, steps)
    return store


def test_any_difference_makes_a_new_state():
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
