"""Retention and pins: what is deleted, concurrent readers and saves, and failures of every call."""

import contextlib
import errno
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

import limpet
from limpet import events
from limpet.convert.copy import copy_snapshot
from limpet.errors import LimpetError, NotFound, SkippedVersion, StoreError, Unavailable
from limpet.format.names import MANIFEST, NOTICES, Version, pin_name, random_id, shard_name
from limpet.format.records import MAX_RECORD
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.run import catalog
from limpet.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast, KeepPolicy, Record
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import Fault, FaultFs
from tests.crash.promises import check_promises
from tests.forging import seal, sealed_content
from tests.trainings import flip_bit, shard_of, state_after, train, trained_run, training
from tests.unreliable_stores import HookedStore

DAY = 24 * 3600.0
YEAR = 365 * DAY


class KeepNothing(KeepPolicy):
    """A policy that keeps nothing. Retention keeps the newest version nevertheless."""

    def keep(self, records):
        return frozenset()


def make_run(*steps):
    """Return a run with these versions on its first branch."""
    store = MemoryStore()
    for step in steps:
        limpet.save(store.at(f"version_{step}"), state_after(1), step=step)
    return store


@pytest.fixture
def store():
    """Return a run with versions 20, 40, and 60."""
    return trained_run()


def steps(store):
    return [v.step for v in Run(store).listing().versions]


def truncate(store, key):
    raw = store.get(key, 1 << 30)
    store.delete(key)
    store.put_if_absent(key, raw[:-1])


@pytest.fixture
def references(monkeypatch):
    """Return a table of references between versions, to simulate incremental versions."""
    table: dict[Version, set[Version]] = {}
    real = catalog.make_version_record

    def read(snapshot):
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


def test_keep_last_deletes_all_files_of_other_versions(store):
    assert Run(store).retain(KeepLast(1)) == [Version(20), Version(40)]
    assert {s.key.partition("/")[0] for s in store.list("")} == {"version_60"}
    assert Run(store).retain(KeepLast(1)) == []


def test_the_policy_that_keeps_everything_makes_no_store_call(store):
    wrapped = HookedStore(store)
    wrapped.before = lambda method, key: pytest.fail(f"{method} {key}")
    assert Run(wrapped).retain(KeepPolicy()) == []


@pytest.mark.parametrize("damage", ["manifest", "truncated", "deleted", "index"])
def test_only_intact_versions_count_and_damaged_ones_are_kept(store, damage):
    shard = shard_of(store, "version_60")
    if damage == "manifest":
        flip_bit(store, f"version_60/{MANIFEST}")
    elif damage == "truncated":
        truncate(store, shard)
    elif damage == "deleted":
        store.delete(shard)
    else:
        truncate(store, shard.replace(".safetensors", ".index.json"))
    before = {s.key for s in store.list("version_60")}
    deleted = Run(store).retain(KeepLast(1))
    # the unreadable manifest mentions its parent, which could be its base
    assert deleted == [Version(20)]
    assert steps(store) == [40, 60]
    assert {s.key for s in store.list("version_60")} == before


def test_the_newest_intact_version_is_never_deleted(store):
    truncate(store, shard_of(store, "version_60"))
    Run(store).retain(KeepNothing())
    assert steps(store) == [40, 60]
    Run(store).retain(KeepNothing())
    assert steps(store) == [40, 60]


def test_versions_on_other_branches_are_kept(store):
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 60)
    assert Run(store).retain(KeepLast(1)) == [Version(20), Version(40, 1)]
    assert Run(store).line() == [Version(60, 1)]
    assert Version(40) in Run(store).listing().versions


def test_retention_of_several_policies_after_every_save():
    losses = {10: 0.9, 20: 0.2, 30: 0.5, 40: 0.2, 50: 0.8, 60: 0.9, 70: 0.95}
    store = MemoryStore()
    state = {"n": 0}
    keep = KeepLast(2) | KeepBest(1, "loss") | KeepEvery(30)
    with limpet.Checkpointer(store, state, save=EverySteps(10), keep=keep) as ckpt:
        for step in range(1, 71):
            ckpt.step({"loss": losses.get(step, 1.0)})
            ckpt.wait()
    assert steps(store) == [30, 40, 60, 70]


def test_a_pinned_version_is_kept_until_it_is_unpinned(store):
    run = Run(store)
    assert run.pin(20) == Version(20)
    assert run.pin(20) == Version(20)
    assert run.pins() == Run(store).pins() == [Version(20)]
    assert run.retain(KeepLast(1)) == [Version(40)]
    assert run.unpin(20) == Version(20)
    assert run.pins() == []
    assert run.retain(KeepLast(1)) == [Version(20)]


def test_a_damaged_pin_still_pins(store):
    Run(store).pin(20)
    flip_bit(store, "pin-version_20.json")
    assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).pin(20) == Version(20)


def pin_in_newer_format(store):
    """Create a process pin in a future format."""
    key = pins.create_pin(Location(store, "version_60"), random_id(), Version(20))
    raw = seal(sealed_content(store.get(key, 1 << 20)), 99)
    store.delete(key)
    store.put_if_absent(key, raw)
    return key


def damaged_pin(store):
    """Create a process pin with a flipped bit."""
    key = pins.create_pin(Location(store, "version_60"), random_id(), Version(20))
    flip_bit(store, key)
    return key


def oversized_pin(store):
    store.put_if_absent(pin_name(random_id()), b" " * (MAX_RECORD + 1))
    return Run(store).listing().process_pins[0]


@pytest.mark.parametrize("create_unreadable", [pin_in_newer_format, damaged_pin, oversized_pin])
def test_an_unreadable_pin_prevents_all_deletion_for_a_week(store, create_unreadable):
    keys = orphaned(store, 40)
    key = create_unreadable(store)
    run = Run(store)
    emitted: list[str] = []
    with events.attach(lambda name, fields: emitted.append(f"{name} {fields.get('version')}")):
        assert run.retain(KeepLast(1)) == []
    assert f"skipped {key}" in emitted
    with pytest.raises(LimpetError, match=f"{key} is unreadable and may protect any version"):
        run.delete(Version(20))
    swept = run.sweep(grace=0, abandoned=True)
    assert swept.removed == []
    assert dict(swept.kept) == dict.fromkeys(
        keys, f"{key} is unreadable and may protect any version"
    )
    later = run.sweep(now=time.time() + 8 * DAY)
    assert sorted(later.removed) == sorted([*keys, key])
    assert run.retain(KeepLast(1)) == [Version(20)]


@pytest.mark.parametrize("create_unreadable", [pin_in_newer_format, damaged_pin])
def test_an_unreadable_pin_created_during_a_deletion_keeps_the_files(store, create_unreadable):
    """The pin may belong to a save that checked the version and now refers to it."""
    wrapped, created = HookedStore(store), []

    def create_pin(method, key):
        if method == "delete" and key == f"version_20/{MANIFEST}":
            created.append(create_unreadable(store))

    wrapped.after = create_pin
    run = Run(wrapped)
    run.delete(Version(20))
    assert len(list(store.list("version_20"))) == 2
    store.delete(created[0])
    assert run.retain(KeepLast(2)) == []
    assert list(store.list("version_20")) == []


def test_an_unreadable_pin_keeps_partial_files(store):
    run = Run(store)
    run.pin(20)
    store.delete(f"version_20/{MANIFEST}")
    store.put(f"version_80/{MANIFEST}", 5)
    store.put(f"version_80/{shard_name(0, 1, random_id())}", 5)
    key = damaged_pin(store)
    later = time.time() + 61
    swept = run.sweep(grace=0, now=later)
    assert swept.removed == []
    assert {why for _, why in swept.kept} == {f"{key} is unreadable and may protect any version"}
    assert len(swept.kept) == 5  # two partial files, two files of version_20 and its lasting pin
    store.delete(key)
    assert len(run.sweep(grace=0, now=later).removed) == 5


def test_a_lasting_pin_does_not_protect_orphans_in_its_folder(store):
    Run(store).pin(20)
    key = f"version_20/{shard_name(0, 1, random_id())}"
    store.put_if_absent(key, b"left over")
    assert Run(store).sweep(now=time.time() + YEAR).removed == [key]


def test_pin_and_unpin_raise_errors_for_missing_versions_and_pins(store):
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


def test_abandoned_versions_can_be_pinned(store):
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 40)
    run = Run(store)
    assert run.pin(40) == Version(40, 1)
    assert run.pin(40, branch=0) == Version(40)
    assert run.pin(60, branch=0) == Version(60)
    assert run.pins() == [Version(40), Version(40, 1), Version(60)]
    with pytest.raises(NotFound, match="on the current lineage"):
        run.unpin(60)
    assert run.unpin(60, branch=0) == Version(60)
    assert run.unpin(40) == Version(40, 1)
    assert run.unpin(40, branch=0) == Version(40)


def test_a_process_pin_protects_while_the_process_runs(store, monkeypatch):
    key = pins.create_pin(Location(store, "version_60"), random_id(), Version(20))
    assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).retain(KeepLast(1)) == []
    monkeypatch.setattr(
        pins, "is_holder_alive", lambda record: None
    )  # on another machine, a pin counts for a week
    assert Run(store).retain(KeepLast(1)) == []
    monkeypatch.setattr(pins, "is_holder_alive", lambda record: False)
    assert Run(store).retain(KeepLast(1)) == [Version(20)]
    assert list(Run(store).sweep().removed) == [key]


def test_only_large_reads_create_a_pin(store):
    location = Location(store, "version_20")
    with (
        pins.pin_while_reading(location, pins.MIN_PINNED_BYTES - 1),
        pins.pin_while_reading(Location(store, "x"), pins.MIN_PINNED_BYTES),
    ):
        assert Run(store).listing().process_pins == []
    with pins.pin_while_reading(location, pins.MIN_PINNED_BYTES):
        assert Run(store).retain(KeepLast(1)) == [Version(40)]
    assert Run(store).listing().process_pins == []
    with pytest.raises(ZeroDivisionError), pins.pin_while_reading(location, pins.MIN_PINNED_BYTES):
        raise ZeroDivisionError
    assert Run(store).listing().process_pins == []
    assert Run(store).retain(KeepLast(1)) == [Version(20)]
    with (
        pytest.raises(NotFound, match="deleted before"),
        pins.pin_while_reading(location, pins.MIN_PINNED_BYTES),
    ):
        pytest.fail("the version is deleted")
    assert Run(store).listing().process_pins == []


def test_a_read_pins_the_bases_too():
    store = make_run(10, 20, 30, 40)
    with pins.pin_while_reading(
        Location(store, "version_30"), pins.MIN_PINNED_BYTES, {Version(10)}
    ):
        assert Run(store).retain(KeepLast(1)) == [Version(20)]
    assert Run(store).retain(KeepLast(1)) == [Version(10), Version(30)]


def read_by_load(run):
    return load_snapshot(reader_of(run.open(Version(20))), None)


def read_by_verify(run):
    return run.open(Version(20)).verify()


def read_by_copy(run):
    return copy_snapshot(reader_of(run.open(Version(20))), Location(MemoryStore(), "version_20"))


@pytest.mark.parametrize("read", [read_by_load, read_by_verify, read_by_copy])
def test_a_version_is_not_deleted_while_it_is_read(store, monkeypatch, read):
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 1)
    wrapped, tried = HookedStore(store), []

    def retain(method, key):
        if method == "get_range" and "version_20/" in key:  # during the read
            tried.append(Run(store).retain(KeepLast(1)))

    wrapped.before = retain
    read(Run(wrapped))
    assert {v for deleted in tried for v in deleted} == {Version(40)}  # several threads read
    assert Run(store).listing().process_pins == []
    assert Run(store).retain(KeepLast(1)) == [Version(20)]


@pytest.mark.parametrize("error", [limpet.errors.Denied, limpet.errors.NoSpace, Unavailable])
def test_a_read_continues_without_a_pin_if_none_can_be_written(store, error):
    wrapped, emitted = HookedStore(store), []

    def fail(method, key):
        if method in ("put_if_absent", "delete"):
            raise error("no")

    wrapped.before = fail
    with (
        events.attach(lambda name, fields: emitted.append(name)),
        pins.pin_while_reading(
            Location(wrapped, "version_20"), pins.MIN_PINNED_BYTES, {Version(40)}
        ),
    ):
        assert wrapped.get(f"version_20/{MANIFEST}", 1 << 20)
    assert emitted == ([] if error is limpet.errors.Denied else ["pin_left"])


References = dict[Version, set[Version]]


def test_a_chain_of_bases_is_kept_and_deleted_together(references):
    store = make_run(10, 20, 30, 40, 50)
    references.update({Version(20): {Version(10)}, Version(30): {Version(10), Version(20)}})
    run = Run(store)
    assert run.retain(KeepLast(3)) == []
    order: list[str] = []
    real = store.delete
    store.delete = lambda key: (order.append(key), real(key))[1]
    assert run.retain(KeepLast(2)) == [Version(10), Version(20), Version(30)]
    # newest first, so that no manifest ever refers to a deleted version
    assert order[:3] == [f"version_{s}/{MANIFEST}" for s in (30, 20, 10)]


def test_a_base_of_a_damaged_version_is_kept(references):
    store = make_run(10, 20, 30)
    references[Version(20)] = {Version(10)}
    truncate(store, shard_of(store, "version_20"))
    assert Run(store).retain(KeepLast(1)) == []
    assert steps(store) == [10, 20, 30]


def test_a_base_of_an_abandoned_version_is_kept(store, references):
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=40)
        train(state, ckpt, 80)
    references[Version(60)] = {Version(20)}
    assert Run(store).retain(KeepLast(1)) == [Version(40), Version(60, 1)]
    assert steps(store) == [20, 60, 80]


def test_versions_mentioned_by_an_unreadable_manifest_are_kept(store):
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


def test_a_read_error_of_a_manifest_stops_the_deletion(store):
    wrapped = HookedStore(store)

    def fail(method, key):
        if method == "get" and key == f"version_40/{MANIFEST}":
            raise StoreError("Cannot read it: Input/output error")

    wrapped.before = fail
    with pytest.raises(StoreError, match="Input/output"):
        Run(wrapped).retain(KeepLast(1))
    assert steps(store) == [20, 40, 60]


def test_delete_raises_for_pinned_referenced_and_missing_versions(references):
    store = make_run(10, 20, 30)
    references[Version(20)] = {Version(10)}
    run = Run(store)
    run.pin(30)
    with pytest.raises(LimpetError, match=r"version_30 .* not deleted: it is pinned"):
        run.delete(Version(30))
    with pytest.raises(LimpetError, match="not deleted: version_20 refers to it"):
        run.delete(Version(10))
    with pytest.raises(NotFound, match="no version_40"):
        run.delete(Version(40))
    key = pins.create_pin(run.location(Version(20)), random_id(), Version(20))
    with pytest.raises(LimpetError, match="a process is using it"):
        run.delete(Version(20))
    pins.remove_pin(run.location(Version(20)), key)
    assert steps(store) == [10, 20, 30]
    size = sum(s.length for s in store.list("version_20"))
    assert run.delete(Version(20)) == size
    run.delete(Version(10))
    assert list(store.list("version_10")) == []


def failing(inner, at, *, lost):
    """Return a store whose ``at``-th call fails, before its effect or (``lost``) after it."""
    store, calls = HookedStore(inner), itertools.count(1)

    def fail(method, key):
        if next(calls) == at:
            raise Unavailable(f"Cannot {method} {key}", key=key, store="failing")

    if lost:
        store.after = fail
    else:
        store.before = fail
    return store


def folders_and_files(store):
    """Return the names in the folder of a run, except notices: one may be left like a pin."""
    names = {stat.key.partition("/")[0] for stat in store.list("")}
    return names - {NOTICES}


@pytest.mark.parametrize("lost", [False, True], ids=["failed", "lost"])
def test_retention_can_be_repeated_after_the_failure_of_any_call(lost):
    original = MemoryStore()
    with training(original, EverySteps(1)) as (state, ckpt):
        train(state, ckpt, 4)
    for at in range(1, 200):
        inner = MemoryStore()
        for stat in original.list(""):
            inner.put_if_absent(stat.key, original.get(stat.key, 1 << 30))
        store = failing(inner, at, lost=lost)
        run, failed = Run(store), False
        try:
            run.retain(KeepLast(2))
        except Unavailable:
            failed = True
            run.retain(KeepLast(2))
        assert steps(inner) == [3, 4]
        assert folders_and_files(inner) == {"version_3", "version_4"}
        if not failed:
            assert at > 10
            break
    else:
        pytest.fail("the number of calls is unlimited")


def test_a_version_whose_manifest_could_not_be_deleted_is_complete(store):
    Run(store).add_metrics(Version(40), {"loss": 1})
    before = {s.key for s in store.list("version_40")}
    wrapped = HookedStore(store)

    def fail(method, key):
        if method == "delete" and key == f"version_40/{MANIFEST}":
            raise Unavailable("no")

    wrapped.before = fail
    run = Run(wrapped)
    with pytest.raises(Unavailable):
        run.retain(KeepLast(1))
    assert run.retain(KeepLast(2)) == [Version(20)]
    assert {s.key for s in store.list("version_40")} == before


@pytest.mark.slow
def test_the_promises_hold_if_the_process_dies_at_any_call():
    """Another process continues, and a sweep removes the remaining files."""
    for at in range(1, 200):
        store = MemoryStore()
        with training(store, EverySteps(1)) as (state, ckpt):
            train(state, ckpt, 4)
        dead = HookedStore(store)
        calls = itertools.count(1)

        def die(method, key, calls=calls, at=at):
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


@pytest.mark.parametrize("lost", [False, True], ids=["failed", "lost"])
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_any_file_system_call_fails(every, lost):
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
        assert folders_and_files(found) == {"version_3"}
        if at % 5 == 0:
            check_promises(found, [3])


def test_incremental_versions_keep_their_bases():
    """Each version refers to the previous one until the next full version."""
    store = MemoryStore()
    state = {"frozen": np.arange(9000.0), "live": np.zeros(9)}
    seen = []
    with limpet.Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(1), incremental=3
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
    ("rotating", "full_every", "expected"),
    [
        (False, None, 2),  # a frozen base and its newest adapter, always
        (False, 5, 2),
        (True, 5, 5),  # the newest version needs all of them until the next full version
        (True, None, 30),  # no version can be deleted
    ],
)
def test_the_number_of_versions_kept_as_bases(rotating, full_every, expected):
    store = MemoryStore()
    state = {str(part): np.zeros(9000) for part in range(3)} | {"live": np.zeros(9)}
    counts = []
    with limpet.Checkpointer(
        store, state, save=EverySteps(1), keep=KeepLast(1), incremental=full_every or 10**9
    ) as ckpt:
        for step in range(30):
            state[str(step % 3) if rotating else "live"] += 1
            ckpt.step()
            ckpt.wait()
            counts.append(len(steps(store)))
    assert max(counts) == expected


def test_a_damaged_version_is_reported_once(store):
    flip_bit(store, f"version_20/{MANIFEST}")
    run, emitted_events = Run(store), []
    with events.attach(
        lambda name, fields: emitted_events.append((name, str(fields.get("version"))))
    ):
        run.retain(KeepLast(1))
        run.retain(KeepLast(1))
    assert emitted_events == [("skipped", "version_20"), ("deleted", "version_40")]


def orphaned(store, step):
    """Delete the manifest of a version. Return its other files."""
    store.delete(f"version_{step}/{MANIFEST}")
    return [s.key for s in store.list(f"version_{step}")]


def test_sweep_keeps_files_that_another_version_refers_to(references):
    store = make_run(10, 20)
    references[Version(20)] = {Version(10)}
    Run(store).catalog.read_versions(Run(store).listing())
    index, shard = sorted(orphaned(store, 10))
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert (swept.removed, swept.kept) == ([index], [])
    references.clear()
    assert Run(store).sweep(now=time.time() + YEAR).removed == [shard]


def test_sweep_keeps_files_that_an_unreadable_manifest_may_refer_to(store):
    keys = orphaned(store, 40)
    flip_bit(store, f"version_60/{MANIFEST}")  # it mentions version_40
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert swept.removed == []
    assert {(k, "an unreadable manifest may refer to it") for k in keys} <= set(swept.kept)


def test_sweep_keeps_files_of_a_deleted_version_that_a_process_reads(store):
    location = Location(store, "version_20")
    key = pins.create_pin(location, random_id(), Version(20))
    keys = orphaned(store, 20)
    swept = Run(store).sweep(now=time.time() + YEAR)
    assert swept.removed == []
    assert swept.kept == [(k, "a process is using it") for k in keys]
    pins.remove_pin(location, key)
    assert Run(store).sweep(now=time.time() + YEAR).removed == keys


def test_sweep_removes_evaluations_and_pins_of_deleted_versions(store):
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


def test_sweep_keeps_abandoned_versions_that_are_pinned_or_referenced(store, references):
    with training(store, EverySteps(20)) as (state, ckpt):
        ckpt.resume(at=20)
        train(state, ckpt, 60)
    run = Run(store)
    references[Version(60, 1)] = {Version(40)}
    run.pin(60, branch=0)
    kept = [("version_40", "version_60.1 refers to it"), ("version_60", "it is pinned")]
    for dry_run in (True, False):
        swept = run.sweep(abandoned=True, dry_run=dry_run)
        assert (swept.removed, swept.kept) == ([], kept)
    run.unpin(60, branch=0)
    planned = run.sweep(abandoned=True, dry_run=True)
    swept = run.sweep(abandoned=True)
    assert sorted(planned.removed) == sorted(swept.removed)
    assert planned.nbytes == swept.nbytes > 0
    assert swept.kept == kept[:1]
    assert run.listing().versions == [Version(20), Version(40), Version(40, 1), Version(60, 1)]


def test_a_recent_partial_file_is_kept_for_a_minute(tmp_path):
    """A save writes its pin first. If a sweep removed the partial pin, the save would fail."""
    limpet.save(tmp_path / "version_1", {"x": 1}, step=1)
    key = ".pin-0123456789ab.json.0123456789abcdef.partial"
    (tmp_path / key).write_bytes(b"{")
    run = Run(tmp_path)
    assert run.sweep(grace=0).kept == [(key, "younger than 60 s")]
    assert run.sweep(grace=0, now=time.time() + 61).removed == [key]


def test_policies_get_records_of_intact_versions(store):
    """The records are those of the lineage, oldest first, with their metrics."""
    seen: list[Iterable[Record]] = []

    class RecordingPolicy(KeepPolicy):
        def keep(self, records):
            seen.append(records)
            return super().keep(records)

    run = Run(store)
    run.add_metrics(Version(40), {"loss": -1.0, "accuracy": 0.5})
    assert run.retain(RecordingPolicy()) == []
    [records] = seen
    first, second, _ = records
    assert (first.version, set(first.metrics)) == (Version(20), {"loss"})
    assert (second.version, second.metrics) == (Version(40), {"loss": -1.0, "accuracy": 0.5})
