"""A store that uploads in parts gets whole parts, from the buffers of the save."""

import time
from dataclasses import replace
from threading import Lock

import numpy as np
import pytest

import limpet
from limpet.buffers import BufferPool
from limpet.storage.memory import MemoryStore
from limpet.storage.store import MAX_PARTS, Traits, part_length
from limpet.types import BLOCK_SIZE, MIB
from tests.pools import allocated_bytes, free_bytes


class PartStore(MemoryStore):
    """Records the head and the writes of each upload: offset, and the lengths of the views."""

    part_size = 8 * MIB

    def __init__(self):
        super().__init__()
        self.heads, self.writes, self.lock = {}, {}, Lock()

    @property
    def traits(self):
        return replace(super().traits, part_size=self.part_size)

    def put(self, key, length, head=0):
        upload, writes = super().put(key, length, head), self.writes.setdefault(key, [])
        self.heads[key] = head
        write_at = upload.write_at

        def record(offset, *data):
            with self.lock:
                writes.append((offset, [len(view) for view in data]))
            write_at(offset, *data)

        upload.write_at = record
        return upload


STATE = {"a": np.arange(5_000_000, dtype=np.int64), "b": np.arange(10, dtype=np.uint8)}


def check_writes(store):
    (key,) = (k for k in store.writes if k.endswith(".safetensors"))
    head, writes = store.heads[key], sorted(store.writes[key])
    length = store.stat(key).length
    ends = [*range(head + store.part_size, length, store.part_size), length]
    assert [offset for offset, _ in writes] == [0, *ends[:-1]]
    assert [offset + sum(sizes) for offset, sizes in writes] == ends
    assert writes[0][1][0] == head < 4097
    assert all(size <= BLOCK_SIZE for _, sizes in writes for size in sizes)
    restored = limpet.load(store)
    assert all(np.array_equal(restored[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("threads", ["1", "8"])
def test_a_save_writes_whole_parts(monkeypatch, threads):
    monkeypatch.setenv("LIMPET_THREADS", threads)
    store = PartStore()
    limpet.save(store, STATE)
    check_writes(store)


@pytest.mark.parametrize(("connections", "threads"), [(1, "8"), (3, "8"), (8, "2")])
def test_a_store_bounds_the_parts_in_memory(monkeypatch, connections, threads):
    """Also if a part takes long: without a bound, each thread would have one."""
    monkeypatch.setenv("LIMPET_THREADS", threads)
    pool = BufferPool(1 << 30)
    monkeypatch.setattr("limpet.buffers._pool", pool)

    class SlowStore(PartStore):
        most = 0

        @property
        def traits(self):
            return replace(super().traits, connections=connections)

        def put(self, key, length, head=0):
            upload = super().put(key, length, head)
            write_at = upload.write_at

            def slowly(offset, *data):
                time.sleep(0.02)
                self.most = max(self.most, allocated_bytes(pool) - free_bytes(pool))
                write_at(offset, *data)

            upload.write_at = slowly
            return upload

    store = SlowStore()
    limpet.save(store, STATE)
    expected = min(connections, int(threads), 5)
    assert allocated_bytes(pool) <= expected * 8 * MIB + BLOCK_SIZE  # the header's block
    assert store.most > (expected - 1) * 8 * MIB - BLOCK_SIZE
    check_writes(store)


def test_an_asynchronous_save_writes_whole_parts():
    store = PartStore()
    limpet.save_async(store, STATE).wait()
    check_writes(store)


def test_an_incremental_save_writes_whole_parts():
    store, state = PartStore(), {"a": STATE["a"].copy(), "b": STATE["b"]}
    with limpet.Checkpointer(store, state, incremental=True) as checkpointer:
        checkpointer.step()
        checkpointer.save()
        state["a"][:2_500_000] += 1
        checkpointer.step()
        checkpointer.save()
    key = next(k for k in store.writes if "version_2/shard" in k and k.endswith(".safetensors"))
    head, writes = store.heads[key], sorted(store.writes[key])
    assert [offset for offset, _ in writes] == [0, head + 8 * MIB, head + 16 * MIB]
    assert limpet.Run(store).latest().verify().ok


@pytest.mark.parametrize("length", [0, 1, 16 * MIB, 10**11, 5 * 10**12, 10**14])
def test_the_number_of_parts_is_limited(length):
    traits = Traits("x", 1, True, part_size=16 * MIB)
    part = part_length(traits, length)
    assert part % BLOCK_SIZE == 0
    assert part >= 16 * MIB
    assert -(-length // part) < MAX_PARTS
    assert part == 16 * MIB or -(-length // (part - BLOCK_SIZE)) >= MAX_PARTS - 1
