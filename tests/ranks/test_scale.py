"""Calls and memory of a save with many ranks. Nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.ranks.failure_detector import FailureDetector
from limpet.ranks.group import current_group
from limpet.ranks.kv import MAX_BATCH_KEYS, MAX_VALUE_BYTES, KVClient, Timeouts
from limpet.saving import partition
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup, FakeStore, StoreView

UNHURRIED = Timeouts(20.0, 40.0)


def state_of(rank: int, size: int, leaves: int = 30) -> dict[str, Any]:
    """Return a state with sharded leaves, replicated leaves, and random generators."""
    rows = np.full((2, 3), rank, np.float32)
    sharded = limpet.Boxed(rows, (2 * rank, 0), (2 * size, 3))
    return {
        "sharded": {str(i): sharded for i in range(leaves // 2)},
        "replicated": {str(i): np.full(4, i, np.float32) for i in range(leaves // 2)},
        "rng": limpet.RNG(),
    }


def save(group: FakeGroup, leaves: int = 30) -> None:
    store, size = MemoryStore(), len(group.groups)
    group.run(lambda rank: limpet.save(store, state_of(rank, size, leaves)))


class CallCounter:
    """Counts the calls of each rank to the key-value store.

    Polls that find no value are not counted, because their number depends on the time.
    """

    def __init__(self, group: FakeGroup) -> None:
        self.counts: list[Counter[str]] = [Counter() for _ in group.views]
        for rank, view in enumerate(group.views):
            view.before = self._counter(rank, group.store)

    def _counter(self, rank: int, store: FakeStore) -> Callable[[str, str], None]:
        def count(name: str, key: str) -> None:
            polls = name == "check" or (
                name == "compare_set" and not key.endswith("/first_arrival")
            )
            if not key.startswith("heartbeat/") and (not polls or key in store.values):
                self.counts[rank][name] += not key.endswith("/failed")

        return count

    def total(self, rank: int) -> int:
        return sum(self.counts[rank].values())


@pytest.mark.parametrize("size", [2, 5, 9, 20])
def test_the_calls_of_a_rank_do_not_depend_on_the_number_of_ranks(size: int) -> None:
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


def test_rank_0_sends_the_shares_of_all_ranks_in_one_call() -> None:
    with FakeGroup(12, UNHURRIED) as group:
        calls = CallCounter(group)
        save(group)
        assert calls.counts[0]["multi_set"] == 1
        assert calls.counts[0]["delete_key"] in (0, 5)  # the last rank to leave deletes 5 keys


def test_an_unchanged_structure_is_neither_sent_nor_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()

    def count_calls(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count_calls(partition._LocalRank, "make_local_plan")
    count_calls(partition._LocalRank, "encode_tree")
    count_calls(partition, "make_global_plan")
    count_calls(partition._Coordinator, "encode_masks")
    size = 4
    everything = Counter(make_local_plan=size, make_global_plan=1, encode_masks=1)
    with FakeGroup(size, UNHURRIED) as group:
        for leaves, expected in (
            (30, everything),
            (30, Counter()),
            (40, everything),
            (30, Counter()),  # alternating with another structure: both are cached
            (40, Counter()),
        ):
            calls.clear()
            save(group, leaves)
            del calls["encode_tree"]  # the trees differ, because each rank has its own generators
            assert calls == expected, leaves


def test_only_one_rank_sends_a_structure_that_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    senders: list[partition._LocalRank] = []
    original = partition._LocalRank.make_local_plan
    monkeypatch.setattr(
        partition._LocalRank, "make_local_plan", lambda self: senders.append(self) or original(self)
    )
    with FakeGroup(6, UNHURRIED) as group:
        store = MemoryStore()
        state = {"a": np.ones(5, np.float32), "b": [1, 2]}
        group.run(lambda rank: limpet.save(store, dict(state)))
    assert len(senders) == 1


def test_only_the_latest_plans_are_cached() -> None:
    with FakeGroup(3, UNHURRIED) as group:
        for leaves in range(10, 24, 2):
            save(group, leaves)
        for rank_group in group.groups:
            assert len(rank_group.cache["masks"]) <= partition._MAX_CACHED_PLANS
        assert len(group.groups[0].cache["plans"]) == partition._MAX_CACHED_PLANS
        assert all("plans" not in rank_group.cache for rank_group in group.groups[1:])


def test_rank_0_receives_few_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    received_bytes: list[int] = []
    original = KVClient.get_many

    def recorded(kv: KVClient, keys: Any) -> list[bytes]:
        values = original(kv, keys)
        received_bytes.append(sum(map(len, values)))
        assert len(values) <= MAX_BATCH_KEYS
        return values

    monkeypatch.setattr(KVClient, "get_many", recorded)

    def work(rank: int) -> Any:
        collective = current_group().collective("it")
        with collective:
            values = collective.gather(bytes([rank]) * (MAX_VALUE_BYTES // 2), bytes)
            collective.broadcast(True if rank == 0 else None, bool)
        collective.close()
        return None if values is None else [set(value) for value in values]

    with FakeGroup(9, UNHURRIED) as group:
        assert group.run(work)[0] == [{rank} for rank in range(9)]
    assert max(received_bytes) <= 2 * MAX_VALUE_BYTES


def test_put_all_makes_few_calls_of_bounded_size() -> None:
    store = FakeStore()
    view = StoreView(store)
    kv = KVClient(view, 0, 2, UNHURRIED)
    calls: list[str] = []
    view.before = lambda name, key: calls.append(name) if not key.startswith("heartbeat/") else None
    values = {str(i): bytes([i % 250]) * (MAX_VALUE_BYTES * 2 // 5) for i in range(7)}
    values["long"] = b"-" * (2 * MAX_VALUE_BYTES + 1)
    keys = kv.put_all(values)
    # three pairs of values; the seventh value and the three parts of the long one
    assert Counter(calls) == {"multi_set": 3, "set": 4}
    assert set(keys) == {k for k in store.values if not k.startswith("heartbeat/")}
    assert {key: kv.try_get(key) for key in values} == values
    kv.delete(keys)
    assert not [k for k in store.values if not k.startswith("heartbeat/")]
    kv.close()


def test_checking_the_heartbeats_of_known_ranks_is_one_call() -> None:
    view, now = StoreView(FakeStore()), [0.0]
    kv = KVClient(view, 0, 200, Timeouts(20.0, 400.0), lambda: now[0])
    for rank in range(1, 200):
        view.set(f"heartbeat/{rank}", b"1 0 there")
    detector = FailureDetector(kv, "it")
    assert detector.failed(range(1, 200)) is None
    calls: list[str] = []
    own = "heartbeat/0", "heartbeat/0/process", "heartbeat/1/process"
    view.before = lambda name, key: calls.append(name) if key not in own else None
    assert detector.failed(range(1, 200)) is None
    assert calls == ["multi_get"]
    for count in (2, 3, 4):
        assert detector.failed(range(1, 200)) is None
        now[0] += 10
        for rank in range(1, 198):
            view.set(f"heartbeat/{rank}", b"%d 0 there" % count)
    checked_ranks: list[int] = []
    error = detector.failed(range(1, 200), lambda rank: checked_ranks.append(rank) or rank == 198)
    assert error is not None
    assert (error.rank, checked_ranks) == (199, [198, 199])  # 198 has arrived, so it may end
    kv.close()
