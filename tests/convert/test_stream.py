"""``stream_leaves``: each byte once, with its digest checked, for any layout."""

from __future__ import annotations

import itertools
from collections import defaultdict
from threading import Lock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.convert import stream
from limpet.convert.stream import stream_leaves
from limpet.errors import DigestMismatch, NotFound
from limpet.format.names import MANIFEST
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.snapshot import reader_of
from limpet.storage.memory import MemoryStore
from tests.layout.random_boxes import shapes, tilings
from tests.snapshot.manual_shards import (
    split_columns,
    split_rows,
    write_resharded,
)
from tests.trainings import flip_bit

_store_numbers = itertools.count()


def read_streamed(snapshot: SnapshotReader, keys: list[str]) -> list[bytes]:
    """Return the bytes of the leaves. Fail if a byte is missing or passed twice."""
    pieces: list[dict[int, bytes]] = [defaultdict(bytes) for _ in keys]
    lock = Lock()

    def write(number: int, at: int, data: memoryview) -> None:
        with lock:
            assert at not in pieces[number]
            pieces[number][at] = bytes(data)

    stream_leaves(snapshot, keys, write)
    contents = []
    for pieces_of_leaf in pieces:
        raw = b""
        for at, data in sorted(pieces_of_leaf.items()):
            assert at == len(raw)
            raw += data
        contents.append(raw)
    return contents


@st.composite
def sharded_states(draw):
    """Draw arrays, and for each a tiling whose boxes are assigned to one or two of three shards."""
    state, layout = {}, {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        dtype = draw(st.sampled_from(["uint8", "int16", "float32", "complex128"]))
        raw = np.random.default_rng(i).integers(0, 256, (*shape, np.dtype(dtype).itemsize), "u1")
        state[f"a{i}"] = raw.view(dtype).reshape(shape)
        layout[f"a{i}"] = [
            (n, box)
            for box in draw(tilings(shape))
            for n in draw(st.sets(st.integers(0, 2), min_size=1, max_size=2))
        ]
    return state, layout


@settings(max_examples=60)
@given(sharded_states(), st.sampled_from([16, 48, 4096, 64 << 20]))
@pytest.mark.slow
def test_any_layout(sharded_state, window: int) -> None:
    state, layout = sharded_state
    original = limpet.save(f"memory://stream{next(_store_numbers)}/version_1", state)
    location = Location(MemoryStore(), "version_1")
    snapshot = write_resharded(reader_of(original), location, lambda key, shape: layout[key], 3)
    assert snapshot.verify().ok
    before, stream.WINDOW = stream.WINDOW, window
    try:
        streamed = read_streamed(snapshot, [*state, *state])
    finally:
        stream.WINDOW = before
    assert streamed == [a.tobytes() for a in state.values()] * 2


@pytest.fixture
def big() -> SnapshotReader:
    state = {"a": np.arange(900_000.0).reshape(300, 3000), "b": np.arange(7), "c": np.ones((4, 5))}
    return reader_of(limpet.save(f"memory://stream{next(_store_numbers)}/version_1", state))


class CountingStore(MemoryStore):
    """A store that counts the bytes read from shards."""

    read = 0

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        if key.endswith(".safetensors"):
            self.read += length
        super().get_range(key, offset, length, into)


@pytest.mark.parametrize(("layout", "max_ratio"), [(split_rows(4), 1.001), (split_columns(4), 1.5)])
def test_few_bytes_are_read_twice(
    layout, max_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{i}": np.zeros((1024, 1024 * i), np.float32) for i in (1, 2, 3)}
    state |= {f"b{i}": np.zeros((3, 100)) for i in range(300)}
    original = limpet.save(f"memory://stream{next(_store_numbers)}/version_1", state)
    store = CountingStore()
    snapshot = write_resharded(reader_of(original), Location(store, "version_1"), layout, 4)
    monkeypatch.setattr(stream, "WINDOW", 16 << 20)
    store.read = 0
    stream_leaves(snapshot, list(state), lambda number, at, data: None)
    headers = sum(index.header for index in snapshot.indexes())
    assert store.read < max_ratio * sum(a.nbytes for a in state.values()) + headers


@pytest.mark.parametrize("layout", [split_rows(3), split_columns(3)])
def test_damaged_bytes_are_not_passed_on(big: SnapshotReader, layout) -> None:
    store = MemoryStore()
    snapshot = write_resharded(big, Location(store, "version_1"), layout, 3)
    flip_bit(store, f"version_1/{snapshot.manifest.shards[1].name}", byte=-9)
    with pytest.raises(DigestMismatch, match="shard-00001-of-00003"):
        read_streamed(snapshot, ["a", "b", "c"])


def test_a_version_that_was_deleted_is_not_damaged(big: SnapshotReader) -> None:
    big.indexes()
    for stat in list(big.location.store.list("")):
        big.location.store.delete(stat.key)
    with pytest.raises(NotFound, match="was deleted"):
        read_streamed(big, ["a"])
    assert big.location.key(MANIFEST)
