"""Copies: they have the same bytes or are not committed, and never replace existing files."""

from threading import Event, Lock
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.convert import copy as copy_module
from limpet.convert.copy import copy_snapshot
from limpet.errors import AlreadyExists, CommitError, DigestMismatch, FormatError, NoSpace, NotFound
from limpet.format.names import MANIFEST, is_pin_name
from limpet.loading.snapshot import reader_of
from limpet.run.run import Run
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Traits
from limpet.types import MIB
from tests.unreliable_stores import HookedStore


class FullStore(MemoryStore):
    """A store that has no space for keys that end in ``suffix``."""

    suffix = MANIFEST

    def put_if_absent(self, key, data):
        if self.suffix and key.endswith(self.suffix):
            raise NoSpace(f"No room for {key}")
        return super().put_if_absent(key, data)


def objects(store):
    return {s.key: store.get(s.key, 1 << 30) for s in store.list("")}


def damage(store, suffix):
    [key] = [k for k in objects(store) if k.endswith(suffix)]
    raw = bytearray(store.get(key, 1 << 30))
    raw[-1] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(raw))


@pytest.fixture
def store():
    return MemoryStore("source")


@pytest.fixture
def snapshot(store):
    state = {"big": np.arange(300_000.0), "small": np.ones(3), "n": 1}
    return reader_of(limpet.save(store.at("version_7"), state))


def test_a_copy_is_identical(store, snapshot):
    to = MemoryStore()
    copied: list[int] = []
    copy = copy_snapshot(snapshot, Location(to, "version_7"), copied.append)
    assert objects(to) == objects(store)
    assert copy.digest == snapshot.digest
    assert copy.verify().ok
    assert sum(copied) == sum(s.length + s.index.length for s in snapshot.manifest.shards)


def test_a_copy_to_a_folder_and_back_is_intact_and_leaves_no_unfinished_files(tmp_path, snapshot):
    run = Run(tmp_path / "run")
    copy_snapshot(snapshot, Location(run.store, "version_7"))
    back = MemoryStore()
    copy = copy_snapshot(
        reader_of(limpet.open(tmp_path / "run/version_7")), Location(back, "version_7")
    )
    assert copy.verify().ok
    assert not list(run.store.partials(""))


def test_a_copy_over_an_existing_snapshot_is_refused(snapshot):
    to = MemoryStore()
    copy_snapshot(snapshot, Location(to, "version_7"))
    before = objects(to)
    with pytest.raises(AlreadyExists, match="already"):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert objects(to) == before


@pytest.mark.parametrize("suffix", [".safetensors", ".index.json", MANIFEST])
def test_a_damaged_snapshot_is_not_copied(store, snapshot, suffix):
    damage(store, suffix)
    to = MemoryStore()
    with pytest.raises(FormatError):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert not [k for k in objects(to) if k.endswith((MANIFEST, ".safetensors"))]
    assert not list(to.partials(""))


def test_a_failed_copy_leaves_no_snapshot_and_can_be_continued(snapshot):
    to = FullStore()
    with pytest.raises(NoSpace):
        copy_snapshot(snapshot, Location(to, "version_7"))
    with pytest.raises(NotFound):
        limpet.open(to.at("version_7"))
    assert Run(to).listing().process_pins == []
    to.suffix = ""
    assert copy_snapshot(snapshot, Location(to, "version_7")).verify().ok


def test_files_of_a_failed_copy_are_verified_before_they_are_used(snapshot):
    to = FullStore()
    with pytest.raises(NoSpace):
        copy_snapshot(snapshot, Location(to, "version_7"))
    damage(to, ".safetensors")
    to.suffix = ""
    with pytest.raises(AlreadyExists, match=r"not a copy.*\n?.*delete that file first") as raised:
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert isinstance(raised.value.__cause__, DigestMismatch)
    assert not [k for k in objects(to) if k.endswith(MANIFEST)]


def test_the_error_for_a_different_index_in_the_location_states_what_to_do(snapshot):
    to = MemoryStore()
    to.put_if_absent(f"version_7/{snapshot.manifest.shards[0].index.name}", b"another")
    with pytest.raises(AlreadyExists, match=r"not a copy.*delete that file first"):
        copy_snapshot(snapshot, Location(to, "version_7"))


def test_a_truncated_shard_in_the_location_is_refused(snapshot):
    to = MemoryStore()
    to.put_if_absent(f"version_7/{snapshot.manifest.shards[0].name}", b"short")
    with pytest.raises(AlreadyExists, match="not a copy"):
        copy_snapshot(snapshot, Location(to, "version_7"))


def test_a_sweep_removes_no_files_of_a_copy_in_progress(snapshot):
    to = MemoryStore()
    swept: list[Any] = []

    def sweep(nbytes):
        swept.append(Run(to).sweep(grace=0.0))

    copy_snapshot(snapshot, Location(to, "version_7"), sweep)
    assert swept
    assert not any(s.removed for s in swept)
    assert limpet.open(to.at("version_7")).verify().ok
    assert not [k for k in objects(to) if is_pin_name(k)]


def test_a_snapshot_that_was_replaced_during_a_copy_is_refused(store, snapshot):
    snapshot.indexes()
    store.delete(f"version_7/{MANIFEST}")
    limpet.save(store.at("version_7"), {"n": 2})
    with pytest.raises(FormatError, match="replaced"):
        copy_snapshot(snapshot, Location(MemoryStore(), "version_7"))


@pytest.mark.parametrize("suffix", [".safetensors", ".index.json"])
def test_a_file_that_disappears_before_the_commit_is_no_damage_of_the_source(snapshot, suffix):
    to = HookedStore(MemoryStore("backup"))

    def delete(method, key):
        if method == "put_if_absent" and key.endswith(".index.json"):
            for stat in to.inner.list("version_7"):
                if stat.key.endswith(suffix):
                    to.inner.delete(stat.key)

    to.after = delete
    with pytest.raises(CommitError, match=r"(?s)memory://backup/version_7 are not.*at the dest"):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert not [s for s in to.inner.list("") if s.key.endswith(MANIFEST)]


@pytest.mark.parametrize(("parts", "expected"), [(1, 1), (4, 4), (100, 8)])
def test_the_threads_of_a_copy_are_bounded_by_the_memory_of_an_upload(parts, expected, monkeypatch):
    """The first writes wait until as many threads write as may."""
    monkeypatch.setenv("LIMPET_THREADS", "8")
    monkeypatch.setattr(copy_module, "MAX_UPLOAD_BYTES", parts * MIB)
    traits = Traits("collecting", 1, durable=False, upload_memory=MIB)
    monkeypatch.setattr(MemoryStore, "traits", traits)
    snapshot = limpet.save(MemoryStore().at("version_7"), {"w": np.zeros(64 * MIB, "u1")})
    to, lock, all_write = HookedStore(MemoryStore()), Lock(), Event()
    writing = most = 0

    def begin(method, key):
        nonlocal writing, most
        if method == "write_at":
            with lock:
                writing += 1
                most = max(most, writing)
                if writing >= expected:
                    all_write.set()
            assert all_write.wait(60)

    def end(method, key):
        nonlocal writing
        if method == "write_at":
            with lock:
                writing -= 1

    to.before, to.after = begin, end
    copy_snapshot(reader_of(snapshot), Location(to, "version_7"))
    assert most == expected
