"""The deadline of a save and of a load ends them. What they have left is removed."""

from copy import copy
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import SaveFailed, Unavailable
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys, partial_keys
from tests.unreliable_stores import HookedStore

STATE = {"w": np.arange(1000.0), "n": 3}


def assert_loaded(state):
    assert np.array_equal(state["w"], STATE["w"])
    assert state["n"] == 3


class SlowStore(HookedStore):
    """A store in memory whose calls take a second each, by a clock that nothing else moves."""

    def __init__(self, monkeypatch):
        super().__init__(MemoryStore())
        self.deadline: Deadline | None = None
        self.times = [0.0]
        after = Deadline.after
        monkeypatch.setattr(
            Deadline, "after", lambda s, purpose: after(s, purpose, lambda: self.times[0])
        )
        self.before = self._wait

    def _wait(self, method, key):
        if self.deadline is not None:
            limit = self.deadline.for_cleanup() if method == "delete" else self.deadline
            limit.check()
        self.times[0] += 1


class RemoteStore(SlowStore):
    """The same on a server: no call takes longer than until the deadline."""

    def within(self, deadline):
        view = copy(self)
        view.deadline = deadline
        view.before = view._wait
        return view


def save(store, timeout, in_background):
    if not in_background:
        return limpet.save(store, STATE, step=1, timeout=timeout)
    return limpet.save_async(store, STATE, step=1, timeout=timeout).wait()


def outcome_of(function, *args, **options):
    """Return what the function returns, or its error."""
    try:
        return function(*args, **options), None
    except Unavailable as e:
        return None, e


@pytest.mark.parametrize("kind", [SlowStore, RemoteStore])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_commits_in_time_or_raises(kind, in_background):
    outcomes = []
    for seconds in range(1, 20):
        with pytest.MonkeyPatch.context() as monkeypatch:
            store = kind(monkeypatch)
            snapshot, error = outcome_of(save, store, seconds, in_background)
            outcomes.append("raised" if error else "committed")
            if error:
                assert f"The time is over for the save of {store.url}: {seconds} s" in str(error)
                is_committed = "manifest.json" in keys(store.inner)
                assert error.is_outcome_unknown or not is_committed
                if kind is RemoteStore:
                    assert store.times[0] <= seconds + CLEANUP_SECONDS
            store.times[0] += 1000
            if error:
                snapshot = limpet.open(store) if is_committed else save(store, None, False)
            assert snapshot.verify().ok  # it has no deadline
            assert_loaded(limpet.load(store))
            assert not [key for key in keys(store.inner) if "pin-" in key]
            assert partial_keys(store.inner) == []
    assert {*outcomes} == {"raised", "committed"}
    assert outcomes == sorted(outcomes, reverse=True)  # with enough time, it commits


def test_a_load_ends_in_time_or_raises(monkeypatch):
    store = RemoteStore(monkeypatch)
    save(store, None, False)
    outcomes = []
    for seconds in range(1, 8):
        live = {"w": np.zeros(1000), "n": 0}
        _, error = outcome_of(limpet.load, store, live, timeout=seconds)
        outcomes.append("raised" if error else "loaded")
        if error:
            assert f"The time is over for the load of {store.url}: {seconds} s" in str(error)
        else:
            assert_loaded(live)
    assert {*outcomes} == {"raised", "loaded"}
    assert outcomes == sorted(outcomes, reverse=True)


def test_a_training_goes_on_after_a_save_that_took_too_long(monkeypatch):
    store = RemoteStore(monkeypatch)
    wait = RemoteStore._wait

    def stall(self, method, key):
        wait(self, method, key)
        if method == "commit" and "version_2/" in key:
            self.times[0] += 30

    monkeypatch.setattr(RemoteStore, "_wait", stall)
    store.before = store._wait
    state: dict[str, Any] = {"x": 0}
    with (
        pytest.warns(SaveFailed, match="The time is over for the save of .*version_2: 30 s"),
        limpet.Checkpointer(
            store, state, save=limpet.EverySteps(1), save_timeout=30, on_error="warn"
        ) as ckpt,
    ):
        for step in range(1, 5):
            state["x"] = step
            ckpt.step()
    run = limpet.Run(store)
    assert [s.step for s in run.snapshots()] == [1, 3, 4]
    assert all(s.verify().ok for s in run.snapshots())
    assert not [key for key in keys(store.inner) if "pin-" in key]


@pytest.mark.parametrize("name", ["pin-", ".safetensors", ".index.json", "manifest.json"])
def test_only_the_outcome_of_the_manifest_is_that_of_the_save(name):
    """It may be unknown whether another object was written, but then nothing was committed."""
    store = HookedStore(MemoryStore())

    def lose_reply(method, key):
        if method in ("commit", "put_if_absent") and name in key:
            raise Unavailable("The reply was lost", outcome="unknown")

    store.after = lose_reply
    with pytest.raises(Unavailable) as caught:
        limpet.save(store, STATE, step=1)
    assert caught.value.is_outcome_unknown == (name == "manifest.json")
