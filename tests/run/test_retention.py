"""What is deleted and what never: retention, pins, deletion beside readers and saves, failures at
every call."""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import events
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.transform.copy import copy_snapshot
from holdfast.errors import HoldfastError, NotFound, SkippedVersion, StoreError, Unavailable
from holdfast.format.names import MANIFEST, Version, new_attempt, shard_name
from holdfast.run import catalog
from holdfast.run.catalog import VersionRecord
from holdfast.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast, KeepPolicy, Record
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.crashfs import CrashFs
from holdfast.testing.faults import Fault, FaultFs
from tests.crash.promises import check_promises
from tests.engine.unreliable_stores import HookedStore
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit, shard_of, state_after, train, trained_run, training

DAY = 24 * 3600.0
YEAR = 365 * DAY


class KeepNothing(KeepPolicy):
    """What no policy of ours does: even so the newest stays."""

    def keep(self, records: Any) -> frozenset[Version]:
        return frozenset()


def make_run(*steps: int) -> MemoryStore:
    """A run with these versions on its first branch."""
    store = MemoryStore()
    for step in steps:
        holdfast.save(store.at(f"version_{step}"), state_after(1), step=step)
    return store


@pytest.fixture
def store() -> MemoryStore:
    """A training with versions 20, 40, 60."""
    return trained_run()


def steps(store: Store) -> list[int]:
    return [v.step for v in Run(store).listing().versions]


def cut(store: MemoryStore, key: str) -> None:
    raw = store.get(key, 1 << 30)
    store.delete(key)
    store.put_if_absent(key, raw[:-1])


@pytest.fixture
def refers(monkeypatch: pytest.MonkeyPatch) -> dict[Version, set[Version]]:
    """Which versions refer to which: a table that stands for incremental versions."""
    table: dict[Version, set[Version]] = {}
    real = catalog.make_version_record

    def read(snapshot: Snapshot) -> VersionRecord:
        found = real(snapshot)
        bases = frozenset(table.get(snapshot.version, ()))
        files = dict(found.files)
        for base in bases:
            for stat in snapshot.location.store.list(str(base)):
                if stat.key.endswith(".safetensors"):
                    files[stat.key] = stat.length
        return replace(found, bases=bases, files=files)

    monkeypatch.setattr(catalog, "make_version_record", read)
    return table


# -- what stays ----------------------------------------------------------------------------------


def test_keep_last_deletes_the_others_whole(store: MemoryStore) -> None:
    assert Run(store).retain(KeepLast(1)) == [Version(20), Version(40)]
    assert {s.key.partition("/")[0] for s in store.list("")} == {"version_60"}
    assert Run(store).retain(KeepLast(1)) == []


def test_the_policy_that_keeps_all_looks_at_nothing(store: MemoryStore) -> None:
    wrapped = HookedStore(store)
    wrapped.before = lambda method, key: pytest.fail(f"{method} {key}")
    assert Run(wrapped).retain(KeepPolicy()) == []


@pytest.mark.parametrize("damage", ["manifest", "cut", "gone", "index"])
def test_only_intact_versions_count_and_damaged_ones_stay(store: MemoryStore, damage: str) -> None:
    shard = shard_of(store, "version_60")
    if damage == "manifest":
        flip_bit(store, f"version_60/{MANIFEST}")
    elif damage == "cut":
        cut(store, shard)
    elif damage == "gone":
        store.delete(shard)
    else:
        cut(store, shard.replace(".safetensors", ".index.json"))
    before = {s.key for s in store.list("version_60")}
    gone = Run(store).retain(KeepLast(1))
    # the bytes of a manifest that cannot be read mention its parent, which might be its base
    assert gone == [Version(20)]
    assert steps(store) == [40, 60]
    assert {s.key for s in store.list("version_60")} == before


def test_the_newest_intact_never_goes(store: MemoryStore) -> None:
    cut(store, shard_of(store, "version_60"))
    Run(store).retain(KeepNothing())
    assert steps(store) == [40, 60]
    Run(store).retain(KeepNothing())
    assert steps(store) == [40, 60]


def test_other_branches_are_left_alone(store: MemoryStore) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 60)
    assert Run(store).retain(KeepLast(1)) == [Version(20), Version(40, 1)]
    assert Run(store).line() == [Version(60, 1)]
    assert Version(40) in Run(store).listing().versions


def test_best_and_every_are_kept_after_every_save() -> None:
    losses = {10: 0.9, 20: 0.2, 30: 0.5, 40: 0.2, 50: 0.8, 60: 0.9, 70: 0.95}
    store = MemoryStore()
    state = {"n": 0}
    keep = KeepLast(2) | KeepBest(1, "loss") | KeepEvery(30)
    with holdfast.Checkpointer(store, state, save=EverySteps(10), keep=keep) as ckpt:
        for step in range(1, 71):
            ckpt.step({"loss": losses.get(step, 1.0)})
            ckpt.wait()
    assert steps(store) == [30, 40, 60, 70]


# -- pins ----------------------------------------------------------------------------------------


def test_a_pinned_version_stays_until_it_is_unpinned(store: MemoryStore) -> None:
    run = Run(store)
    assert run.pin(20) == Version(20)
    assert run.pin(20) == Version(20)
    assert run.pins() == Run(store).pins() == [Version(20)]
    assert run.retain(KeepLast(1)) == [Version(40)]
    assert run.unpin(20) == Version(20)
    assert run.pins() == []
    assert run.retain(KeepLast(1)) == [Version(20)]


def test_a_damaged_pin_still_pins(store: MemoryStore) -> None:
    Run(store).pin(20)
    flip_bit(store, "pin-version_20.json")
    assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).pin(20) == Version(20)


def too_new(store: MemoryStore) -> str:
    """A process's pin of a format that is to come."""
    key = pins.create_pin(Location(store, "version_60"), new_attempt(), Version(20))
    raw = seal(sealed_content(store.get(key, 1 << 20)), 99)
    store.delete(key)
    store.put_if_absent(key, raw)
    return key


def torn(store: MemoryStore) -> str:
    """A process's pin of which a bit has flipped."""
    key = pins.create_pin(Location(store, "version_60"), new_attempt(), Version(20))
    flip_bit(store, key)
    return key


@pytest.mark.parametrize("unread", [too_new, torn])
def test_beside_a_pin_that_cannot_be_read_nothing_is_deleted_for_a_week(
    store: MemoryStore, unread: Callable[[MemoryStore], str]
) -> None:
    keys = orphaned(store, 40)
    key = unread(store)
    run = Run(store)
    heard: list[str] = []
    with events.attach(lambda name, fields: heard.append(f"{name} {fields.get('version')}")):
        assert run.retain(KeepLast(1)) == []
    assert f"skipped {key}" in heard
    with pytest.raises(HoldfastError, match=f"{key} is unreadable and may protect any version"):
        run.delete(Version(20))
    swept = run.sweep(grace=0, abandoned=True)
    assert swept.removed == []
    assert dict(swept.kept) == dict.fromkeys(
        keys, f"{key} is unreadable and may protect any version"
    )
    later = run.sweep(now=time.time() + 8 * DAY)
    assert sorted(later.removed) == sorted([*keys, key])
    assert run.retain(KeepLast(1)) == [Version(20)]


@pytest.mark.parametrize("unread", [too_new, torn])
def test_a_pin_that_cannot_be_read_and_comes_in_the_middle_keeps_the_files(
    store: MemoryStore, unread: Callable[[MemoryStore], str]
) -> None:
    """It may be of a save that has pinned the version, looked for it, and refers to it."""
    wrapped, came = HookedStore(store), []

    def come(method: str, key: str) -> None:
        if method == "delete" and key == f"version_20/{MANIFEST}":
            came.append(unread(store))

    wrapped.after = come
    run = Run(wrapped)
    run.delete(Version(20))
    assert len(list(store.list("version_20"))) == 2
    store.delete(came[0])
    assert run.retain(KeepLast(2)) == []
    assert list(store.list("version_20")) == []


def test_a_pin_that_cannot_be_read_keeps_what_is_on_its_way(store: MemoryStore) -> None:
    run = Run(store)
    run.pin(20)
    store.delete(f"version_20/{MANIFEST}")
    store.put(f"version_80/{MANIFEST}", 5)
    store.put(f"version_80/{shard_name(0, 1, new_attempt())}", 5)
    key = torn(store)
    ahead = time.time() + 61
    swept = run.sweep(grace=0, now=ahead)
    assert swept.removed == []
    assert {why for _, why in swept.kept} == {f"{key} is unreadable and may protect any version"}
    assert len(swept.kept) == 5  # two partial files, two files of version_20 and its lasting pin
    store.delete(key)
    assert len(run.sweep(grace=0, now=ahead).removed) == 5


def test_a_lasting_pin_keeps_no_leftovers_beside_its_version(store: MemoryStore) -> None:
    Run(store).pin(20)
    key = f"version_20/{shard_name(0, 1, new_attempt())}"
    store.put_if_absent(key, b"left over")
    assert Run(store).sweep(now=time.time() + YEAR).removed == [key]


def test_what_is_not_there_is_not_pinned_and_what_is_not_pinned_not_unpinned(
    store: MemoryStore,
) -> None:
    with pytest.raises(NotFound, match=r"no version of step 30.*version_20, version_40"):
        Run(store).pin(30)
    with pytest.raises(NotFound, match=r"version_40 of .* is not pinned\. Pinned versions: none"):
        Run(store).unpin(40)
    Run(store).pin(20)
    with pytest.raises(
        NotFound, match=r"version_40 of .* is not pinned\. Pinned versions: version_20"
    ):
        Run(store).unpin(40)
    Run(store).unpin(20)
    with pytest.raises(NotFound, match="no version of step 30"):
        Run(store).unpin(30)
    with pytest.raises(NotFound, match="no branch 3"):
        Run(store).pin(20, branch=3)
    assert Run(store).pins() == []


def test_versions_of_branches_that_were_left_can_be_pinned(store: MemoryStore) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 40)
    run = Run(store)
    assert run.pin(40) == Version(40, 1)
    assert run.pin(40, branch=0) == Version(40)
    assert run.pin(60, branch=0) == Version(60)
    assert run.pins() == [Version(40), Version(40, 1), Version(60)]
    assert run.unpin(60) == Version(60)  # the only one of that step
    assert run.unpin(40) == Version(40, 1)
    assert run.unpin(40, branch=0) == Version(40)


def test_a_pin_that_comes_too_late_is_told_and_taken_back(store: MemoryStore) -> None:
    wrapped = HookedStore(store)

    def vanish(method: str, key: str) -> None:
        if method == "put_if_absent":
            store.delete(f"version_20/{MANIFEST}")

    wrapped.after = vanish
    with pytest.raises(NotFound, match="deleted before it could be pinned"):
        Run(wrapped).pin(20)
    assert Run(store).pins() == []


def test_what_a_process_reads_stays_as_long_as_it_lives(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = pins.create_pin(Location(store, "version_60"), new_attempt(), Version(20))
    assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).retain(KeepLast(1)) == []
    monkeypatch.setattr(
        pins, "is_holder_alive", lambda record: None
    )  # on another machine: for a week
    assert Run(store).retain(KeepLast(1)) == []
    monkeypatch.setattr(pins, "is_holder_alive", lambda record: False)
    assert Run(store).retain(KeepLast(1)) == [Version(20)]
    assert list(Run(store).sweep().removed) == [key]


def test_reading_much_pins_and_reading_little_does_not(store: MemoryStore) -> None:
    place = Location(store, "version_20")
    with (
        pins.pin_while_reading(place, pins.MIN_PINNED_BYTES - 1),
        pins.pin_while_reading(Location(store, "x"), pins.MIN_PINNED_BYTES),
    ):
        assert Run(store).listing().process_pins == []
    with pins.pin_while_reading(place, pins.MIN_PINNED_BYTES):
        assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).listing().process_pins == []
    with pytest.raises(ZeroDivisionError), pins.pin_while_reading(place, pins.MIN_PINNED_BYTES):
        raise ZeroDivisionError
    assert Run(store).listing().process_pins == []
    assert Run(store).retain(KeepLast(1)) == [Version(20)]
    with (
        pytest.raises(NotFound, match="deleted before"),
        pins.pin_while_reading(place, pins.MIN_PINNED_BYTES),
    ):
        pytest.fail("it is gone")
    assert Run(store).listing().process_pins == []


def test_reading_pins_the_bases_as_well() -> None:
    store = make_run(10, 20, 30, 40)
    with pins.pin_while_reading(
        Location(store, "version_30"), pins.MIN_PINNED_BYTES, {Version(10)}
    ):
        assert Run(store).retain(KeepLast(1)) == [Version(20)]
    assert Run(store).retain(KeepLast(1)) == [Version(10), Version(30)]


def read_by_load(run: Run) -> object:
    return load_snapshot(run.open(Version(20)), None)


def read_by_verify(run: Run) -> object:
    return run.open(Version(20)).verify()


def read_by_copy(run: Run) -> object:
    return copy_snapshot(run.open(Version(20)), Location(MemoryStore(), "version_20"))


@pytest.mark.parametrize("read", [read_by_load, read_by_verify, read_by_copy])
def test_a_version_is_not_deleted_while_it_is_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, read: Callable[[Run], object]
) -> None:
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 1)
    wrapped, tried = HookedStore(store), []

    def retain(method: str, key: str) -> None:
        if method == "get_range" and "version_20/" in key:  # it is in the middle of it
            tried.append(Run(store).retain(KeepLast(1)))

    wrapped.before = retain
    read(Run(wrapped))
    assert {v for gone in tried for v in gone} == {Version(40)}  # by several threads
    assert Run(store).listing().process_pins == []
    assert Run(store).retain(KeepLast(1)) == [Version(20)]


@pytest.mark.parametrize("error", [holdfast.errors.Denied, holdfast.errors.NoSpace, Unavailable])
def test_where_no_pin_can_be_written_it_is_read_without(
    store: MemoryStore, error: type[StoreError]
) -> None:
    wrapped, left = HookedStore(store), []

    def refuse(method: str, key: str) -> None:
        if method in ("put_if_absent", "delete"):
            raise error("no")

    wrapped.before = refuse
    with (
        events.attach(lambda name, fields: left.append(name)),
        pins.pin_while_reading(
            Location(wrapped, "version_20"), pins.MIN_PINNED_BYTES, {Version(40)}
        ),
    ):
        assert wrapped.get(f"version_20/{MANIFEST}", 1 << 20)
    assert left == ([] if error is holdfast.errors.Denied else ["pin_left"])


# -- bases ---------------------------------------------------------------------------------------

Refers = dict[Version, set[Version]]


def test_a_base_stays_as_long_as_something_refers_to_it(refers: Refers) -> None:
    store = make_run(10, 20, 30, 40)
    refers[Version(30)] = {Version(10)}
    run = Run(store)
    assert run.retain(KeepLast(2)) == [Version(20)]
    assert run.retain(KeepLast(2)) == []
    assert run.retain(KeepLast(1)) == [Version(10), Version(30)]


def test_a_chain_of_bases_stays_and_goes_together(refers: Refers) -> None:
    store = make_run(10, 20, 30, 40, 50)
    refers.update({Version(20): {Version(10)}, Version(30): {Version(10), Version(20)}})
    run = Run(store)
    assert run.retain(KeepLast(3)) == []
    order: list[str] = []
    real = store.delete
    store.delete = lambda key: (order.append(key), real(key))[1]  # type: ignore[method-assign]
    assert run.retain(KeepLast(2)) == [Version(10), Version(20), Version(30)]
    # newest first: whenever it ends, no manifest refers to a version that is gone
    assert order[:3] == [f"version_{s}/{MANIFEST}" for s in (30, 20, 10)]


def test_a_base_of_a_damaged_version_stays(refers: Refers) -> None:
    store = make_run(10, 20, 30)
    refers[Version(20)] = {Version(10)}
    cut(store, shard_of(store, "version_20"))
    assert Run(store).retain(KeepLast(1)) == []
    assert steps(store) == [10, 20, 30]


def test_a_base_of_a_version_on_a_branch_that_was_left_stays(
    store: MemoryStore, refers: Refers
) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=40)
        train(state, ckpt, 80)
    refers[Version(60)] = {Version(20)}
    assert Run(store).retain(KeepLast(1)) == [Version(40), Version(60, 1)]
    assert steps(store) == [20, 60, 80]


def test_what_a_manifest_that_cannot_be_read_mentions_stays(store: MemoryStore) -> None:
    raw = store.get(f"version_60/{MANIFEST}", 1 << 20)
    raw = raw.replace(b'"version_40"', b'"../version_20/"')
    store.delete(f"version_60/{MANIFEST}")
    store.put_if_absent(f"version_60/{MANIFEST}", raw)
    with training(store, EverySteps(20)) as (state, ckpt):
        with pytest.warns(SkippedVersion, match="version_60"):
            ckpt.resume()
        train(state, ckpt, 80)
    assert Run(store).retain(KeepLast(1)) == [Version(40), Version(60, 1)]
    assert steps(store) == [20, 60, 80]


def test_a_manifest_that_the_disk_cannot_give_stops_the_deletion(store: MemoryStore) -> None:
    wrapped = HookedStore(store)

    def fail(method: str, key: str) -> None:
        if method == "get" and key == f"version_40/{MANIFEST}":
            raise StoreError("Cannot read it: Input/output error")

    wrapped.before = fail
    with pytest.raises(StoreError, match="Input/output"):
        Run(wrapped).retain(KeepLast(1))
    assert steps(store) == [20, 40, 60]


# -- deleting one --------------------------------------------------------------------------------


def test_delete_refuses_what_is_pinned_referred_to_or_absent(refers: Refers) -> None:
    store = make_run(10, 20, 30)
    refers[Version(20)] = {Version(10)}
    run = Run(store)
    run.pin(30)
    with pytest.raises(HoldfastError, match=r"version_30 .* not deleted: it is pinned"):
        run.delete(Version(30))
    with pytest.raises(HoldfastError, match="not deleted: version_20 refers to it"):
        run.delete(Version(10))
    with pytest.raises(NotFound, match="no version_40"):
        run.delete(Version(40))
    key = pins.create_pin(run.location(Version(20)), new_attempt(), Version(20))
    with pytest.raises(HoldfastError, match="a process is using it"):
        run.delete(Version(20))
    pins.remove_pin(run.location(Version(20)), key)
    assert steps(store) == [10, 20, 30]
    size = sum(s.length for s in store.list("version_20"))
    assert run.delete(Version(20)) == size
    run.delete(Version(10))
    assert list(store.list("version_10")) == []


# -- beside readers and saves, at every moment ---------------------------------------------------


class Interleaved(HookedStore):
    """Lets others act before chosen calls of the one that deletes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls = 0
        self.acts: list[tuple[int, Callable[[], object]]] = []
        self.before = self._count

    def _count(self, method: str, key: str) -> None:
        self.calls += 1
        while self.acts and self.acts[0][0] <= self.calls:
            self.acts.pop(0)[1]()

    def finish(self) -> None:
        for _, act in self.acts:
            act()
        self.acts.clear()


def calls_of_a_retention(keep: KeepPolicy) -> int:
    store = Interleaved(make_run(1, 2))
    Run(store).retain(keep)
    return store.calls


def test_a_reader_at_every_moment_is_refused_or_reads_to_the_end() -> None:
    calls = calls_of_a_retention(KeepLast(1))
    outcomes: Counter[str] = Counter()
    for at, seen_at in itertools.combinations_with_replacement(range(1, calls + 2), 2):
        inner = make_run(1, 2)
        store, place = Interleaved(inner), Location(inner, "version_1")
        snapshot = Run(inner).open(Version(1))
        reader: list[Any] = []

        def hold(place: Location = place, reader: list[Any] = reader) -> None:
            reader.append(pins.create_pin(place, new_attempt(), Version(1)))

        def see(place: Location = place, reader: list[Any] = reader) -> None:
            try:
                pins.require_manifest(place)
                reader.append("reads")
            except NotFound:
                reader.append("refused")

        store.acts = [(at, hold), (seen_at, see)]
        run = Run(store)
        run.retain(KeepLast(1))
        store.finish()
        outcomes[reader[1]] += 1
        if reader[1] == "reads":
            snapshot.check_files()
        pins.remove_pin(place, reader[0])
        run.retain(KeepLast(1))
        assert [s.key for s in inner.list("version_1")] == []
    assert outcomes.keys() == {"reads", "refused"}
    assert min(outcomes.values()) > 5


def test_a_save_that_refers_to_what_is_deleted_at_every_moment(refers: Refers) -> None:
    """It pins its base, looks for it, commits, takes the pin away: whenever it has committed,
    what it refers to is there."""
    calls = calls_of_a_retention(KeepLast(1))
    refers[Version(3)] = {Version(1)}
    third = make_run(3)
    outcomes: Counter[str] = Counter()
    moments = itertools.combinations_with_replacement(range(1, calls + 2), 3)
    for at, seen_at, commit_at in itertools.islice(moments, 0, None, 3):
        inner = make_run(1, 2)
        store, place = Interleaved(inner), Location(inner, "version_1")
        needed = {s.key for s in inner.list("version_1") if s.key.endswith(".safetensors")}
        saver: list[Any] = []

        def hold(place: Location = place, saver: list[Any] = saver) -> None:
            saver.append(pins.create_pin(place, new_attempt(), Version(1)))

        def see(place: Location = place, saver: list[Any] = saver) -> None:
            try:
                pins.require_manifest(place)
                saver.append("saves")
            except NotFound:
                saver.append("refused")

        def commit(
            inner: MemoryStore = inner, place: Location = place, saver: list[Any] = saver
        ) -> None:
            if saver[1] == "saves":
                for key in sorted((s.key for s in third.list("")), reverse=True):
                    inner.put_if_absent(key, third.get(key, 1 << 30))
            pins.remove_pin(place, saver[0])

        store.acts = [(at, hold), (seen_at, see), (commit_at, commit)]
        run = Run(store)
        run.retain(KeepLast(1))
        store.finish()
        outcomes[saver[1]] += 1
        for again in (run, Run(inner)):
            again.retain(KeepLast(1))
            again.sweep(grace=0, now=time.time() + 1)
            if saver[1] == "saves":
                assert needed <= {s.key for s in inner.list("version_1")}, (at, seen_at, commit_at)
            else:
                assert not list(inner.list("version_1"))
    assert min(outcomes["saves"], outcomes["refused"]) > 20


# -- failures at every call ----------------------------------------------------------------------


def failing(inner: Store, at: int, *, lost: bool) -> HookedStore:
    """A store whose ``at``-th call fails, before it is made or with its reply lost."""
    store, calls = HookedStore(inner), itertools.count(1)

    def fail(method: str, key: str) -> None:
        if next(calls) == at:
            raise Unavailable(f"Cannot {method} {key}", key=key, store="failing")

    if lost:
        store.after = fail
    else:
        store.before = fail
    return store


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost"])
def test_whichever_call_fails_the_promises_hold_and_the_next_retention_finishes(
    lost: bool,
) -> None:
    whole = MemoryStore()
    with training(whole, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 4)
    for at in range(1, 200):
        inner = MemoryStore()
        for stat in whole.list(""):
            inner.put_if_absent(stat.key, whole.get(stat.key, 1 << 30))
        store = failing(inner, at, lost=lost)
        run, failed = Run(store), False
        try:
            run.retain(KeepLast(2))
        except Unavailable:
            failed = True
            run.retain(KeepLast(2))
        assert steps(inner) == [3, 4]
        assert {s.key.partition("/")[0] for s in inner.list("")} == {"version_3", "version_4"}
        if not failed:
            assert at > 10
            break
    else:
        pytest.fail("no end to the calls")


def test_a_version_whose_manifest_could_not_be_deleted_is_whole(store: MemoryStore) -> None:
    Run(store).add_metrics(Version(40), {"loss": 1})
    before = {s.key for s in store.list("version_40")}
    wrapped = HookedStore(store)

    def refuse(method: str, key: str) -> None:
        if method == "delete" and key == f"version_40/{MANIFEST}":
            raise Unavailable("no")

    wrapped.before = refuse
    run = Run(wrapped)
    with pytest.raises(Unavailable):
        run.retain(KeepLast(1))
    assert run.retain(KeepLast(2)) == [Version(20)]
    assert {s.key for s in store.list("version_40")} == before


def test_whichever_call_is_the_last_the_promises_hold() -> None:
    """The process dies there: another one goes on, and a sweep removes what is left."""
    for at in range(1, 200):
        store = MemoryStore()
        with training(store, EverySteps(1)) as (state, ckpt):
            train(state, ckpt, 4)
        dead = HookedStore(store)
        calls = itertools.count(1)

        def die(method: str, key: str, calls: Iterator[int] = calls, at: int = at) -> None:
            if next(calls) >= at:
                raise KeyboardInterrupt

        dead.before = die
        try:
            Run(dead).retain(KeepLast(2))
        except KeyboardInterrupt:
            check_promises(store, [3, 4])
            Run(store).retain(KeepLast(2))
            assert steps(store) == [4, 5]
        else:
            assert at > 10
            break


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "lost"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_whichever_call_to_the_disk_fails(every: int, lost: bool) -> None:
    for at in range(every, 400, every):
        disk = CrashFs()
        with training(LocalStore("/a/run", fs=disk), EverySteps(1)) as (state, ckpt):
            train(state, ckpt, 3)
        error = (errno.EIO, errno.EACCES, errno.ESTALE)[at % 3]
        fs = FaultFs(disk, Fault(None, at, error, lost=lost))
        run = Run(LocalStore("/a/run", fs=fs))
        with contextlib.suppress(StoreError):
            run.retain(KeepLast(1))
        if not fs.fired:
            assert at > 30
            break
        run.retain(KeepLast(1))
        found = LocalStore("/a/run", fs=disk)
        assert {s.key.partition("/")[0] for s in found.list("")} == {"version_3"}
        if at % 5 == 0:
            check_promises(found, [3])


def test_incremental_versions_keep_what_they_refer_to() -> None:
    """Each refers to the one before it, up to the next full one; then all of them go."""
    store = MemoryStore()
    state = {"frozen": np.arange(9000.0), "live": np.zeros(9)}
    seen = []
    with holdfast.Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(1), incremental=True, full_every=3
    ) as ckpt:
        for step in range(1, 8):
            state["live"] += 1
            ckpt.step()
            ckpt.wait()
            seen.append(steps(store))
            for version in Run(store).listing().versions:
                assert Run(store).open(version).verify().ok
            assert Run(store).sweep(grace=0, now=time.time() + 1).removed == []
            assert step in seen[-1]
    full = [step for step, found in enumerate(seen, 1) if found == [step]]
    assert full == [1, 4, 7]
    assert seen[1] == [1, 2]


@pytest.mark.parametrize(
    ("rotating", "full_every", "most"),
    [
        (False, None, 2),  # a frozen base and its newest adapter, for ever
        (False, 5, 2),
        (True, 5, 5),  # the newest needs all of them, up to the next full one
        (True, None, 30),  # none can ever go
    ],
)
def test_how_many_versions_stay_because_others_refer_to_them(
    rotating: bool, full_every: int | None, most: int
) -> None:
    store = MemoryStore()
    state = {str(part): np.zeros(9000) for part in range(3)} | {"live": np.zeros(9)}
    counts = []
    with holdfast.Checkpointer(
        store,
        state,
        save=EverySteps(1),
        keep=KeepLast(1),
        incremental=True,
        full_every=full_every,
    ) as ckpt:
        for step in range(30):
            state[str(step % 3) if rotating else "live"] += 1
            ckpt.step()
            ckpt.wait()
            counts.append(len(steps(store)))
    assert max(counts) == most


# -- what it costs -------------------------------------------------------------------------------


def counted(inner: Store) -> tuple[HookedStore, Counter[str]]:
    store, calls = HookedStore(inner), Counter[str]()
    store.before = lambda method, key: calls.update([f"{method} {key.rpartition('/')[2]}"])
    return store, calls


def test_a_manifest_and_an_evaluation_are_read_once_and_no_file_is_looked_at() -> None:
    inner = make_run(*range(1, 31))
    for step in range(1, 31):
        Run(inner).add_metrics(Version(step), {"loss": step})
    store, calls = counted(inner)
    run = Run(store)
    run.retain(KeepLast(40) | KeepBest(2, "loss"))
    assert calls[f"get {MANIFEST}"] == 30
    calls.clear()
    holdfast.save(inner.at("version_31"), state_after(1), step=31)
    run.retain(KeepLast(30) | KeepBest(2, "loss"))
    assert calls[f"get {MANIFEST}"] == 1
    assert sum(n for call, n in calls.items() if call.startswith("get")) == 1
    assert sum(n for call, n in calls.items() if call.startswith("list")) == 2
    assert not any(call.startswith("stat") for call in calls)
    assert run.best("loss") is not None
    assert run.retain(KeepLast(1)) != []
    run.retain(KeepLast(1))
    assert len(run.catalog._version_records) == 1, "what is gone is forgotten"
    assert run.catalog._evaluations == {}


def test_what_is_damaged_is_told_once(store: MemoryStore) -> None:
    flip_bit(store, f"version_20/{MANIFEST}")
    run, told = Run(store), []
    with events.attach(lambda name, fields: told.append((name, str(fields.get("version"))))):
        run.retain(KeepLast(1))
        run.retain(KeepLast(1))
    assert told == [("skipped", "version_20"), ("deleted", "version_40")]


# -- sweep ---------------------------------------------------------------------------------------


def orphaned(store: MemoryStore, step: int) -> list[str]:
    """A version of which only the manifest is deleted."""
    store.delete(f"version_{step}/{MANIFEST}")
    return [s.key for s in store.list(f"version_{step}")]


def test_sweep_keeps_what_a_manifest_of_another_version_refers_to(refers: Refers) -> None:
    store = make_run(10, 20)
    refers[Version(20)] = {Version(10)}
    Run(store).catalog.read_versions(Run(store).listing())
    index, shard = sorted(orphaned(store, 10))
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert (swept.removed, swept.kept) == ([index], [])
    refers.clear()
    assert Run(store).sweep(now=time.time() + YEAR).removed == [shard]


def test_sweep_keeps_what_a_manifest_that_cannot_be_read_may_refer_to(store: MemoryStore) -> None:
    keys = orphaned(store, 40)
    flip_bit(store, f"version_60/{MANIFEST}")  # it mentions version_40
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert swept.removed == []
    assert {(k, "an unreadable manifest may refer to it") for k in keys} <= set(swept.kept)


def test_sweep_keeps_what_a_process_still_reads_of_a_deleted_version(store: MemoryStore) -> None:
    place = Location(store, "version_20")
    key = pins.create_pin(place, new_attempt(), Version(20))
    keys = orphaned(store, 20)
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert swept.removed == []
    assert swept.kept == [(k, "a process is using it") for k in keys]
    pins.remove_pin(place, key)
    assert Run(store).sweep(now=time.time() + YEAR).removed == keys


def test_sweep_removes_evaluations_and_pins_of_versions_that_are_gone(store: MemoryStore) -> None:
    run = Run(store)
    run.add_metrics(Version(20), {"loss": 1})
    run.add_metrics(Version(40), {"loss": 1})
    run.pin(20)
    run.pin(40)
    keys = orphaned(store, 20)
    assert len(keys) == 3
    assert Run(store).sweep().removed == []
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert sorted(swept.removed) == sorted([*keys, "pin-version_20.json"])
    assert Run(store).metrics(Version(40))["loss"] == 1
    assert Run(store).pins() == [Version(40)]


def test_sweep_of_abandoned_versions_leaves_what_is_pinned_or_referred_to(
    store: MemoryStore, refers: Refers
) -> None:
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 60)
    run = Run(store)
    refers[Version(60, 1)] = {Version(40)}
    run.pin(60, branch=0)
    kept = [("version_40", "version_60.1 refers to it"), ("version_60", "it is pinned")]
    for dry_run in (True, False):
        swept = run.sweep(abandoned=True, dry_run=dry_run)
        assert (swept.removed, swept.kept) == ([], kept)
    run.unpin(60, branch=0)
    told = run.sweep(abandoned=True, dry_run=True)
    swept = run.sweep(abandoned=True)
    assert sorted(told.removed) == sorted(swept.removed)
    assert told.nbytes == swept.nbytes > 0
    assert swept.kept == kept[:1]
    assert run.listing().versions == [Version(20), Version(40), Version(40, 1), Version(60, 1)]


def test_a_small_file_on_its_way_is_left_alone_for_a_moment(tmp_path: Any) -> None:
    """A save puts its pin before anything speaks for it: swept away, it would fail."""
    holdfast.save(tmp_path / "version_1", {"x": 1}, step=1)
    key = ".pin-0123456789ab.json.0123456789abcdef.partial"
    (tmp_path / key).write_bytes(b"{")
    run = Run(tmp_path)
    assert run.sweep(grace=0).kept == [(key, "younger than 60 s")]
    assert run.sweep(grace=0, now=time.time() + 61).removed == [key]


def test_retention_is_a_rule_over_records(store: MemoryStore) -> None:
    """What a policy is given: intact versions on the lineage, oldest first, with their metrics."""
    seen: list[Iterable[Record]] = []

    class Look(KeepPolicy):
        def keep(self, records: Any) -> frozenset[Version]:
            seen.append(records)
            return super().keep(records)

    run = Run(store)
    run.add_metrics(Version(40), {"loss": -1.0, "accuracy": 0.5})
    assert run.retain(Look()) == []
    [records] = seen
    first, second, _ = records
    assert (first.version, set(first.metrics)) == (Version(20), {"loss"})
    assert (second.version, second.metrics) == (Version(40), {"loss": -1.0, "accuracy": 0.5})
