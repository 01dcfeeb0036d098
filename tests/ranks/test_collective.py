"""Collectives: the key-value client, gather, broadcast, and scatter, and ranks and stores that fail
at any call."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import limpet
from limpet.errors import LimpetError, NotFound, PlanError, RankFailed, Unsupported
from limpet.ranks.collective import LocalCollective
from limpet.ranks.failure_detector import FailureDetector
from limpet.ranks.group import Group, current_group, use_group
from limpet.ranks.kv import (
    CLOSED_HEARTBEAT,
    MAX_VALUE_BYTES,
    Heartbeat,
    KVClient,
    Timeouts,
)
from tests.fakegroup import FakeGroup, FakeStore, StoreView

SHORT_TIMEOUTS = Timeouts(silent=0.4, stuck=1.5)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- the fake store and the stores of torch.distributed --------------------------------------------


@pytest.fixture(params=["fake", "tcp", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    host = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    made: dict[str, Any] = {
        "fake": FakeStore,
        "tcp": lambda: dist.PrefixStore("p", host.clone()),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "f"), 1),
    }
    yield made[request.param]()
    assert host.check([])  # keep the host alive: its store ends with it


def test_all_stores_behave_the_same(store: Any) -> None:
    assert not store.check(["a"])
    assert store.check([])
    assert store.compare_set("a", "x", "y") == b"x"  # a missing key returns the expected value
    assert not store.check(["a"])
    assert store.compare_set("a", "", "1") == b"1"
    assert store.compare_set("a", "", "2") == b"1"
    assert store.compare_set("a", "1", "3") == b"3"
    store.set("e", b"")
    assert store.get("e") == b""
    assert store.compare_set("e", "", "new") == b"new"
    assert [store.add("n", 1), store.add("n", 1)] == [1, 2]
    assert store.get("n") == b"2"
    assert store.check(["a", "n"])
    assert store.delete_key("n")
    assert not store.check(["a", "n"])
    assert store.add("n", 1) == 1


# -- the key-value client --------------------------------------------------------------------------


@pytest.fixture
def kv() -> Iterator[KVClient]:
    made = KVClient(FakeStore(), 0, 2, SHORT_TIMEOUTS)
    yield made
    made.close()


@pytest.mark.parametrize(
    "length",
    [0, 1, MAX_VALUE_BYTES - 1, MAX_VALUE_BYTES, MAX_VALUE_BYTES + 1, 2 * MAX_VALUE_BYTES + 7],
)
def test_a_value_of_any_length_is_returned_and_deleted_completely(
    kv: KVClient, length: int
) -> None:
    value = bytes(range(256)) * (length // 256 + 1)
    kv.put_all({"k": value[:length]})
    assert kv.try_get("k") == value[:length]
    assert kv.try_get("k", delete=True) == value[:length]
    assert kv.try_get("k") is None
    assert [k for k in kv._store.values if not k.startswith("heartbeat/")] == []  # type: ignore[attr-defined]


def test_small_values_are_set_incremented_and_deleted(kv: KVClient) -> None:
    assert kv.get_text("c") is None
    assert kv.compare_and_set("c", "one") == "one"
    assert kv.compare_and_set("c", "two") == "one"
    assert kv.compare_and_set("c", "two", "one") == "two"
    assert kv.compare_and_set("c", "three", "one") == "two"
    assert kv.get_text("c") == "two"
    assert [kv.increment("n"), kv.increment("n")] == [1, 2]
    assert kv.has_all(["c", "n"])
    kv.delete(["c", "n", "never"])
    assert not kv.has_all(["c"])
    assert not kv.has_all(["n"])


def test_a_client_sends_heartbeats_and_announces_its_end() -> None:
    store = FakeStore()
    now = [0.0]
    clients = [KVClient(store, r, 3, Timeouts(0.1, 1.0), lambda: now[0]) for r in range(2)]
    assert clients[0].heartbeats([2]) == [None]
    first = clients[1].heartbeats([0])[0]
    assert first == Heartbeat(1, 0, socket.gethostname())
    clients[0].advance()
    now[0] += 10
    clients[0].heartbeats([])
    clients[0].has_all([])  # by now, the thread has sent another heartbeat
    assert clients[1].heartbeats([0]) == [Heartbeat(2, 1, socket.gethostname())]
    clients[0].close()
    assert store.values["heartbeat/0"] == CLOSED_HEARTBEAT
    assert clients[1].heartbeats([0]) == [Heartbeat(-1, 0, "")]
    with pytest.raises(RankFailed, match="the client is closed"):
        clients[0].has_all(["a"])
    clients[0].close()
    clients[1].close()


def test_calls_raise_within_the_bound_after_the_store_fails_or_hangs() -> None:
    for hangs in (False, True):
        view = StoreView(FakeStore())
        kv = KVClient(view, 0, 2, SHORT_TIMEOUTS)
        kv.put_all({"a": b"1"})
        release = threading.Event()
        if hangs:
            view.before = lambda name, key: release.wait(20)  # noqa: B023
        else:
            view.disconnect()
        began = time.monotonic()
        with pytest.raises(RankFailed, match="does not respond") as raised:
            kv.try_get("a")
        assert raised.value.rank is None
        with pytest.raises(RankFailed, match="does not respond"):
            kv.try_get("a")
        assert time.monotonic() - began < 3 * SHORT_TIMEOUTS.silent
        release.set()
        kv.close()


def test_a_closed_client_whose_store_failed_is_freed_without_a_garbage_collection() -> None:
    """Its connection would stay open until then, in each initialization."""
    view = StoreView(FakeStore())
    kv = KVClient(view, 0, 2, SHORT_TIMEOUTS)
    kv.put_all({"a": b"1"})
    view.disconnect()
    with no_garbage_collection():
        with suppress(RankFailed):
            kv.try_get("a")
        kv.close()
        freed = weakref.ref(kv)
        del kv
        assert freed() is None


def test_a_client_whose_store_failed_sends_no_more_heartbeats() -> None:
    """Otherwise, the other ranks would wait for this rank as long as for a living one."""
    view = StoreView(FakeStore())
    now = [0.0]
    kv = KVClient(view, 0, 2, SHORT_TIMEOUTS, lambda: now[0])
    kv.has_all(["a"])

    def refuse_once(name: str, key: str) -> None:
        view.before = lambda name, key: calls.append((name, key))
        raise ConnectionError("once")

    calls: list[tuple[str, str]] = []
    view.before = refuse_once
    with pytest.raises(RankFailed):
        kv.has_all(["a"])
    for _ in range(5):
        now[0] += 10
        time.sleep(0.02)
    assert calls == []
    kv.close()


def call_slow_store(answers: Any) -> None:
    view = StoreView(FakeStore())
    kv = KVClient(view, 0, 2, Timeouts(silent=1.0, stuck=9.0))
    kv.has_all([])
    view.before = lambda name, key: time.sleep(0.4)
    answers.put("calling")
    call_and_report(kv, answers)
    answers.put("done")


@pytest.mark.slow
def test_a_process_that_is_stopped_for_longer_than_the_bound_continues_afterwards() -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=call_slow_store, args=(answers,))
    child.start()
    assert answers.get(timeout=20) == "calling"
    assert child.pid is not None
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(child.pid, signal.SIGCONT)
    assert answers.get(timeout=20) == "done"
    child.join(20)


def call_and_report(kv: KVClient, answers: Any) -> None:
    try:
        kv.has_all(["a"])
    except RankFailed as e:
        answers.put(str(e))


def test_a_forked_process_cannot_use_the_client_of_its_parent(kv: KVClient) -> None:
    kv.has_all(["a"])
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=call_and_report, args=(kv, answers))
    child.start()
    assert "forked" in answers.get(timeout=20)
    child.join(20)


def test_a_failure_detector_measures_from_its_first_check() -> None:
    store, now = FakeStore(), [100.0]
    kv = KVClient(store, 0, 3, Timeouts(silent=10.0, stuck=50.0), lambda: now[0])
    heartbeats = {1: "1 0 there", 2: "1 0 there"}

    def set_heartbeat(rank: int, text: str) -> None:
        store.values[f"heartbeat/{rank}"] = text.encode()

    for rank, text in heartbeats.items():
        set_heartbeat(rank, text)

    def wait(detector: FailureDetector, ranks: list[int], seconds: int) -> None:
        for _ in range(seconds):
            assert detector.failed(ranks) is None
            now[0] += 1

    detector = FailureDetector(kv, "the save")
    assert detector.failed([]) is None
    wait(detector, [1, 2], 9)
    set_heartbeat(1, "2 0 there")
    wait(detector, [1, 2], 2)
    error = detector.failed([1, 2])
    assert error is not None
    assert (error.rank, "Rank 2 on there did not join the save" in str(error)) == (2, True)
    for count in range(3, 9):  # the rank is alive but makes no progress
        set_heartbeat(1, f"{count} 0 there")
        for _ in range(9):
            now[0] += 1
            error = detector.failed([1])
        assert (error is not None) == (count > 6), count
    assert "some progress within 50 s" in str(error)
    set_heartbeat(1, "9 1 there")
    assert detector.failed([1]) is None
    store.values["heartbeat/1"] = CLOSED_HEARTBEAT
    error = detector.failed([1])
    assert error is not None
    assert "ended" in str(error)
    never = FailureDetector(kv, "it")
    wait(never, [7], 51)  # the rank may be alive: it has sent no heartbeat yet
    error = never.failed([7])
    assert error is not None
    assert "never joined" in str(error)
    kv.close()


def test_a_failure_detector_that_was_suspended_with_the_job_waits_for_the_other_ranks() -> None:
    store, now = FakeStore(), [100.0]
    kv = KVClient(store, 0, 2, Timeouts(silent=10.0, stuck=50.0), lambda: now[0])
    store.values["heartbeat/1"] = b"1 0 there"
    detector = FailureDetector(kv, "the save")
    assert detector.failed([1]) is None
    now[0] += 1_000_000  # the other rank has not yet sent its next heartbeat
    assert detector.failed([1]) is None
    store.values["heartbeat/1"] = b"2 0 there"
    for _ in range(11):
        now[0] += 1
        assert detector.failed([1]) is None
    now[0] += 1
    error = detector.failed([1])
    assert error is not None
    assert "none: the process has died or hangs" in str(error)
    kv.close()


# -- collectives -----------------------------------------------------------------------------------


def leftover_keys(group: FakeGroup) -> list[str]:
    return [key for key in group.store.values if not key.startswith("heartbeat/")]


def run_all_operations(rank: int, operation: str = "the save") -> tuple[Any, ...]:
    collective = current_group().collective(operation)
    try:
        with collective:
            size = collective.size
            gathered = collective.gather([rank, "x" * rank], list)
            scattered = None if gathered is None else [(g, n) for n, g in enumerate(gathered)]
            mine = collective.scatter(scattered, tuple[list[Any], int])
            message = collective.broadcast("all" if rank == 0 else None, str)
            again = collective.gather(rank, int)
    finally:
        collective.close()
    assert mine == ([rank, "x" * rank], rank) or list(mine) == [[rank, "x" * rank], rank]
    assert message == "all"
    assert again == (list(range(size)) if rank == 0 else None)
    return gathered is None, message


@pytest.mark.parametrize("size", [2, 3, 8])
def test_values_are_gathered_scattered_and_broadcast_and_no_keys_are_left(size: int) -> None:
    with FakeGroup(size) as group:
        for _ in range(3):
            group.run(run_all_operations)
        assert leftover_keys(group) == []


def test_the_collective_of_a_single_process_returns_its_own_values() -> None:
    assert isinstance(Group().collective("it"), LocalCollective)
    with use_group(Group()):
        assert run_all_operations(0) == (False, "all")


def test_large_values_are_sent_in_parts() -> None:
    def work(rank: int) -> int:
        collective = current_group().collective("it")
        with collective:
            values = collective.gather(bytes(MAX_VALUE_BYTES + 1000 * rank), bytes)
            sizes = collective.broadcast(
                None if values is None else [len(v) for v in values], list[int]
            )
        collective.close()
        return sum(sizes)

    with FakeGroup(3) as group:
        assert len(set(group.run(work))) == 1
        assert leftover_keys(group) == []


def test_a_slow_rank_stays_in_step_with_the_others_after_a_failure() -> None:
    """Otherwise, the sequence numbers of its later collectives would differ from those of the other
    ranks."""
    with FakeGroup(3) as group:
        calls: list[tuple[str, str]] = []
        polled, failed = threading.Event(), threading.Event()

        def wait_for_failure(name: str, key: str) -> None:
            calls.append((name, key))
            if calls.count(("check", "1/failed")) == 2 and not polled.is_set():  # not at the start
                polled.set()
                failed.wait(20)

        group.views[2].before = wait_for_failure

        def work(rank: int) -> None:
            with current_group().collective("the resume") as outer:
                if rank == 0:
                    polled.wait(20)
                outer.broadcast("continue" if rank == 0 else None, str)
                try:
                    with current_group().collective("the load") as inner:
                        if rank == 1:
                            raise OSError(28, "No space left on device")
                        inner.gather(rank, int)
                        inner.broadcast("done" if rank == 0 else None, str)
                finally:
                    inner.close()
            outer.close()

        def run_and_signal(rank: int) -> None:
            try:
                work(rank)
            finally:
                if rank == 1:
                    failed.set()

        made = group.outcomes(run_and_signal)
        assert [type(e) for e in made] == [RankFailed, OSError, RankFailed]
        assert [e.what for e in made if isinstance(e, RankFailed)] == [
            "Rank 1 failed during the load; nothing was committed. OSError: [Errno 28] No space"
            " left on device"
        ] * 2
        group.run(run_all_operations)  # their sequence numbers still match


@pytest.mark.parametrize("shared", [True, False])
def test_a_late_rank_receives_the_values_of_rank_0_even_if_rank_0_has_failed(
    shared: bool,
) -> None:
    with FakeGroup(3) as group:
        rank_0_closed = threading.Event()
        got = []

        def work(rank: int) -> None:
            collective = current_group().collective("the save of version_5")
            try:
                with collective:
                    if rank == 2:
                        rank_0_closed.wait(20)
                    if shared:
                        got.append(collective.broadcast("go" if rank == 0 else None, str))
                    else:
                        got.append(collective.scatter(["go"] * 3 if rank == 0 else None, str))
                    if rank == 0:
                        raise OSError(28, "No space left on device")
                    collective.gather(rank, int)
                    collective.broadcast(None, int)
            finally:
                collective.close()
                rank_0_closed.set()

        made = group.outcomes(work)
        assert got == ["go"] * 3
        assert [type(e) for e in made] == [OSError, RankFailed, RankFailed]
        assert leftover_keys(group) == []


def fail_in_turn(error: BaseException, failing_rank: int, turn: int) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        collective = current_group().collective("the save of version_5")
        try:
            with collective:
                for n in range(4):
                    if (rank, n) == (failing_rank, turn):
                        raise error
                    collective.gather("value" * 10, str)
                    collective.broadcast(n if rank == 0 else None, int)
        finally:
            collective.close()

    return work


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 1, 3])
def test_an_error_of_one_rank_is_raised_on_all_ranks_and_no_keys_are_left(
    failing_rank: int, turn: int
) -> None:
    error = OSError(28, "No space left on device")
    with FakeGroup(3) as group:
        outcomes = group.outcomes(fail_in_turn(error, failing_rank, turn))
        assert outcomes[failing_rank] is error
        for rank in {0, 1, 2} - {failing_rank}:
            raised = outcomes[rank]
            assert isinstance(raised, RankFailed)
            assert raised.rank == failing_rank
            assert f"Rank {failing_rank} failed during the save of version_5" in str(raised)
            assert "No space left" in str(raised)
        assert leftover_keys(group) == []
        group.run(run_all_operations)  # the next collective works


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_collective_is_freed_without_a_garbage_collection(failing_rank: int) -> None:
    """It may hold the memory of a state until then."""
    freed: list[weakref.ref[Any]] = []

    def work(rank: int) -> None:
        collective = current_group().collective("the save of version_5")
        freed.append(weakref.ref(collective))
        with suppress(OSError, RankFailed), collective:
            if rank == failing_rank:
                raise OSError(28, "No space left on device")
            collective.gather(1, int)  # may not wait on rank 1
            collective.broadcast(1, int)
            pytest.fail("the error of the other rank was not raised")

    with FakeGroup(2) as group, no_garbage_collection():
        group.run(work)
        assert [reference() for reference in freed] == [None, None]


@pytest.mark.parametrize("kind", [PlanError, NotFound])
def test_an_error_of_the_operation_is_the_same_on_all_ranks(kind: type[LimpetError]) -> None:
    error = kind("a leaf is missing", expected="1", found="2", todo="look", leaf="a/b", list=[1])
    with FakeGroup(3) as group:
        outcomes = group.outcomes(fail_in_turn(error, 1, 1))
        for raised in (outcomes[0], outcomes[2]):
            assert type(raised) is kind
            assert str(raised) == str(error)
            assert (raised.leaf, raised.rank) == ("a/b", 1)


def test_an_error_of_another_class_is_the_cause_of_rank_failed() -> None:
    with FakeGroup(2) as group:
        raised = group.outcomes(fail_in_turn(limpet.errors.NoSpace("full", key="k"), 1, 1))[0]
        assert isinstance(raised, RankFailed)
        assert isinstance(raised.__cause__, limpet.errors.NoSpace)
        assert (raised.key, raised.rank) == ("k", 1)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_the_other_ranks_name_a_dead_rank_within_the_bound(failing_rank: int) -> None:
    with FakeGroup(3, SHORT_TIMEOUTS) as group:
        group.run(run_all_operations)

        def work(rank: int) -> Any:
            if rank == failing_rank:
                group.views[failing_rank].disconnect()
                return None
            return run_all_operations(rank)

        began = time.monotonic()
        outcomes = group.outcomes(work)
        assert time.monotonic() - began < 5 * SHORT_TIMEOUTS.silent
        for rank in {0, 1, 2} - {failing_rank}:
            raised = outcomes[rank]
            assert isinstance(raised, RankFailed)
            assert raised.rank == failing_rank
            assert socket.gethostname() in str(raised)


def test_a_rank_that_ends_normally_is_reported_immediately() -> None:
    with FakeGroup(2, Timeouts(silent=2.0, stuck=60.0)) as group:

        def work(rank: int) -> Any:
            if rank == 1:
                group.groups[1].kv.has_all([])
                group.groups[1].kv.close()
                return None
            return run_all_operations(rank)

        raised = group.outcomes(work)[0]
        assert isinstance(raised, RankFailed)
        assert (raised.rank, "the process has ended" in str(raised)) == (1, True)


def test_ranks_in_different_operations_raise_an_error() -> None:
    with FakeGroup(2) as group:
        outcomes = group.outcomes(
            lambda rank: run_all_operations(rank, f"the save of version_{rank}")
        )
        assert any("different operations" in str(outcome) for outcome in outcomes)
        assert all(isinstance(outcome, RankFailed) for outcome in outcomes)


@pytest.mark.slow
def test_a_rank_that_fails_at_any_call_to_the_store_does_not_block_the_others() -> None:
    calls = 1
    with FakeGroup(2) as group:  # count the calls, roughly
        seen: list[str] = []
        group.views[1].before = lambda name, key: seen.append(key)
        group.run(run_all_operations)
    for calls in range(1, len(seen) + 1, 3):
        with FakeGroup(2, Timeouts(silent=0.15, stuck=0.5)) as group:
            left = [calls]

            def count(name: str, key: str, group: FakeGroup = group, left: Any = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    group.views[1].disconnect()
                    raise ConnectionError("killed by a test")

            group.views[1].before = count
            began = time.monotonic()
            for outcome in group.outcomes(run_all_operations):
                assert outcome in [(True, "all"), (False, "all")] or isinstance(outcome, RankFailed)
            assert time.monotonic() - began < 3


# -- the current group -----------------------------------------------------------------------------


def test_a_process_without_others_has_a_local_group() -> None:
    assert current_group().kv is None
    assert current_group("alone").kv is None
    with pytest.raises(LimpetError, match="Invalid value for group="):
        current_group("all")


def test_simulated_ranks_belong_to_their_group_only_within_the_context() -> None:
    with FakeGroup(2) as group:
        with use_group(group.groups[1]):
            assert current_group() is group.groups[1]
            assert current_group("alone").kv is None
        assert current_group().kv is None
        assert group.run(lambda rank: current_group().rank) == [0, 1]
        seen = group.outcomes(lambda rank: 1 // rank)
        assert isinstance(seen[0], ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            group.run(lambda rank: 1 // rank)


def test_a_process_group_of_one_rank_is_local_and_a_fake_one_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert current_group().kv is None
    finally:
        dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore as Fake

    dist.init_process_group("fake", store=Fake(), rank=0, world_size=4)
    try:
        with pytest.raises(Unsupported, match="fake process group"):
            current_group()
    finally:
        dist.destroy_process_group()


def test_a_rank_that_fails_and_leaves_last_deletes_what_rank_0_sent_it() -> None:
    """It has not reached the operation in which rank 0 sent the value."""
    with FakeGroup(2) as group:
        first, second = (g.collective("the save") for g in group.groups)
        for collective in (first, second):
            collective.join()
        second.gather("b", str)
        assert first.gather("a", str) == ["a", "b"]
        first.broadcast("c", str)
        first.close()
        second.abort(ValueError("x"))
        second.close()
        assert leftover_keys(group) == []
