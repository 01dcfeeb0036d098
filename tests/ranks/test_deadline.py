"""A rank that is too slow for the deadline of a save: all ranks raise, and the next save works."""

import threading
import time
import uuid
from typing import Any

import pytest

import limpet
from limpet import deadline
from limpet.errors import RankFailed, Unavailable
from limpet.ranks import collective as collective_module
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.testing.contract import keys
from tests.fakegroup import FakeGroup
from tests.ranks.faults import ThreadedJob, state_of
from tests.unreliable_stores import HookedStore

VICTIM = 1


def outcomes_of(job, seconds):
    def save(rank):
        state = state_of(rank, job.size, 1)
        return limpet.save(job.url(rank, 1), state, step=1, timeout=seconds)

    return job.group.outcomes(save)


@pytest.mark.parametrize("hangs", [False, True])
def test_all_ranks_raise_when_one_is_too_slow(trial_stores, monkeypatch, hangs):
    """A rank that goes on raises first. For one that hangs, the others wait a little longer."""
    monkeypatch.setattr(
        collective_module,
        "late_seconds",
        lambda _, rank: (0.3 if hangs else 20) + (10 if rank else 0),
    )
    inner = MemoryStore()
    job = ThreadedJob(3, [inner] * 3)
    released = threading.Event()

    def be_slow(call):
        if call.target == "store" and call.method == "write_at":
            released.wait(30) if hangs else time.sleep(1)

    def release():
        time.sleep(2.5)
        released.set()

    job.ranks[VICTIM].before_call = be_slow
    threading.Thread(target=release, daemon=True).start()
    began = time.monotonic()
    outcomes = outcomes_of(job, 0.5)
    assert time.monotonic() - began < 8
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            assert isinstance(outcome, RankFailed)
            assert outcome.rank == VICTIM
            expected = "it to arrive in the time for the save of" if hangs else "The time is over"
            assert expected in str(outcome), str(outcome)
    assert isinstance(outcomes[VICTIM], Unavailable)
    assert Run(inner).snapshots() == []
    job.ranks[VICTIM].before_call = lambda call: None
    assert all(not isinstance(o, BaseException) for o in outcomes_of(job, 30))
    assert [s.step for s in Run(inner).snapshots()] == [1]
    assert Run(inner).snapshots()[0].verify().ok


def test_no_pin_remains_after_rank_0_has_waited_for_longer_than_a_cleanup_may_take(monkeypatch):
    monkeypatch.setattr(deadline, "CLEANUP_SECONDS", 0.05)
    monkeypatch.setattr(collective_module, "late_seconds", lambda *_: 0.3)
    store = open_store(f"fsspec+memory://{uuid.uuid4().hex}", allow_weak=True)
    hanging, released = HookedStore(store), threading.Event()
    hanging.before = lambda method, key: released.wait(30) if method == "put" else None
    stores: list[Any] = [store, hanging]

    def save(rank):
        try:
            return limpet.save(stores[rank], state_of(rank, 2, 1), step=1, timeout=0.5)
        finally:
            released.set()

    with FakeGroup(2) as group:
        outcomes = group.outcomes(save)
    assert type(outcomes[0]) is RankFailed, outcomes
    assert [key for key in keys(store) if key.startswith("pin-")] == []


class UserStore(MemoryStore):
    """A store whose views refuse every call after their deadline."""

    def within(self, deadline):
        view = HookedStore(self)
        view.before = lambda method, key: deadline.check()
        return view


@pytest.mark.parametrize("kind", ["fsspec", "of a user"])
@pytest.mark.parametrize("late", [False, True])
def test_no_pin_remains_of_a_load_that_ends_after_its_deadline(monkeypatch, kind, late):
    monkeypatch.setattr(deadline, "CLEANUP_SECONDS", 0.5 if late else 20)
    url = f"fsspec+memory://{uuid.uuid4().hex}"
    store: Any = UserStore() if kind == "of a user" else open_store(url, allow_weak=True)
    store.put_if_absent("version_1/manifest.json", b"any")
    location = Location(store, "version_1").limit("load", 0.2)
    with pins.pin_while_reading(location, pins.MIN_PINNED_BYTES):
        assert [key for key in keys(store) if key.startswith("pin-")] != []
        time.sleep(0.8 if late else 0.3)
    assert [key for key in keys(store) if key.startswith("pin-")] == []
