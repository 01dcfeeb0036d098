"""Copies: the same bytes or nothing, and never over what is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.transform.copy import copy_snapshot
from holdfast.errors import AlreadyExists, DigestMismatch, FormatError, NoSpace, NotFound
from holdfast.format.names import MANIFEST, parse_pin
from holdfast.run.run import Run
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Stat


class Failing(MemoryStore):
    """A store without room for keys that end in ``suffix``."""

    suffix = MANIFEST

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        if self.suffix and key.endswith(self.suffix):
            raise NoSpace(f"No room for {key}")
        return super().put_if_absent(key, data)


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {s.key: store.get(s.key, 1 << 30) for s in store.list("")}


def flip(store: MemoryStore, suffix: str) -> None:
    [key] = [k for k in objects(store) if k.endswith(suffix)]
    raw = bytearray(store.get(key, 1 << 30))
    raw[-1] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(raw))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("source")


@pytest.fixture
def snapshot(store: MemoryStore) -> Snapshot:
    state = {"big": np.arange(300_000.0), "small": np.ones(3), "n": 1}
    return holdfast.save(store.at("version_7"), state)


def test_a_copy_is_byte_for_byte_the_same(store: MemoryStore, snapshot: Snapshot) -> None:
    to = MemoryStore()
    told: list[int] = []
    copy = copy_snapshot(snapshot, Location(to, "version_7"), told.append)
    assert objects(to) == objects(store)
    assert copy.digest == snapshot.digest
    assert copy.verify().ok
    assert sum(told) == sum(s.length + s.index.length for s in snapshot.manifest.shards)


def test_a_copy_between_folders_is_durable_and_whole(tmp_path: Any, snapshot: Snapshot) -> None:
    there = Run(tmp_path / "run")
    copy_snapshot(snapshot, Location(there.store, "version_7"))
    back = MemoryStore()
    copy = copy_snapshot(holdfast.open(tmp_path / "run/version_7"), Location(back, "version_7"))
    assert copy.verify().ok
    assert not list(there.store.partials(""))


def test_what_is_there_is_not_touched(snapshot: Snapshot) -> None:
    to = MemoryStore()
    copy_snapshot(snapshot, Location(to, "version_7"))
    before = objects(to)
    with pytest.raises(AlreadyExists, match="already"):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert objects(to) == before


@pytest.mark.parametrize("suffix", [".safetensors", ".index.json", MANIFEST])
def test_damage_is_never_copied(store: MemoryStore, snapshot: Snapshot, suffix: str) -> None:
    flip(store, suffix)
    to = MemoryStore()
    with pytest.raises(FormatError):
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert not [k for k in objects(to) if k.endswith((MANIFEST, ".safetensors"))]
    assert not list(to.partials(""))


def test_a_copy_that_failed_leaves_no_snapshot_and_goes_on(snapshot: Snapshot) -> None:
    to = Failing()
    with pytest.raises(NoSpace):
        copy_snapshot(snapshot, Location(to, "version_7"))
    with pytest.raises(NotFound):
        holdfast.open(to.at("version_7"))
    assert Run(to).listing().process_pins == []
    to.suffix = ""
    assert copy_snapshot(snapshot, Location(to, "version_7")).verify().ok


def test_what_a_failed_copy_left_is_checked_before_it_is_used(snapshot: Snapshot) -> None:
    to = Failing()
    with pytest.raises(NoSpace):
        copy_snapshot(snapshot, Location(to, "version_7"))
    flip(to, ".safetensors")
    to.suffix = ""
    with pytest.raises(AlreadyExists, match=r"not a copy.*\n?.*delete that file first") as raised:
        copy_snapshot(snapshot, Location(to, "version_7"))
    assert isinstance(raised.value.__cause__, DigestMismatch)
    assert not [k for k in objects(to) if k.endswith(MANIFEST)]


def test_another_index_at_the_place_is_refused_with_what_to_do(snapshot: Snapshot) -> None:
    to = MemoryStore()
    to.put_if_absent(f"version_7/{snapshot.manifest.shards[0].index.name}", b"another")
    with pytest.raises(AlreadyExists, match=r"not a copy.*delete that file first"):
        copy_snapshot(snapshot, Location(to, "version_7"))


def test_a_shard_cut_short_at_the_place_is_refused(snapshot: Snapshot) -> None:
    to = MemoryStore()
    to.put_if_absent(f"version_7/{snapshot.manifest.shards[0].name}", b"short")
    with pytest.raises(AlreadyExists, match="not a copy"):
        copy_snapshot(snapshot, Location(to, "version_7"))


def test_sweep_leaves_a_copy_under_way_alone(snapshot: Snapshot) -> None:
    to = MemoryStore()
    swept: list[Any] = []

    def sweep(nbytes: int) -> None:
        swept.append(Run(to).sweep(grace=0.0))

    copy_snapshot(snapshot, Location(to, "version_7"), sweep)
    assert swept
    assert not any(s.removed for s in swept)
    assert holdfast.open(to.at("version_7")).verify().ok
    assert not [k for k in objects(to) if parse_pin(k)]


def test_a_snapshot_that_was_replaced_is_not_mixed(store: MemoryStore, snapshot: Snapshot) -> None:
    snapshot.indexes()
    store.delete(f"version_7/{MANIFEST}")
    holdfast.save(store.at("version_7"), {"n": 2})
    with pytest.raises(FormatError, match="replaced"):
        copy_snapshot(snapshot, Location(MemoryStore(), "version_7"))
