"""Small saves that take the way of large ones: many pieces, several threads, pools that can be
looked into."""

from __future__ import annotations

import threading

import pytest

from holdfast import buffers
from holdfast.buffers import BufferPool
from holdfast.storage.store import Store
from tests.storage.test_power_cut import disk  # noqa: F401  (a fixture: ext4 and xfs on loop devices)

SMALL_UNIT = 1024
PAGE = 4096


class PoolTracker:
    """All buffer pools that were made while a test runs, in small."""

    def __init__(self) -> None:
        self.pools: list[BufferPool] = []

    def make_pool(self, budget: int, on_create: object = None) -> BufferPool:
        self.pools.append(BufferPool(min(budget, 1 << 30), PAGE))
        return self.pools[-1]

    def assert_all_freed(self) -> None:
        """Nobody holds a buffer any more."""
        assert [p for p in self.pools if p.allocated_bytes != p.free_bytes] == []
        threads = [t.name for t in threading.enumerate() if t.name.startswith("holdfast")]
        assert threads == []


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> PoolTracker:
    """Pieces of 1 KiB, three threads, pools of pages; ``check()`` says that all came back."""
    pools = PoolTracker()
    for module in ("planning.shard_layout", "saving.image", "planning.read_plan"):
        monkeypatch.setattr(f"holdfast.engine.{module}.BLOCK_SIZE", SMALL_UNIT)
    monkeypatch.setattr("holdfast.engine.saving.save.BufferPool", pools.make_pool)
    monkeypatch.setattr("holdfast.training.saver.BufferPool", pools.make_pool)
    # it looks for requests whenever it likes, so that calls could not be counted
    monkeypatch.setattr("holdfast.run.save_request.RequestWatcher.start", lambda self: None)
    monkeypatch.setattr(buffers, "_pool", pools.make_pool(64 * PAGE))
    monkeypatch.setenv("HOLDFAST_THREADS", "3")
    return pools


class OpenedStore:
    """What ``holdfast.save(url)`` opens, while a test runs."""

    store: Store


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedStore:
    """Set ``opened.store``, and every URL of a snapshot is one in that store."""
    stores = OpenedStore()
    monkeypatch.setattr("holdfast.engine.snapshot.location.open_store", lambda url: stores.store)
    return stores
