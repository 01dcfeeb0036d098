"""A job that is started again over the same store reads nothing that its first start has left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from holdfast.engine.distributed.group import StoreGroup
from holdfast.engine.distributed.kv import CLOSED_HEARTBEAT, KeyValueStore, KVClient, Timeouts
from holdfast.engine.distributed.session import SessionKVClient
from holdfast.errors import RankFailed
from holdfast.testing.fakegroup import FakeStore, StoreView

SOON = Timeouts(silent=1.5, stuck=8.0)


class Prefixed:
    """A store with a prefix before all keys, as ``PrefixStore``."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getattr__(self, name: str) -> Any:
        call, prefix = getattr(self._store, name), self._prefix

        def do(keys: Any, *rest: Any) -> Any:
            if isinstance(keys, str):
                return call(f"{prefix}/{keys}", *rest)
            return call([f"{prefix}/{key}" for key in keys], *rest)

        return do


class Start:
    """The boards of all ranks of one start."""

    def __init__(self) -> None:
        self.made: list[KVClient] = []

    def board(self, store: Any, rank: int, size: int, patience: Timeouts = SOON) -> KVClient:
        within: Any = partial(Prefixed, store)
        self.made.append(SessionKVClient(store, rank, size, patience, within))
        return self.made[-1]

    def group(self, store: KeyValueStore, size: int) -> list[StoreGroup]:
        return [StoreGroup(self.board(StoreView(store), r, size), size) for r in range(size)]  # type: ignore[arg-type]


@pytest.fixture
def start() -> Iterator[Start]:
    made = Start()
    yield made
    for board in made.made:
        board.close()


def act(ranks: list[StoreGroup], work: Any) -> list[Any]:
    outcomes: list[Any] = [None] * ranks[-1].size

    def run(ranks: StoreGroup) -> None:
        try:
            outcomes[ranks.rank] = work(ranks)
        except Exception as e:
            outcomes[ranks.rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def meets(ranks: StoreGroup, word: str, falls: int = -1) -> Any:
    meeting = ranks.collective("the save of version_1")
    try:
        with meeting:
            told = meeting.gather(f"{word}{ranks.rank}", str)
            if ranks.rank == falls:
                raise KeyError("on the way")
            return meeting.broadcast(None if told is None else told, list[str])
    finally:
        meeting.close()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_what_a_first_start_has_left_is_not_read(start: Start, size: int) -> None:
    store = FakeStore()
    for n, word in enumerate(["a", "b", "c"]):
        ranks = start.group(store, size)
        everybody = [f"{word}{r}" for r in range(size)]
        assert act(ranks, lambda r, word=word: meets(r, word)) == [everybody] * size
        failed = act(ranks, lambda r, word=word, n=n: meets(r, word, falls=n % size))
        assert all(isinstance(e, KeyError | RankFailed) for e in failed)
        # and its processes live on, and leave pulses
    pulses = [key for key in store.values if "pulse/" in key]
    assert len(pulses) == 3 * size


def test_ranks_left_over_from_the_first_start_go_on_meeting_each_other(start: Start) -> None:
    store = FakeStore()
    old, new = start.group(store, 3), []
    assert act(old, lambda r: meets(r, "a"))[0] == ["a0", "a1", "a2"]
    new = start.group(store, 3)
    made = act([*old], lambda r: meets(r, "b"))
    assert act(new, lambda r: meets(r, "c")) == [["c0", "c1", "c2"]] * 3
    assert made == [["b0", "b1", "b2"]] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_may_come_much_later(start: Start, late: int) -> None:
    """Longer than without a pulse: nothing can tell yet that it lives."""
    ranks = start.group(FakeStore(), 3)

    def work(r: StoreGroup) -> Any:
        if r.rank == late:
            time.sleep(SOON.silent * 1.2)
        return meets(r, "a")

    assert act(ranks, work) == [["a0", "a1", "a2"]] * 3


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_never_comes_is_named(start: Start, lost: int) -> None:
    ranks = start.group(FakeStore(), 3)
    began = time.monotonic()
    outcomes = act([r for r in ranks if r.rank != lost], lambda r: meets(r, "a"))
    assert {getattr(outcomes[r], "rank", "none") for r in range(3) if r != lost} == {lost}
    assert time.monotonic() - began < 2 * SOON.stuck


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_before_the_session_is_there(start: Start, rank: int) -> None:
    view = StoreView(FakeStore())
    view.disconnect()
    board = start.board(view, rank, 2)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="does not respond") as caught:
        board.has_all(["a"])
    assert caught.value.rank is None
    assert time.monotonic() - began < SOON.silent


def test_notes_that_nobody_of_this_start_has_written_are_no_answer(start: Start) -> None:
    """Of ranks that died at any moment of saying hello, and of what somebody else wrote there."""
    store = FakeStore()
    for key, value in {
        "hello/1": b"0123456789abcdef",
        "welcome/1": b"0123456789abcdef fedcba9876543210",
        "welcome/2": b"nonsense",
        "hello/2": b"",
        "pulse/0": CLOSED_HEARTBEAT,
        "1/failed": b"nonsense",
    }.items():
        store.set(key, value)
    assert act(start.group(store, 3), lambda r: meets(r, "a")) == [["a0", "a1", "a2"]] * 3
