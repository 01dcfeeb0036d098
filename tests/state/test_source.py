"""A ``Source`` supplies the bytes of a leaf that is not in memory, in ranges and by rows."""

import numpy as np
import pytest

import limpet
from limpet.errors import StoreError
from limpet.saving import partition
from limpet.state.arrays.own import Source
from tests.fakegroup import FakeGroup
from tests.states import unused_url


class Rows(Source):
    """A table whose elements are computed when they are read."""

    dtype = "float32"

    def __init__(self, rows, columns=8):
        self.shape = (rows, columns)
        self.read = 0
        self.error: Exception | None = None

    def whole(self):
        return np.arange(self.shape[0] * self.shape[1], dtype="f4").reshape(self.shape)

    def read_into(self, start, view):
        if self.error is not None:
            raise self.error
        self.read += len(view)
        stop = start + len(view)
        elements = np.arange(start // 4, -(-stop // 4), dtype="f4").tobytes()
        view[:] = elements[start % 4 : start % 4 + len(view)]


def test_a_source_is_saved_without_being_in_memory():
    table = Rows(3_000_000 // 8)
    snapshot = limpet.save(unused_url(), {"table": table, "again": [table], "n": np.ones(3)})
    assert snapshot.verify().ok
    assert table.read == table.nbytes
    loaded = limpet.load(snapshot.url)
    assert np.array_equal(loaded["table"], table.whole())
    assert np.array_equal(loaded["again"][0], table.whole())


def test_ranks_write_parts_of_a_source_by_rows(monkeypatch):
    monkeypatch.setattr(partition, "MAX_BOX_BYTES", 4096)
    url, tables = unused_url(), [Rows(1000), Rows(1000)]
    group = FakeGroup(2)
    group.run(lambda rank: limpet.save(url, {"table": tables[rank]}))
    assert all(table.read > 0 for table in tables)
    assert np.array_equal(limpet.load(url)["table"], tables[0].whole())


def test_a_part_of_a_part():
    part = Rows(100)[10:60,][5:7,]
    assert part.shape == (2, 8)
    data = bytearray(part.nbytes)
    part.read_into(0, memoryview(data))
    expected = Rows(100).whole()[15:17]
    assert np.array_equal(np.frombuffer(data, "f4").reshape(2, 8), expected)


def test_an_error_of_a_source_commits_nothing():
    table, url = Rows(10), unused_url()
    table.error = StoreError("the server is gone")
    with pytest.raises(StoreError, match="the server is gone"):
        limpet.save(url, {"table": table})
    with pytest.raises(limpet.errors.NotFound):
        limpet.open(url)
