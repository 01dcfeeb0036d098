"""The store from which a state of a tier is loaded, with peers that are functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, NotFound, StoreError
from holdfast.format.names import MANIFEST
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.storage.tmpfs.store import TmpfsStore
from holdfast.tiers.recovery_store import RecoveryStore
from tests.tiers.peers import memory_folder

FOLDER = "version_1"
MANIFEST_KEY = f"{FOLDER}/{MANIFEST}"


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


class Peers:
    """A state of one shard that a host lacks, and the ranks 1 and 2, which serve it.

    ``fetched``: the rank and the key of each try; ``before_copy`` is called with both, and may
    raise.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = MemoryStore()
        captured = MemoryStore()
        self.saved = holdfast.save(captured, {"w": np.arange(1000.0)}, step=1)
        for stat in captured.list(""):
            put(self.served, f"{FOLDER}/{stat.key}", captured.get(stat.key, stat.length))
        self.lengths = {stat.key: stat.length for stat in self.served.list("")}
        (self.shard_key,) = (key for key in self.lengths if key.endswith(".safetensors"))
        self.fetched: list[tuple[int, str]] = []
        self.before_copy: Callable[[int, str], object] = lambda rank, key: None

    def store(self, **options: Any) -> RecoveryStore:
        own = TmpfsStore(self.folder)

        def fetch(rank: int, key: str, min_length: int, max_length: int) -> None:
            self.fetched.append((rank, key))
            self.before_copy(rank, key)
            data = self.served.get(key, 1 << 20)
            if not min_length <= len(data) <= max_length:
                raise StoreError(f"{key} has another length")
            put(own, key, data)

        return RecoveryStore(own, {key: [1, 2] for key in self.lengths}, fetch, **options)

    def open(self) -> Snapshot:
        return Snapshot(Location(self.store(), FOLDER, is_per_host=True), None, self.saved.digest)

    def replace(self, key: str, data: bytes) -> None:
        self.served.delete(key)
        put(self.served, key, data)


def put(store: Store, key: str, data: bytes) -> None:
    with store.put(key, len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit()


@pytest.fixture
def peers(folder: Path) -> Peers:
    return Peers(folder)


def test_a_lookup_fetches_nothing_but_the_manifest(peers: Peers) -> None:
    store = peers.store()
    assert {key: store.stat(key).length for key in peers.lengths} == peers.lengths
    assert {stat.key: stat.length for stat in store.list(FOLDER)} == peers.lengths
    assert peers.fetched == [(1, MANIFEST_KEY)]
    peers.open().check_files()
    assert peers.fetched == [(1, MANIFEST_KEY)]
    assert np.array_equal(load_snapshot(peers.open())["w"], np.arange(1000.0))


def test_a_read_fetches_a_file_once(peers: Peers) -> None:
    store = peers.store()
    for _ in range(2):
        for key, length in peers.lengths.items():
            assert store.get(key, length) == peers.served.get(key, length)
            assert store.stat(key).length == length
    assert sorted(peers.fetched) == sorted((1, key) for key in peers.lengths)


def test_a_file_that_is_not_of_the_state_is_not_looked_up(peers: Peers) -> None:
    for key in (f"{FOLDER}/other", f"version_2/{MANIFEST}"):
        with pytest.raises(NotFound, match="not a file of this state"):
            peers.store().stat(key)
    assert not peers.fetched


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_refused(peers: Peers, change: int) -> None:
    """A load raises, and the file does not come into the store of this host."""
    data = peers.served.get(peers.shard_key, 1 << 20)
    peers.replace(peers.shard_key, (data + b"\0")[: len(data) + change])
    snapshot = peers.open()
    snapshot.check_files()
    with pytest.raises(StoreError, match="another length"):
        load_snapshot(snapshot)
    assert [rank for rank, key in peers.fetched if key == peers.shard_key] == [1, 2]
    assert not [stat for stat in TmpfsStore(peers.folder).list("") if stat.key == peers.shard_key]


def test_a_file_of_this_host_that_has_another_length_is_damage(peers: Peers) -> None:
    data = peers.served.get(peers.shard_key, 1 << 20)
    put(TmpfsStore(peers.folder), peers.shard_key, data[:-1])
    with pytest.raises(FormatError, match="wrong length"):
        peers.open().check_files()
