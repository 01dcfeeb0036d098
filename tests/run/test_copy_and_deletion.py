"""A copy and a deletion at its destination: the copy has all of its files, or is not committed."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import limpet
from limpet import machine
from limpet.convert.copy import copy_snapshot
from limpet.errors import AlreadyExists, NoSpace, NotFound, StoreError, Unavailable
from limpet.format.names import (
    MANIFEST,
    Version,
    is_notice_name,
    is_pin_name,
    notice_name,
    random_id,
    shard_name,
)
from limpet.loading.snapshot import reader_of
from limpet.run.policy import KeepLast
from limpet.run.run import Run
from limpet.run.writer_lock import WriterLock
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Store
from tests.interleaving import Actor, count_calls, run_interleaved
from tests.unreliable_stores import HookedStore

VERSION = Version(7)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")


@pytest.fixture
def snapshot():
    state = {"big": np.arange(3000.0), "n": 1}
    return reader_of(limpet.save(MemoryStore("source").at("version_7"), state, step=7))


def orphans(snapshot):
    """Return a run in which a copy of the snapshot was interrupted before its manifest."""
    to = committed(snapshot)
    to.delete(f"version_7/{MANIFEST}")
    return to


def committed(snapshot):
    """Return a run with a copy of the snapshot."""
    to = MemoryStore("copy")
    copy_snapshot(snapshot, Location(to, "version_7"))
    return to


def with_newer(snapshot):
    to = committed(snapshot)
    limpet.save(to.at("version_8"), {"n": 2}, step=8)
    return to


DELETIONS: dict[str, tuple[Callable[[SnapshotReader], MemoryStore], Callable[[Store], object]]] = {
    "sweep": (orphans, lambda store: Run(store).sweep(grace=0)),
    "delete": (with_newer, lambda store: Run(store).delete(VERSION)),
    "retain": (with_newer, lambda store: Run(store).retain(KeepLast(1))),
}


def copy_to(snapshot):
    return lambda store: copy_snapshot(snapshot, Location(store, "version_7"))


def exists(store):
    """Return whether version 7 exists, after checking every byte of it."""
    try:
        found = open_location(Location(store, "version_7"))
    except NotFound:
        return False
    assert found.verify().ok
    return True


def check_outcome(to, copy, deletion):
    """Check what a copy and a deletion have left, and that a repeated copy succeeds."""
    if deletion.failure is not None:  # it found nothing to delete, or a copy in progress
        assert type(deletion.failure) in (NotFound, limpet.errors.LimpetError)
    outcome = type(copy.failure).__name__ if copy.failure else "copied"
    if copy.failure is None:
        assert exists(to)
    else:
        assert isinstance(copy.failure, Unavailable | AlreadyExists), copy.failure
        if not exists(to):
            copied = copy.action(to)
            assert isinstance(copied, SnapshotReader)
            assert exists(to)
    left = [s.key for s in to.list("") if is_pin_name(s.key) or is_notice_name(s.key)]
    assert left == []
    return outcome


@pytest.mark.parametrize("name", DELETIONS)
def test_a_copy_that_runs_during_a_deletion(name, snapshot):
    """Run the whole copy before each call of the deletion in turn."""
    prepare, delete = DELETIONS[name]
    outcomes = Counter[str]()
    for at in range(count_calls(prepare(snapshot), delete) + 1):
        to, copy, deletion = prepare(snapshot), Actor(copy_to(snapshot)), Actor(delete)
        run_interleaved(to, deletion, copy, (at, 1 << 20))
        outcomes[check_outcome(to, copy, deletion)] += 1
    assert outcomes["copied"] > 0
    assert outcomes["Unavailable"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["copy", "deletion"])
@pytest.mark.parametrize("name", DELETIONS)
def test_a_copy_and_a_deletion_that_interrupt_each_other(name, first, snapshot):
    """Run n calls of one, then m calls of the other, then the rest of the first: for all n, m."""
    prepare, delete = DELETIONS[name]
    outcomes = Counter[str]()
    deletions = count_calls(prepare(snapshot), delete)
    copies = count_calls(orphans(snapshot), copy_to(snapshot))
    for n in range((copies if first == "copy" else deletions) + 1):
        for m in range((deletions if first == "copy" else copies) + 3):
            to, copy, deletion = prepare(snapshot), Actor(copy_to(snapshot)), Actor(delete)
            actors = (copy, deletion) if first == "copy" else (deletion, copy)
            run_interleaved(to, *actors, (n, m))
            outcomes[check_outcome(to, copy, deletion)] += 1
    assert outcomes["copied"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [orphans, lambda _: MemoryStore()], ids=["orphans", "nothing"])
def test_two_copies_that_interrupt_each_other(prepare, snapshot):
    calls = count_calls(prepare(snapshot), copy_to(snapshot))
    for n in range(calls + 1):
        for m in range(calls + 2):
            to, copies = prepare(snapshot), [Actor(copy_to(snapshot)) for _ in range(2)]
            run_interleaved(to, copies[0], copies[1], (n, m))
            for copy in copies:  # the other one was committed before this one began
                assert copy.failure is None or "snapshot" in str(copy.failure), copy.failure
            assert exists(to)


def notice(to, version):
    location = Location(to, "version_7")
    return pins.create_pin(location, random_id(), version, notice_name)


@pytest.mark.parametrize("version", [VERSION, None])
def test_a_notice_stops_a_copy_while_its_process_lives(snapshot, version, monkeypatch):
    to = orphans(snapshot)
    key = notice(to, version)
    with pytest.raises(Unavailable, match=f"(?s)is deleting files of .*{key}.*Copy again later"):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert not exists(to)
    assert Run(to).sweep(dry_run=True, grace=0).removed == [s.key for s in to.list("version_7")], (
        "the notice is kept"
    )
    monkeypatch.setattr(pins, "is_holder_alive", lambda record: None)  # on another machine
    with pytest.raises(Unavailable):
        copy_snapshot(snapshot, Location(to, "version_7"))
    monkeypatch.setattr(pins, "is_holder_alive", lambda record: False)
    copy_snapshot(snapshot, Location(to, "version_7"))
    assert exists(to)
    assert Run(to).sweep().removed == [key]


def test_the_next_deletion_removes_a_notice_that_could_not_be_removed(snapshot):
    """The process may live for months, and its notice stops copies as long."""
    to = orphans(snapshot)
    store = HookedStore(to)

    def fail(method, key):
        if method == "delete" and is_notice_name(key):
            raise Unavailable("The server restarts")

    store.before = fail
    Run(store).sweep(grace=0)
    with pytest.raises(
        Unavailable, match=r"notice deleting/\w+\.json of process \d+ on [^ ]+, since"
    ):
        copy_snapshot(snapshot, Location(to, "version_7"))
    to.put_if_absent(f"version_8/{shard_name(0, 1, random_id())}", b"orphan")
    Run(to).sweep(grace=0)
    assert not list(to.list("deleting"))
    copy_snapshot(snapshot, Location(to, "version_7"))


def test_a_notice_of_another_version_stops_no_copy(snapshot):
    to = orphans(snapshot)
    notice(to, Version(8))
    copy_snapshot(snapshot, Location(to, "version_7"))
    assert exists(to)


def test_an_unreadable_notice_stops_copies(snapshot):
    to = orphans(snapshot)
    to.put_if_absent("deleting/0123456789ab.json", b"damaged")
    with pytest.raises(Unavailable, match="deleting/0123456789ab"):
        copy_snapshot(snapshot, Location(to, "version_7"))


class FullStore(HookedStore):
    """A store that has space for a small file only after an object was deleted."""

    def __init__(self, inner):
        super().__init__(inner)
        self.deleted = 0
        self.before = self._refuse

    def _refuse(self, method, key):
        self.deleted += method == "delete" and key.endswith((".safetensors", ".index.json"))
        if method == "put_if_absent" and not self.deleted:
            raise NoSpace(f"No room for {key}")


@pytest.mark.parametrize("name", DELETIONS)
@pytest.mark.parametrize("is_always_full", [False, True])
def test_a_full_store_does_not_prevent_deletion(name, is_always_full, snapshot):
    prepare, delete = DELETIONS[name]
    to = prepare(snapshot)
    nbytes = sum(stat.length for stat in to.list("version_7"))
    store = FullStore(to)
    if is_always_full:
        store.before = lambda method, key: (
            store._refuse(method, key) or setattr(store, "deleted", 0)
        )
    result: Any = delete(store)
    assert not list(to.list("version_7"))
    if name == "sweep":
        assert len(result.removed) == 2
    if name == "delete":
        assert result == nbytes


def test_a_sweep_of_a_store_that_stays_full_does_not_read_the_run_for_each_file():
    """A store with snapshots frees no space when a file is deleted."""
    store, counts = HookedStore(MemoryStore()), Counter[str]()
    for step in range(64):
        store.put_if_absent(f"version_{step}/{shard_name(0, 1, random_id())}", b"orphan")

    def refuse(method, key):
        counts[method] += 1
        if method == "put_if_absent":
            raise NoSpace(f"No room for {key}")

    store.before = refuse
    assert len(Run(store).sweep(grace=0).removed) == 64
    assert counts["stat"] < 64 * 8  # it was 64 * 34


def test_retention_writes_no_notice_while_a_reader_protects_all_files(snapshot):
    """The pin of a reader that was killed on another machine counts for a week."""
    to = with_newer(snapshot)
    run, calls, held = Run(store := HookedStore(to)), Counter[str](), list[str]()

    def pin(method, key):
        calls[method] += 1
        if (method, key) == ("delete", f"version_7/{MANIFEST}"):
            held.append(pins.create_pin(Location(to, "version_7"), random_id(), VERSION))

    store.before = pin
    run.retain(KeepLast(1))
    assert len(list(to.list("version_7"))) == 2
    calls.clear()
    run.retain(KeepLast(1))
    assert calls["put_if_absent"] == calls["delete"] == 0
    to.delete(held[0])
    run.retain(KeepLast(1))
    assert not list(to.list("version_7"))


def test_the_error_of_a_notice_that_cannot_be_written_is_raised(snapshot):
    to = orphans(snapshot)
    store = HookedStore(to)

    def deny(method, key):
        if method == "put_if_absent":
            raise limpet.errors.Denied(f"May not write {key}")

    store.before = deny
    with pytest.raises(StoreError, match="May not write deleting/"):
        Run(store).sweep(grace=0)
    assert len(list(to.list("version_7"))) == 2
    assert len(Run(store).sweep(grace=0, dry_run=True).removed) == 2


def test_orphan_evaluations_and_lasting_pins_that_a_copy_uses_are_kept(snapshot):
    to = committed(snapshot)
    Run(to).add_metrics(VERSION, {"loss": 1})
    Run(to).pin(7)
    to.delete(f"version_7/{MANIFEST}")
    swept: list[Any] = []
    copied = copy_snapshot(
        snapshot, Location(to, "version_7"), lambda n: swept.append(Run(to).sweep(grace=0))
    )
    assert not any(s.removed for s in swept)
    assert Run(to).metrics(copied.version) == {"loss": 1}
    assert Run(to).pins() == [VERSION]


def test_a_training_that_takes_a_run_over_leaves_the_notices_of_the_previous_one(
    snapshot, monkeypatch
):
    """The previous training may be alive on another machine, and in the middle of a deletion."""
    identity = machine.process_identity
    for at in range(count_calls(orphans(snapshot), DELETIONS["sweep"][1])):
        to, deletion = orphans(snapshot), Actor(DELETIONS["sweep"][1])
        with monkeypatch.context() as patch:
            for module in (pins, machine):
                patch.setattr(module, "process_identity", lambda: ("elsewhere", "boot", "1:1"))
            WriterLock(to).acquire()
            deletion.run(to, at)
        assert machine.process_identity is identity
        WriterLock(to).acquire()
        with suppress(Unavailable):
            copy_to(snapshot)(to)
        deletion.run(to, None)
        exists(to)
