"""Fixtures with which small saves use the code paths of large ones.

Saves have many pieces and several threads, and tests can inspect the buffer pools.
"""

import threading

import pytest

from limpet import buffers
from limpet.buffers import BufferPool
from limpet.storage.store import Store
from tests.disks import disk  # noqa: F401  (a fixture)
from tests.pools import allocated_bytes, free_bytes

SMALL_UNIT = 1024
PAGE = 4096


class PoolTracker:
    """Creates small buffer pools, and records all pools that are created during a test."""

    def __init__(self):
        self.pools: list[BufferPool] = []
        self._earlier_threads = {*threading.enumerate()}  # an earlier test may have left some

    def threads(self):
        """Return the names of the threads that were started since then, and still run."""
        return [t.name for t in threading.enumerate() if t not in self._earlier_threads]

    def make_pool(self, budget, on_create=None):
        self.pools.append(BufferPool(min(budget, 1 << 30), PAGE))
        return self.pools[-1]

    def assert_all_freed(self):
        """Assert that all buffers are released and that no Limpet thread is running."""
        assert [p for p in self.pools if allocated_bytes(p) != free_bytes(p)] == []
        assert [name for name in self.threads() if name.startswith("limpet")] == []


@pytest.fixture
def pools(monkeypatch):
    """Use pieces of 1 KiB, three threads, and pools of 4 KiB buffers."""
    tracker = PoolTracker()
    for module in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{module}.BLOCK_SIZE", SMALL_UNIT)
    monkeypatch.setattr("limpet.saving.save.BufferPool", tracker.make_pool)
    monkeypatch.setattr("limpet.training.saver.BufferPool", tracker.make_pool)
    # the watcher polls at arbitrary times, so the number of store calls would vary
    monkeypatch.setattr("limpet.run.save_request.RequestWatcher.start", lambda self: None)
    monkeypatch.setattr(buffers, "_pool", tracker.make_pool(64 * PAGE))
    monkeypatch.setenv("LIMPET_THREADS", "3")
    monkeypatch.setattr("limpet.threads.BYTES_PER_THREAD", 1)
    return tracker


class OpenedStore:
    """The store that ``limpet.save(url)`` opens during a test."""

    store: Store


@pytest.fixture
def opened(monkeypatch):
    """Make every snapshot URL refer to ``opened.store``, which the test sets."""
    opened_store = OpenedStore()
    monkeypatch.setattr("limpet.snapshot.location.open_store", lambda url: opened_store.store)
    return opened_store
