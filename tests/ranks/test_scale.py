"""Calls and memory of a save with many ranks. Nothing is timed."""

from collections import Counter

import numpy as np
import pytest

import limpet
from limpet.ranks.kv import Timeouts
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup

UNHURRIED = Timeouts(20.0, 40.0)


def state_of(rank, size, leaves=30):
    """Return a state with sharded leaves, replicated leaves, and random generators."""
    rows = np.full((2, 3), rank, np.float32)
    sharded = limpet.Boxed(rows, (2 * rank, 0), (2 * size, 3))
    return {
        "sharded": {str(i): sharded for i in range(leaves // 2)},
        "replicated": {str(i): np.full(4, i, np.float32) for i in range(leaves // 2)},
        "rng": limpet.RNG(),
    }


def save(group, leaves=30):
    store, size = MemoryStore(), len(group.groups)
    group.run(lambda rank: limpet.save(store, state_of(rank, size, leaves)))


class CallCounter:
    """Counts the calls of each rank to the key-value store.

    Polls that find no value are not counted, because their number depends on the time.
    """

    def __init__(self, group):
        self.counts: list[Counter[str]] = [Counter() for _ in group.views]
        for rank, view in enumerate(group.views):
            view.before = self._counter(rank, group.store)

    def _counter(self, rank, store):
        def count(name, key):
            polls = name == "check" or (
                name == "compare_set" and not key.endswith("/first_arrival")
            )
            if not key.startswith("heartbeat/") and (not polls or key in store.values):
                self.counts[rank][name] += not key.endswith("/failed")

        return count

    def total(self, rank):
        return sum(self.counts[rank].values())


@pytest.mark.parametrize("size", [2, 5, 9, 20])
def test_the_calls_of_a_rank_do_not_depend_on_the_number_of_ranks(size):
    """Only rank 0 makes more calls: one for each value that another rank sends."""
    with FakeGroup(size, UNHURRIED) as group:
        for values in (3, 2, 2):  # summaries, receipts, and in the first save local plans
            calls = CallCounter(group)
            save(group)
            totals = [calls.total(rank) for rank in range(size)]
            totals[0] -= values * (size - 1)
            *usual, last_to_leave = sorted(totals)
            assert max(usual) <= 16, calls.counts
            assert last_to_leave <= 30, calls.counts
        assert [key for key in group.store.values if not key.startswith("heartbeat/")] == []
