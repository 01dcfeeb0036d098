"""A store with requests of a fixed cost gets one request for several blocks of a file."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

import numpy as np
import pytest

import limpet
from limpet.buffers import BufferPool
from limpet.convert.copy import copy_snapshot
from limpet.convert.reshard import reshard
from limpet.errors import DigestMismatch, StoreError
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.snapshot.location import Location
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys
from limpet.types import BLOCK_SIZE, MIB
from tests.pools import allocated_bytes, free_bytes


class RequestStore(MemoryStore):
    """Records the reads of shards, and flips bytes on their way.

    ``reads``: key, offset, length, and the number of steps. ``flips``: how often the byte at an
    offset is still flipped, by key and offset.
    """

    def __init__(self, read_size=16 * MIB):
        super().__init__()
        self.read_size, self.lock = read_size, Lock()
        self.reads, self.flips, self.open_ranges = [], Counter(), 0

    @property
    def traits(self):
        return replace(super().traits, read_size=self.read_size, in_memory=False)

    def get_range(self, key, offset, length, into):
        with Steps(self, key, offset, length) as reader:
            reader.read_into(into[:length])

    def open_range(self, key, offset, length):
        return Steps(self, key, offset, length)

    def read(self, key, offset, view):
        super().get_range(key, offset, len(view), view)
        with self.lock:
            for (flipped, at), count in self.flips.items():
                if flipped == key and offset <= at < offset + len(view) and count:
                    self.flips[flipped, at] -= 1
                    view[at - offset] ^= 1


class Steps:
    def __init__(self, store, key, offset, length):
        self.store, self.key, self.at, self.steps = store, key, offset, 0
        self.left = length
        with store.lock:
            if key.endswith(".safetensors"):
                self.number = len(store.reads)
                store.reads.append((key, offset, length, 0))

    def __enter__(self):
        self.store.open_ranges += 1
        return self

    def __exit__(self, *exc):
        self.store.open_ranges -= 1

    def read_into(self, view):
        assert len(view) <= self.left
        self.store.read(self.key, self.at, view)
        self.at, self.left, self.steps = self.at + len(view), self.left - len(view), self.steps + 1
        if self.key.endswith(".safetensors"):
            self.store.reads[self.number] = (*self.store.reads[self.number][:3], self.steps)


def random_state(mib, leaves=4):
    random = np.random.default_rng(mib)
    return {f"w{i}": random.integers(0, 255, mib * MIB // leaves, np.uint8) for i in range(leaves)}


def assert_loads(store, state):
    """Load into a copy with other values, and return the number of requests."""
    store.reads.clear()
    live = {key: np.zeros_like(value) for key, value in state.items()}
    limpet.load(store, into=live)
    assert all(np.array_equal(live[key], state[key]) for key in state)
    return len(store.reads)


def shard_key(store):
    return next(key for key in keys(store) if key.endswith(".safetensors"))


@pytest.mark.parametrize(
    ("mib", "threads", "read_size", "requests"),
    [
        (32, 8, 16 * MIB, 8),  # each thread has something to do
        (64, 8, 16 * MIB, 9),  # the first block is read with the header, and alone
        (160, 8, 16 * MIB, 11),
        (64, 1, 16 * MIB, 5),
        (64, 1, 8 * MIB, 9),
        (64, 1, 0, 16),
        (64, 32, 16 * MIB, 16),
    ],
)
def test_the_number_of_requests(monkeypatch, mib, threads, read_size, requests):
    monkeypatch.setenv("LIMPET_THREADS", str(threads))
    store, state = RequestStore(read_size), random_state(mib)
    limpet.save(store, state)
    assert assert_loads(store, state) == requests
    assert all(length <= max(read_size, BLOCK_SIZE + 4096) for _, _, length, _ in store.reads)


def test_all_readers_group_their_reads(monkeypatch, tmp_path):
    monkeypatch.setenv("LIMPET_THREADS", "2")
    store, state = RequestStore(), random_state(64)
    limpet.save(store, state)
    snapshot = limpet.open(store)
    copied, resharded = Location(MemoryStore(), ""), Location(MemoryStore(), "")
    for read in (
        snapshot.verify,
        lambda: copy_snapshot(reader_of(snapshot), copied),
        lambda: limpet.export(snapshot, tmp_path, "safetensors"),
        lambda: reshard(reader_of(snapshot), resharded, 2),
    ):
        store.reads.clear()
        read()
        assert len([r for r in store.reads if r[2] > MIB]) <= 6
        assert max(steps for *_, steps in store.reads) == 4
    assert limpet.open(copied.store).verify().ok
    assert limpet.open(resharded.store).verify().ok


def test_of_a_group_only_the_damaged_item_is_read_again(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    store, state = RequestStore(), random_state(32)
    limpet.save(store, state)
    key = shard_key(store)
    head = store.stat(key).length - 32 * MIB
    damaged = head + 2 * BLOCK_SIZE + 5
    store.flips[key, damaged] = 1
    events = []
    with limpet.attach(lambda name, fields: events.append(name)):
        assert assert_loads(store, state) == 4
    assert events.count("read_again") == 1
    groups = [(offset, length) for _, offset, length, _ in store.reads]
    assert groups == [
        (0, head + BLOCK_SIZE),
        (head + BLOCK_SIZE, 4 * BLOCK_SIZE),
        (head + 2 * BLOCK_SIZE, BLOCK_SIZE),
        (head + 5 * BLOCK_SIZE, 3 * BLOCK_SIZE),
    ]


def test_damage_that_stays_is_an_error_and_all_of_it_is_reported(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    store, state = RequestStore(), random_state(32, leaves=32)
    limpet.save(store, state)
    key = shard_key(store)
    head = store.stat(key).length - 32 * MIB
    damaged = [head + at * MIB + 9 for at in (9, 10, 18)]
    for at in damaged:
        store.flips[key, at] = 99
    with pytest.raises(DigestMismatch) as caught:
        assert_loads(store, state)
    assert caught.value.offset == damaged[0] - 9
    report = limpet.open(store).verify()
    assert [p.offset for p in report.problems] == [at - 9 for at in damaged]
    assert report.nbytes == sum(store.stat(k).length for k in keys(store) if "manifest" not in k)


def test_a_file_that_ends_early_is_an_error_that_names_the_leaf(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    store, state = RequestStore(), random_state(32)
    limpet.save(store, state)
    snapshot, key = limpet.open(store), shard_key(store)
    reader_of(snapshot).indexes()  # which also checks the lengths
    data, modified = store._objects[key]
    store._objects[key] = (data[: 30 * MIB], modified)
    with pytest.raises(StoreError, match="too short") as caught:
        load_snapshot(reader_of(snapshot))
    assert caught.value.leaf in state
    assert not snapshot.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [1, 3])
def test_many_loads_share_few_buffers(monkeypatch, buffers):
    monkeypatch.setenv("LIMPET_THREADS", "1")
    pool = BufferPool(buffers * BLOCK_SIZE)
    monkeypatch.setattr("limpet.buffers._pool", pool)
    store, state = RequestStore(), random_state(32)
    limpet.save(store, state)
    with ThreadPoolExecutor(12) as threads:
        loads = [threads.submit(limpet.load, store) for _ in range(24)]
        for loaded in loads:
            found = loaded.result(60)
            assert all(np.array_equal(found[key], state[key]) for key in state)
    assert free_bytes(pool) == allocated_bytes(pool) <= buffers * BLOCK_SIZE
    assert max(steps for _, _, _, steps in store.reads) == 4


def test_an_error_returns_all_buffers(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "2")
    pool = BufferPool(8 * BLOCK_SIZE)
    monkeypatch.setattr("limpet.buffers._pool", pool)
    store, state = RequestStore(), random_state(64)
    limpet.save(store, state)
    store.flips[shard_key(store), 40 * MIB] = 99
    for _ in range(3):
        with pytest.raises(DigestMismatch):
            limpet.load(store)
    assert free_bytes(pool) == allocated_bytes(pool)
    assert store.open_ranges == 0


def test_an_incremental_snapshot_is_read_in_groups_of_one_file(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "2")
    store, random = RequestStore(), np.random.default_rng(5)
    state = random_state(48, leaves=24)
    with limpet.Checkpointer(store, state, incremental=True) as checkpointer:
        for _ in range(3):
            for name in random.choice(sorted(state), 5, replace=False):
                state[name] += 1
            checkpointer.step()
            checkpointer.save()
    expected = {name: value.copy() for name, value in state.items()}
    snapshot = limpet.Run(store).latest()
    assert len(snapshot.bases) == 2
    store.reads.clear()
    loaded = load_snapshot(reader_of(snapshot))
    assert all(np.array_equal(loaded[name], expected[name]) for name in expected)
    assert len({key for key, *_ in store.reads}) == 3
    assert max(steps for *_, steps in store.reads) > 1
    for key, offset, length, _ in store.reads:
        assert offset + length <= store.stat(key).length
    assert snapshot.verify().ok


def test_bytes_that_are_consecutive_in_a_file_but_not_in_the_image(monkeypatch):
    """Every other leaf is unchanged, so that the new shard has gaps in its image."""
    monkeypatch.setenv("LIMPET_THREADS", "1")
    store, state = RequestStore(), random_state(48, leaves=24)
    with limpet.Checkpointer(store, state, incremental=True) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        for name in sorted(state)[::2]:
            state[name] += 1
        checkpointer.step()
        checkpointer.save()
    snapshot = limpet.Run(store).latest()
    store.reads.clear()
    loaded = load_snapshot(reader_of(snapshot))
    assert all(np.array_equal(loaded[name], state[name]) for name in state)
    assert max(steps for key, *_, steps in store.reads if "version_2/" in key) == 4
    assert snapshot.verify().ok
    key = next(k for k in keys(store) if "version_2/shard" in k and "safetensors" in k)
    store._objects[key] = (store._objects[key][0][: 10 * MIB], 0.0)
    with pytest.raises(StoreError, match="too short") as caught:
        load_snapshot(reader_of(snapshot))
    named = str(caught.value).partition("The bytes belong to ")[2]
    assert caught.value.leaf in sorted(state)[::2]
    assert not any(name in named.replace(",", " ").split() for name in sorted(state)[1::2])
