"""Shared reads from a store with requests of a fixed cost: few requests, and faults of one rank."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest

import limpet
from limpet import buffers
from limpet.buffers import BufferPool
from limpet.errors import DigestMismatch, RankFailed, StoreError
from limpet.loading import shared_read
from limpet.ranks import host_exchange
from limpet.ranks.kv import Timeouts
from limpet.types import BLOCK_SIZE
from tests.fakegroup import FakeGroup
from tests.ranks.test_shared_read import without_sharing
from tests.snapshot.test_group_reads import RequestStore, random_state

RANKS = 4


def save(states):
    """Save the states of as many ranks to a new store."""
    store = RequestStore()
    with FakeGroup(len(states)) as group:
        group.run(lambda rank: limpet.save(store, states[rank]))
    store.reads.clear()
    return store


def outcomes(stores, states, timeouts=None):
    """Load zeros over the states of all ranks. Return the outcomes and the new states."""
    live = [
        {key: limpet.Boxed(np.zeros_like(v.tensor), v.offsets, v.shape)
         if isinstance(v, limpet.Boxed) else np.zeros_like(v) for key, v in state.items()}
        for state in states
    ]  # fmt: skip
    with FakeGroup(len(states), *([timeouts] if timeouts else [])) as group:
        return group.outcomes(lambda rank: limpet.load(stores[rank], into=live[rank])), live


def values(state):
    return [v.tensor if isinstance(v, limpet.Boxed) else v for _, v in sorted(state.items())]


def load(store, states):
    """Load on all ranks, compare, and return the number and the bytes of the reads."""
    store.reads.clear()
    found, live = outcomes([store] * len(states), states)
    assert {type(one) for one in found} == {limpet.LoadReport}
    for state, loaded in zip(states, live, strict=True):
        for a, b in zip(values(state), values(loaded), strict=True):
            assert np.array_equal(a, b)
    return len(store.reads), sum(length for _, _, length, _ in store.reads)


def test_the_ranks_together_send_as_many_requests_as_one_alone(monkeypatch):
    monkeypatch.setenv("LIMPET_THREADS", "2")
    states = [random_state(64)] * RANKS
    store = save(states[:1])
    with without_sharing():
        alone, alone_bytes = load(store, states)
    shared, shared_bytes = load(store, states)
    assert shared_bytes * RANKS == alone_bytes
    assert (shared, alone) == (5, 5 * RANKS)  # 16 blocks; the first, with the header, is read alone
    assert max(views for _, _, _, views in store.reads) == 4


def test_a_bit_that_flips_on_its_way_is_read_again_once_for_all_ranks():
    states = [random_state(32)] * RANKS
    store, events = save(states), []
    key = max(k for k in store._objects if k.endswith(".safetensors"))
    store.flips[key, len(store._objects[key][0]) // 2] = 1
    with limpet.attach(lambda name, _: events.append(name)):
        load(store, states)
    assert events.count("read_again") == 1
    assert +store.flips == {}
    store.flips[key, len(store._objects[key][0]) // 2] = 2
    found, _ = outcomes([store] * RANKS, states)
    assert {type(error) for error in found} == {DigestMismatch}


class FailingStore(RequestStore):
    """A view of another store whose ``second`` read of a shard calls ``fail``."""

    def __init__(self, inner, fail):
        super().__init__()
        self._objects, self.fail = inner._objects, fail

    def read(self, key, offset, view):
        super().read(key, offset, view)
        if len(self.reads) == 2:
            self.fail()


@pytest.mark.parametrize("failed", ["silent", "stuck"])
def test_one_rank_dies_or_hangs_while_the_others_wait_for_its_part(failed):
    states = [random_state(64)] * RANKS
    store, ended = save(states), threading.Event()
    timeouts = Timeouts(silent=1.0, stuck=20.0) if failed == "silent" else Timeouts(5.0, 1.5)
    group = FakeGroup(RANKS, timeouts)

    def fail():
        if failed == "silent":
            group.views[1].disconnect()
            raise KeyboardInterrupt
        ended.wait(60)  # until the others have raised
        raise StoreError("late", key="a shard")

    stores = [store, FailingStore(store, fail), store, store]
    live = [{key: np.zeros_like(value) for key, value in state.items()} for state in states]
    began = time.monotonic()
    waiting = {0, 2, 3}

    def work(rank):
        try:
            limpet.load(stores[rank], into=live[rank])
        finally:
            waiting.discard(rank)
            if not waiting:
                ended.set()

    with group:
        found = group.outcomes(work)
    assert time.monotonic() - began < 15
    for error in (found[0], found[2], found[3]):
        assert (type(error), error.rank) == (RankFailed, 1)
    assert isinstance(
        found[1], KeyboardInterrupt if failed == "silent" else StoreError | RankFailed
    )


def test_a_rank_with_more_threads_than_buffers_notices_that_another_one_has_died(monkeypatch):
    """Threads that waited for buffers, which nobody would take the bytes of, kept it waiting."""
    monkeypatch.setenv("LIMPET_THREADS", "16")
    monkeypatch.setattr(host_exchange, "WINDOW_BUDGET", 4 * BLOCK_SIZE)
    monkeypatch.setattr(buffers, "_pool", BufferPool(4 * BLOCK_SIZE))
    states = [random_state(64)] * 2
    store, group = save(states), FakeGroup(2, Timeouts(silent=1.0, stuck=20.0))

    def die():
        group.views[1].disconnect()
        raise KeyboardInterrupt

    stores = [store, FailingStore(store, die)]
    live = [{key: np.zeros_like(value) for key, value in state.items()} for state in states]
    with ThreadPoolExecutor(1) as threads, group:
        work = threads.submit(
            group.outcomes, lambda rank: limpet.load(stores[rank], into=live[rank])
        )
        found = work.result(20)
    assert (type(found[0]), found[0].rank) == (RankFailed, 1)


@pytest.fixture(autouse=True)
def share_small_snapshots():
    with patch.object(shared_read, "MIN_SHARED_BYTES", 0):
        yield
