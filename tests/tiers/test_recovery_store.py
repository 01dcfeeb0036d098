"""The store from which a state of a tier is loaded, with peers that are functions."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import DigestMismatch, NotFound, StoreError, Unavailable
from limpet.format.names import MANIFEST
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.tiers.inventory import Holder, Sources
from limpet.tiers.recovery_store import Peers, RecoveryStore
from tests.tiers.peers import LIMITS, connect, serving
from tests.waiting import wait_until

FOLDER = "version_1"
MANIFEST_KEY = f"{FOLDER}/{MANIFEST}"


class CapturedState:
    """A state of one shard that a host lacks, and the ranks 1 and 2, which serve it.

    ``fetched``: the rank and the key of each try; ``before_copy`` is called with both, and may
    raise. ``nbytes``: the bytes of shards that were fetched.
    """

    def __init__(self, folder, count=1000):
        self.folder = folder
        self.own = TmpfsStore(folder)
        self.served = MemoryStore()
        self.nbytes = 0
        captured = MemoryStore()
        self.saved = limpet.save(captured, {"w": np.arange(float(count))}, step=1)
        for stat in captured.list(""):
            put(self.served, f"{FOLDER}/{stat.key}", captured.get(stat.key, stat.length))
        self.lengths = {stat.key: stat.length for stat in self.served.list("")}
        (self.shard_key,) = (key for key in self.lengths if key.endswith(".safetensors"))
        self.fetched: list[tuple[int, str]] = []
        self.before_copy: Callable[[int, str], object] = lambda rank, key: None

    def store(self, rank=0, **options):
        access = Peers(rank, lambda rank: [rank], lambda rank: nullcontext(Server(self, rank)))
        return RecoveryStore(self.own, FOLDER, served_by(1, 2), access, **options)

    def copy(self, key):
        """Give the host a file of the state."""
        put(self.own, key, self.served.get(key, 1 << 30))

    def open(self):
        return SnapshotReader(
            Location(self.store(), FOLDER, is_per_host=True), None, reader_of(self.saved).digest
        )

    def replace(self, key, data):
        self.served.delete(key)
        put(self.served, key, data)


def served_by(*hosts):
    """Return the sources of the state, all of whose files are on each host."""
    return Sources(2, [Holder(host, [0, 2]) for host in hosts])


class Server:
    """The connection to a rank that serves the state."""

    def __init__(self, peers, rank):
        self._peers, self._rank = peers, rank

    def fetch_file(self, key, limit):
        self._peers.fetched.append((self._rank, key))
        self._peers.before_copy(self._rank, key)
        return self._peers.served.get(key, limit)

    def fetch_range(self, key, file_length, offset, into):
        data = self.fetch_file(key, 1 << 30)
        if len(data) != file_length:
            raise StoreError(f"{key} has another length")
        into[:] = data[offset : offset + len(into)]
        self._peers.nbytes += len(into) * key.endswith(".safetensors")


def put(store, key, data):
    with store.put(key, len(data)) as upload:
        upload.write_at(0, memoryview(data))
        upload.commit()


@pytest.fixture
def peers(folder):
    return CapturedState(folder)


def test_only_the_chunks_that_a_rank_reads_are_fetched(folder):
    """With another number of ranks, each needs a part of a shard: one chunk of seven here."""
    peers = CapturedState(folder, 26 << 17)
    array = Snapshot(peers.open())["w"]
    assert np.array_equal(array[1_000_000:1_000_010], np.arange(1e6, 1e6 + 10))
    length = peers.lengths[peers.shard_key]
    assert 0 < peers.nbytes < length / 5
    assert np.array_equal(load_snapshot(peers.open())["w"], np.arange(float(26 << 17)))
    assert peers.nbytes < 1.25 * length


def test_a_range_that_is_damaged_at_the_peer_is_not_used(peers):
    data = bytearray(peers.served.get(peers.shard_key, 1 << 20))
    data[-1] ^= 1
    peers.replace(peers.shard_key, bytes(data))
    state = {"w": np.full(1000, 7.0)}
    with pytest.raises(DigestMismatch):
        load_snapshot(peers.open(), state)
    assert np.array_equal(state["w"], np.full(1000, 7.0))


def test_a_peer_that_has_failed_is_asked_last(peers):
    """Each try to connect to a host that is gone takes long."""

    def fail(rank, key):
        if rank == 1:
            raise Unavailable("Cannot connect to rank 1: timed out")

    peers.before_copy = fail
    peers.copy(MANIFEST_KEY)
    store, found = peers.store(sleep=lambda seconds: None), list[Any]()
    with limpet.attach(lambda name, fields: found.append((name, fields["rank"]))):
        for _ in range(3):
            assert store.get(peers.shard_key, 1 << 20)
    assert [rank for rank, _ in peers.fetched] == [1, 2, 2, 2]
    assert found == [("copy_failed", 1)]
    peers.before_copy = lambda rank, key: fail(3 - rank, key)
    assert store.get(peers.shard_key, 1 << 20)
    assert store.get(peers.shard_key, 1 << 20)
    assert [rank for rank, _ in peers.fetched][4:] == [2, 1, 1]


class Clock:
    """A clock that only ``sleep`` moves. ``pauses``: what was slept."""

    def __init__(self):
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def test_the_time_in_which_peers_are_asked_again_is_bounded(peers):
    clock = Clock()
    peers.copy(MANIFEST_KEY)

    def reset(rank, key):
        raise Unavailable(f"Rank {rank} is busy")

    peers.before_copy = reset
    store = peers.store(seconds=30.0, clock=clock, sleep=clock.sleep)
    with pytest.raises(NotFound, match=r"rank 1: Rank 1 is busy.*; rank 2: Rank 2 is busy"):
        store.get(peers.shard_key, 1 << 20)
    assert sum(clock.pauses) == pytest.approx(30.0)
    assert max(clock.pauses) <= 2.0
    assert len(peers.fetched) >= 30


def test_a_server_with_too_many_connections_sends_the_file_later(peers):
    clock = Clock()
    with serving(None, replace(LIMITS, connections=1), store=peers.served) as server:
        first = connect(server)
        first.fetch_file(MANIFEST_KEY, 1 << 20)

        def sleep(seconds):
            clock.sleep(seconds)
            if len(clock.pauses) == 3:
                first.close()
                wait_until(lambda: not server._connections)

        with closing(first):
            access = Peers(0, lambda rank: [rank], lambda rank: connect(server))
            parts = peers.own, FOLDER, served_by(1), access
            store = RecoveryStore(*parts, clock=clock, sleep=sleep)
            assert store.get(MANIFEST_KEY, 1 << 20) == peers.served.get(MANIFEST_KEY, 1 << 20)
    assert len(clock.pauses) >= 3
    clock.pauses.clear()
    with pytest.raises(NotFound, match="refused"):  # the server has ended
        store.get(peers.shard_key, 1 << 20)
    assert not clock.pauses
