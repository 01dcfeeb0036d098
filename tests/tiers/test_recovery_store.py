"""The store from which a state of a tier is loaded, with peers that are functions."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, NotFound, StoreError, Unavailable
from holdfast.format.names import MANIFEST
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.storage.tmpfs.store import TmpfsStore
from holdfast.tiers.recovery_store import RecoveryStore
from tests.tiers.peers import LIMITS, connect, eventually, memory_folder, serving

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


class Clock:
    """A clock that only ``sleep`` moves. ``pauses``: what was slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_peers_that_are_busy_are_asked_again_after_growing_pauses(peers: Peers) -> None:
    clock, found = Clock(), list[Any]()
    peers.store().stat(MANIFEST_KEY)
    peers.fetched.clear()

    def reset(rank: int, key: str) -> None:
        if len(peers.fetched) <= 10:
            raise Unavailable("Cannot receive from the peer: connection reset")

    peers.before_copy = reset
    store = peers.store(clock=clock, sleep=clock.sleep)
    with holdfast.attach(lambda name, fields: found.append((name, fields["rank"]))):
        assert store.get(peers.shard_key, 1 << 20)
    assert [rank for rank, _ in peers.fetched] == [1, 2] * 5 + [1]
    assert len(clock.pauses) == 5
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[0] <= 0.1 < clock.pauses[-1]
    assert found == [("copy_failed", 1), ("copy_failed", 2)]


def test_the_time_in_which_peers_are_asked_again_is_bounded(peers: Peers) -> None:
    clock = Clock()
    peers.store().stat(MANIFEST_KEY)
    peers.fetched.clear()

    def reset(rank: int, key: str) -> None:
        raise Unavailable(f"Rank {rank} is busy")

    peers.before_copy = reset
    store = peers.store(seconds=30.0, clock=clock, sleep=clock.sleep)
    with pytest.raises(NotFound, match=r"rank 1: Rank 1 is busy.*; rank 2: Rank 2 is busy"):
        store.get(peers.shard_key, 1 << 20)
    assert sum(clock.pauses) == pytest.approx(30.0)
    assert max(clock.pauses) <= 2.0
    assert len(peers.fetched) >= 30


def test_a_peer_that_does_not_have_the_file_is_not_asked_again(peers: Peers) -> None:
    clock = Clock()
    peers.store().stat(MANIFEST_KEY)
    peers.fetched.clear()

    def answer(rank: int, key: str) -> None:
        if rank == 1:
            raise NotFound(f"There is no {key}")
        if len(peers.fetched) <= 3:
            raise Unavailable("Rank 2 is busy")

    peers.before_copy = answer
    assert peers.store(clock=clock, sleep=clock.sleep).get(peers.shard_key, 1 << 20)
    assert [rank for rank, _ in peers.fetched] == [1, 2, 2, 2]
    peers.served.delete(peers.shard_key)
    TmpfsStore(peers.folder).delete(peers.shard_key)
    clock.pauses.clear()
    with pytest.raises(NotFound, match="is on no host that answers"):
        peers.store(clock=clock, sleep=clock.sleep).get(peers.shard_key, 1 << 20)
    assert not clock.pauses


def test_a_server_with_too_many_connections_sends_the_file_later(peers: Peers) -> None:
    own, clock = TmpfsStore(peers.folder), Clock()
    with serving(None, replace(LIMITS, connections=1), store=peers.served) as server:
        first = connect(server)
        first.list_files("")

        def fetch(rank: int, key: str, min_length: int, max_length: int) -> None:
            with connect(server) as connection:
                connection.fetch_file(own, key, max_length, min_length)

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if len(clock.pauses) == 3:
                first.close()
                eventually(lambda: not server._threads)

        sources = {key: [1] for key in peers.lengths}
        with closing(first):
            store = RecoveryStore(own, sources, fetch, clock=clock, sleep=sleep)
            assert store.get(MANIFEST_KEY, 1 << 20) == peers.served.get(MANIFEST_KEY, 1 << 20)
    assert len(clock.pauses) >= 3
    clock.pauses.clear()
    with pytest.raises(NotFound, match="refused"):  # the server has ended
        store.get(peers.shard_key, 1 << 20)
    assert not clock.pauses


class SlowFetch:
    """A fetch of the shard by one process, in a thread. ``end``: lets it go on."""

    def __init__(self, peers: Peers) -> None:
        self.began, self._may_end, self.found = Event(), Event(), list[bytes]()
        store, key = peers.store(), peers.shard_key

        def wait(rank: int, key: str) -> None:
            if key == peers.shard_key and not self.began.is_set():
                self.began.set()
                assert self._may_end.wait(20)

        peers.before_copy = wait
        self._thread = Thread(target=lambda: self.found.append(store.get(key, 1 << 20)))
        self._thread.start()
        assert self.began.wait(20)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(20)
        assert self.found


def test_one_process_of_a_host_fetches_a_file(peers: Peers) -> None:
    """Each has a store of its own here, which is also what two processes have."""
    slow = SlowFetch(peers)

    def sleep(seconds: float) -> None:
        slow.end()

    store = peers.store(sleep=sleep)
    (index_key,) = (key for key in peers.lengths if key.endswith(".index.json"))
    assert store.get(index_key, 1 << 20)
    assert not slow.found  # nobody waits for the copy of another file
    try:
        assert store.get(peers.shard_key, 1 << 20) == peers.served.get(peers.shard_key, 1 << 20)
        assert [key for _, key in peers.fetched].count(peers.shard_key) == 1
    finally:
        slow.end()
    assert sorted(p.name for p in (peers.folder / FOLDER).iterdir()) == sorted(
        key.removeprefix(f"{FOLDER}/") for key in peers.lengths
    )


def test_the_wait_for_another_process_is_bounded(peers: Peers) -> None:
    slow, clock = SlowFetch(peers), Clock()
    try:
        store = peers.store(seconds=30.0, clock=clock, sleep=clock.sleep)
        assert store.get(peers.shard_key, 1 << 20) == peers.served.get(peers.shard_key, 1 << 20)
        assert not slow.found
        assert sum(clock.pauses) == pytest.approx(30.0)
    finally:
        slow.end()  # with the file of the other one


FETCHING = """
import json, sys, time
from holdfast.storage.tmpfs.store import TmpfsStore
from holdfast.tiers.recovery_store import RecoveryStore

def fetch(*_):
    print("fetching", flush=True)
    time.sleep(60)

sources = {key: [1] for key in json.loads(sys.argv[2])}
RecoveryStore(TmpfsStore(sys.argv[1]), sources, fetch).get(sys.argv[3], 1 << 20)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_fetches_a_file_blocks_nobody(peers: Peers) -> None:
    peers.store().stat(MANIFEST_KEY)
    keys = json.dumps([*peers.lengths])
    command = [sys.executable, "-c", FETCHING, str(peers.folder), keys, peers.shard_key]
    waits = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:

        def sleep(seconds: float) -> None:
            nonlocal waits
            waits += 1
            process.kill()
            time.sleep(seconds)

        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"fetching\n"
            assert peers.store(sleep=sleep).get(peers.shard_key, 1 << 20)
        finally:
            process.kill()
    assert waits >= 1
    assert [key for _, key in peers.fetched].count(peers.shard_key) == 1
