"""A job that starts again over the same store reads nothing that an earlier start wrote."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from limpet.deadline import Deadline
from limpet.errors import RankFailed
from limpet.ranks import collective as collective_module
from limpet.ranks.group import Group
from limpet.ranks.kv import CLOSED_HEARTBEAT, KeyValueStore, KVClient, Timeouts
from tests.fakegroup import FakeStore, StoreView

SOON = Timeouts(silent=1.5, stuck=8.0)


class Prefixed:
    """A store that adds a prefix to all keys, like ``PrefixStore``."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getattr__(self, name: str) -> Any:
        call, prefix = getattr(self._store, name), self._prefix

        def do(keys: Any, *rest: Any) -> Any:
            if isinstance(keys, str):
                return call(f"{prefix}/{keys}", *rest)
            return call([f"{prefix}/{key}" for key in keys], *rest)

        return do


class Clients:
    """The key-value clients that a test opens. The fixture closes them."""

    def __init__(self) -> None:
        self.opened: list[KVClient] = []

    def connect(self, store: Any, rank: int, size: int, timeouts: Timeouts = SOON) -> KVClient:
        make_session_store: Any = partial(Prefixed, store)
        self.opened.append(KVClient(store, rank, size, timeouts, with_prefix=make_session_store))
        return self.opened[-1]

    def start_job(self, store: KeyValueStore, size: int) -> list[Group]:
        """Return the groups of the ranks of a job that starts now."""
        return [Group(self.connect(StoreView(store), r, size), size) for r in range(size)]  # type: ignore[arg-type]


@pytest.fixture
def clients() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    for kv in clients.opened:
        kv.close()


def run_on_ranks(groups: list[Group], work: Any) -> list[Any]:
    """Run ``work(group)`` in one thread per group. Return the results or exceptions by rank."""
    outcomes: list[Any] = [None] * groups[-1].size

    def run(group: Group) -> None:
        try:
            outcomes[group.rank] = work(group)
        except Exception as e:
            outcomes[group.rank] = e

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def gather_words(group: Group, word: str, failing_rank: int = -1) -> Any:
    """Gather a word from each rank. Return the words of all ranks, on all ranks.

    If a rank fails, no rank returns, because all of them wait for it in the second round.
    """
    collective = group.collective("the save of version_1")
    try:
        with collective:
            words = collective.gather(f"{word}{group.rank}", str)
            if group.rank == failing_rank:
                raise KeyError("on the way")
            words = collective.broadcast(words, list[str])
            collective.gather("done", str)
            return collective.broadcast(words if group.rank == 0 else None, list[str])
    finally:
        collective.close()


@pytest.mark.parametrize("size", [2, 3, 9])
def test_a_job_does_not_read_the_values_of_earlier_starts(clients: Clients, size: int) -> None:
    """The processes of the earlier starts stay alive and send heartbeats."""
    store = FakeStore()
    for n, word in enumerate(["a", "b", "c"]):
        groups = clients.start_job(store, size)
        all_words = [f"{word}{r}" for r in range(size)]
        assert (
            run_on_ranks(groups, lambda g, word=word: gather_words(g, word)) == [all_words] * size
        )
        failed = run_on_ranks(
            groups, lambda g, word=word, n=n: gather_words(g, word, failing_rank=n % size)
        )
        assert all(isinstance(e, KeyError | RankFailed) for e in failed)
    heartbeats = [key for key in store.values if "heartbeat/" in key]
    assert len(heartbeats) == 3 * 2 * size  # and the process of each rank


def test_ranks_of_an_earlier_start_can_still_run_collectives(clients: Clients) -> None:
    store = FakeStore()
    old = clients.start_job(store, 3)
    assert run_on_ranks(old, lambda g: gather_words(g, "a"))[0] == ["a0", "a1", "a2"]
    new = clients.start_job(store, 3)
    old_words = run_on_ranks(old, lambda g: gather_words(g, "b"))
    assert run_on_ranks(new, lambda g: gather_words(g, "c")) == [["c0", "c1", "c2"]] * 3
    assert old_words == [["b0", "b1", "b2"]] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_may_start_much_later(clients: Clients, late: int) -> None:
    """The delay exceeds ``silent``, which does not apply before the first heartbeat of a rank."""
    groups = clients.start_job(FakeStore(), 3)

    def work(group: Group) -> Any:
        if group.rank == late:
            time.sleep(SOON.silent * 1.2)
        return gather_words(group, "a")

    assert run_on_ranks(groups, work) == [["a0", "a1", "a2"]] * 3


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts_is_named(clients: Clients, missing: int) -> None:
    groups = clients.start_job(FakeStore(), 3)
    began = time.monotonic()
    outcomes = run_on_ranks(
        [group for group in groups if group.rank != missing], lambda g: gather_words(g, "a")
    )
    failed_ranks = {getattr(outcomes[r], "rank", "none") for r in range(3) if r != missing}
    assert failed_ranks == {missing}
    assert time.monotonic() - began < 2 * SOON.stuck


def test_the_deadline_of_an_operation_also_ends_the_wait_for_the_first_call_of_rank_0(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_module, "late_seconds", lambda *_: 0.1)
    group = Group(clients.connect(StoreView(FakeStore()), 1, 2, Timeouts(60, 60)), 2)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="in the time for the save") as failed:
        group.collective("the save", deadline=Deadline.after(0.3, "the save: 0.3 s"))
    assert 0.4 < time.monotonic() - began < 20
    assert failed.value.rank == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_fails_before_the_session_begins_raises_at_once(
    clients: Clients, rank: int
) -> None:
    view = StoreView(FakeStore())
    view.disconnect()
    kv = clients.connect(view, rank, 2)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="does not respond") as caught:
        kv.has_all(["a"])
    assert caught.value.rank is None
    assert time.monotonic() - began < SOON.silent


def test_values_that_no_rank_of_this_start_wrote_are_ignored(clients: Clients) -> None:
    """The values come from ranks that died while they joined, or from another program."""
    store = FakeStore()
    for key, value in {
        "hello/1": b"0123456789abcdef",
        "welcome/1": b"0123456789abcdef fedcba9876543210",
        "welcome/2": b"nonsense",
        "hello/2": b"",
        "heartbeat/0": CLOSED_HEARTBEAT,
        "1/failed": b"nonsense",
    }.items():
        store.set(key, value)
    groups = clients.start_job(store, 3)
    assert run_on_ranks(groups, lambda g: gather_words(g, "a")) == [["a0", "a1", "a2"]] * 3
