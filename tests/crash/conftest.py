"""Small saves that take the way of large ones: many pieces, several threads, pools that can be
looked into."""

from __future__ import annotations

import threading

import pytest

from holdfast import buffers
from holdfast.buffers import Pool
from holdfast.storage.store import Store
from tests.storage.test_power_cut import disk  # noqa: F401  (a fixture: ext4 and xfs on loop devices)

UNIT = 1024
PAGE = 4096


class Pools:
    """All buffer pools that were made while a test runs, in small."""

    def __init__(self) -> None:
        self.made: list[Pool] = []

    def make(self, budget: int, prepare: object = None) -> Pool:
        self.made.append(Pool(min(budget, 1 << 30), PAGE))
        return self.made[-1]

    def check(self) -> None:
        """Nobody holds a buffer any more."""
        assert [p for p in self.made if p.allocated != p.free] == []
        threads = [t.name for t in threading.enumerate() if t.name.startswith("holdfast")]
        assert threads == []


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """Pieces of 1 KiB, three threads, pools of pages; ``check()`` says that all came back."""
    pools = Pools()
    for module in ("planning.shard_layout", "saving.image", "planning.read_plan"):
        monkeypatch.setattr(f"holdfast.engine.{module}.UNIT", UNIT)
    monkeypatch.setattr("holdfast.engine.saving.save.Pool", pools.make)
    monkeypatch.setattr("holdfast.training.saver.Pool", pools.make)
    # it looks for requests whenever it likes, so that calls could not be counted
    monkeypatch.setattr("holdfast.run.save_request.Watcher.start", lambda self: None)
    monkeypatch.setattr(buffers, "_pool", pools.make(64 * PAGE))
    monkeypatch.setenv("HOLDFAST_THREADS", "3")
    return pools


class Stores:
    """What ``holdfast.save(url)`` opens, while a test runs."""

    store: Store


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Set ``opened.store``, and every URL of a snapshot is one in that store."""
    stores = Stores()
    monkeypatch.setattr("holdfast.engine.snapshot.location.open_store", lambda url: stores.store)
    return stores
