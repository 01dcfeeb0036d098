"""What a save costs in calls to the store and in memory as ranks become many; nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.group import current_group
from holdfast.engine.distributed.kv import MAX_BATCH_KEYS, MAX_VALUE_BYTES, KVClient, Timeouts
from holdfast.engine.saving import partition
from holdfast.storage.memory import MemoryStore
from holdfast.testing.fakegroup import FakeGroup, FakeStore, StoreView

UNHURRIED = Timeouts(20.0, 40.0)


def state_of(rank: int, size: int, leaves: int = 30) -> dict[str, Any]:
    """Leaves that are cut over all ranks, and some that all have; random generators."""
    rows = np.full((2, 3), rank, np.float32)
    cut = holdfast.Boxed(rows, (2 * rank, 0), (2 * size, 3))
    return {
        "cut": {str(i): cut for i in range(leaves // 2)},
        "alike": {str(i): np.full(4, i, np.float32) for i in range(leaves // 2)},
        "rng": holdfast.RNG(),
    }


def save(group: FakeGroup, leaves: int = 30) -> None:
    store, size = MemoryStore(), len(group.groups)
    group.run(lambda rank: holdfast.save(store, state_of(rank, size, leaves)))


class Calls:
    """The calls of each rank to the store, but those that find nothing new: by these it waits, and
    they are as many as there is time."""

    def __init__(self, group: FakeGroup) -> None:
        self.of: list[Counter[str]] = [Counter() for _ in group.views]
        for rank, view in enumerate(group.views):
            view.before = self._noting(rank, group.store)

    def _noting(self, rank: int, store: FakeStore) -> Callable[[str, str], None]:
        def note(name: str, key: str) -> None:
            waits = name == "check" or (name == "compare_set" and not key.endswith("/what"))
            if not key.startswith("pulse/") and (not waits or key in store.values):
                self.of[rank][name] += not key.endswith("/failed")

        return note

    def total(self, rank: int) -> int:
        return sum(self.of[rank].values())


@pytest.mark.parametrize("size", [2, 5, 9, 20])
def test_one_rank_makes_as_many_calls_with_any_number_of_ranks(size: int) -> None:
    """But rank 0 takes each note by one."""
    with FakeGroup(size, UNHURRIED) as group:
        for notes in (3, 2, 2):  # headers, receipts, and at first offers
            calls = Calls(group)
            save(group)
            totals = [calls.total(rank) for rank in range(size)]
            totals[0] -= notes * (size - 1)
            *usual, last_to_leave = sorted(totals)
            assert max(usual) <= 16, calls.of
            assert last_to_leave <= 30, calls.of
        assert [key for key in group.store.values if not key.startswith("pulse/")] == []


def test_what_is_dealt_out_goes_in_one_call() -> None:
    with FakeGroup(12, UNHURRIED) as group:
        calls = Calls(group)
        save(group)
        assert (calls.of[0]["multi_set"], calls.of[0]["delete_key"]) == (1, 0)


def test_an_unchanged_structure_is_neither_told_nor_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def do(*given: Any, **named: Any) -> Any:
            made[name] += 1
            return call(*given, **named)

        monkeypatch.setattr(owner, name, do)

    counted(partition._LocalRank, "make_local_plan")
    counted(partition._LocalRank, "encode_tree")
    counted(partition, "make_global_plan")
    counted(partition._Coordinator, "encode_masks")
    size = 4
    everything = Counter(make_local_plan=size, make_global_plan=1, encode_masks=1)
    with FakeGroup(size, UNHURRIED) as group:
        for leaves, expected in (
            (30, everything),
            (30, Counter()),
            (40, everything),
            (30, Counter()),  # by turns with another: both are remembered
            (40, Counter()),
        ):
            made.clear()
            save(group, leaves)
            del made["encode_tree"]  # each has its own random generators in it: only these differ
            assert made == expected, leaves


def test_ranks_that_have_the_same_send_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[partition._LocalRank] = []
    offer = partition._LocalRank.make_local_plan
    monkeypatch.setattr(
        partition._LocalRank, "make_local_plan", lambda self: made.append(self) or offer(self)
    )
    with FakeGroup(6, UNHURRIED) as group:
        store = MemoryStore()
        same = {"a": np.ones(5, np.float32), "b": [1, 2]}
        group.run(lambda rank: holdfast.save(store, dict(same)))
    assert len(made) == 1


def test_only_the_latest_plans_are_remembered() -> None:
    with FakeGroup(3, UNHURRIED) as group:
        for leaves in range(10, 24, 2):
            save(group, leaves)
        for ranks in group.groups:
            assert len(ranks.cache["masks"]) <= partition._MAX_CACHED_PLANS
        assert len(group.groups[0].cache["plans"]) == partition._MAX_CACHED_PLANS
        assert all("plans" not in ranks.cache for ranks in group.groups[1:])


def test_rank_0_takes_few_notes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    looks = KVClient.get_many

    def noting(board: KVClient, keys: Any) -> list[bytes]:
        found = looks(board, keys)
        taken.append(sum(map(len, found)))
        assert len(found) <= MAX_BATCH_KEYS
        return found

    monkeypatch.setattr(KVClient, "get_many", noting)

    def work(rank: int) -> Any:
        meeting = current_group().collective("it")
        with meeting:
            told = meeting.gather(bytes([rank]) * (MAX_VALUE_BYTES // 2), bytes)
            meeting.broadcast(True if rank == 0 else None, bool)
        meeting.close()
        return None if told is None else [set(value) for value in told]

    with FakeGroup(9, UNHURRIED) as group:
        assert group.run(work)[0] == [{rank} for rank in range(9)]
    assert max(taken) <= 2 * MAX_VALUE_BYTES


def test_notes_are_left_in_few_calls_of_bounded_size() -> None:
    store = FakeStore()
    view = StoreView(store)
    board = KVClient(view, 0, 2, UNHURRIED)
    calls: list[str] = []
    view.before = lambda name, key: calls.append(name) if key != "pulse/0" else None
    notes = {str(i): bytes([i % 250]) * (MAX_VALUE_BYTES * 2 // 5) for i in range(7)}
    notes["long"] = b"-" * (2 * MAX_VALUE_BYTES + 1)
    used = board.put_all(notes)
    assert Counter(calls) == {"multi_set": 3, "set": 4}  # by two, and what is alone
    assert set(used) == {k for k in store.values if k != "pulse/0"}
    assert {key: board.try_get(key) for key in notes} == notes
    board.delete(used)
    assert not [k for k in store.values if k != "pulse/0"]
    board.close()


def test_looking_after_many_ranks_is_one_call_once_they_are_known() -> None:
    view, now = StoreView(FakeStore()), [0.0]
    board = KVClient(view, 0, 200, Timeouts(20.0, 400.0), lambda: now[0])
    for rank in range(1, 200):
        view.set(f"pulse/{rank}", b"1 0 there")
    vigil = FailureDetector(board, "it")
    assert vigil.failed(range(1, 200)) is None
    calls: list[str] = []
    view.before = lambda name, key: calls.append(name) if key != "pulse/0" else None
    assert vigil.failed(range(1, 200)) is None
    assert calls == ["multi_get"]
    now[0] += 100
    for rank in range(1, 198):
        view.set(f"pulse/{rank}", b"2 0 there")
    asked: list[int] = []
    error = vigil.failed(range(1, 200), lambda rank: asked.append(rank) or rank == 198)
    assert error is not None
    assert (error.rank, asked) == (199, [198, 199])  # 198 has come, and may go
    board.close()
