"""The look-ups and the indexes of many shards on a server."""

import time
from threading import Lock

import numpy as np
import pytest

import limpet
from limpet.loading.snapshot import reader_of
from limpet.snapshot import index_files
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.unreliable_stores import HookedStore

SHARDS = 24


class RemoteStore(HookedStore):
    """A store each of whose calls takes 3 ms. ``running``: the number of calls in progress."""

    def __init__(self, inner):
        super().__init__(inner)
        self.lock, self.running = Lock(), 0
        self.most: dict[str, int] = {}
        self.before, self.after = self.begin, self.end

    def begin(self, method, key):
        with self.lock:
            self.running += 1
            self.most[method] = max(self.most.get(method, 0), self.running)
        time.sleep(0.003)

    def end(self, method, key):
        with self.lock:
            self.running -= 1


@pytest.mark.parametrize("bytes_at_once", [index_files._BYTES_AT_ONCE, 4000])
def test_requests_for_many_shards_overlap(monkeypatch, bytes_at_once):
    monkeypatch.setattr(index_files, "_BYTES_AT_ONCE", bytes_at_once)
    inner, whole = MemoryStore(), np.arange(4.0 * SHARDS)

    def save(rank):
        box = limpet.Boxed(whole[4 * rank : 4 * rank + 4], (4 * rank,), whole.shape)
        limpet.save(inner, {"x": box})

    with FakeGroup(SHARDS) as group:
        group.run(save)
    store = RemoteStore(inner)
    reader_of(limpet.open(store)).check_files()
    assert store.most.pop("stat") > 3
    assert np.array_equal(limpet.load(store)["x"], whole)
    assert store.most["stat"] > 3
    assert store.most["get"] > (3 if bytes_at_once > 4000 else 1)
