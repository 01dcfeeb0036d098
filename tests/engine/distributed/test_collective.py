"""Ranks meet: notes on a board, gathering and sharing, ranks and stores that fail at any call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast.engine.distributed.collective import LocalCollective
from holdfast.engine.distributed.failure_detector import FailureDetector
from holdfast.engine.distributed.group import LocalGroup, current_group, use_group
from holdfast.engine.distributed.kv import (
    CLOSED_HEARTBEAT,
    MAX_VALUE_BYTES,
    Heartbeat,
    KVClient,
    Timeouts,
)
from holdfast.errors import HoldfastError, NotFound, PlanError, RankFailed, Unsupported
from holdfast.testing.fakegroup import FakeGroup, FakeStore, StoreView

BRIEF = Timeouts(silent=0.4, stuck=1.5)


# -- the store that takes the TCPStore's place -----------------------------------------------------


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
    assert host.check([])  # it is still there: the store goes with it


def test_stores_do_the_same(store: Any) -> None:
    assert not store.check(["a"])
    assert store.check([])
    assert store.compare_set("a", "x", "y") == b"x"  # there is none: what was expected comes back
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


# -- the board -------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Iterator[KVClient]:
    made = KVClient(FakeStore(), 0, 2, BRIEF)
    yield made
    made.close()


@pytest.mark.parametrize(
    "length",
    [0, 1, MAX_VALUE_BYTES - 1, MAX_VALUE_BYTES, MAX_VALUE_BYTES + 1, 2 * MAX_VALUE_BYTES + 7],
)
def test_a_note_of_any_length_comes_back_and_is_taken_away_whole(
    board: KVClient, length: int
) -> None:
    value = bytes(range(256)) * (length // 256 + 1)
    board.put_all({"k": value[:length]})
    assert board.try_get("k") == value[:length]
    assert board.try_get("k", delete=True) == value[:length]
    assert board.try_get("k") is None
    assert [k for k in board._store.values if not k.startswith("pulse/")] == []  # type: ignore[attr-defined]


def test_small_notes_and_counts(board: KVClient) -> None:
    assert board.get_text("c") is None
    assert board.compare_and_set("c", "one") == "one"
    assert board.compare_and_set("c", "two") == "one"
    assert board.compare_and_set("c", "two", "one") == "two"
    assert board.compare_and_set("c", "three", "one") == "two"
    assert board.get_text("c") == "two"
    assert [board.increment("n"), board.increment("n")] == [1, 2]
    assert board.has_all(["c", "n"])
    board.delete(["c", "n", "never"])
    assert not board.has_all(["c"])
    assert not board.has_all(["n"])


def test_a_board_leaves_pulses_and_says_that_it_goes() -> None:
    store = FakeStore()
    now = [0.0]
    boards = [KVClient(store, r, 3, Timeouts(0.1, 1.0), lambda: now[0]) for r in range(2)]
    assert boards[0].heartbeats([2]) == [None]
    first = boards[1].heartbeats([0])[0]
    assert first == Heartbeat(1, 0, socket.gethostname())
    boards[0].advance()
    now[0] += 10
    boards[0].heartbeats([])
    boards[0].has_all([])  # by now the thread has been round once more
    assert boards[1].heartbeats([0]) == [Heartbeat(2, 1, socket.gethostname())]
    boards[0].close()
    assert store.values["pulse/0"] == CLOSED_HEARTBEAT
    assert boards[1].heartbeats([0]) == [Heartbeat(-1, 0, "")]
    with pytest.raises(RankFailed, match="the client is closed"):
        boards[0].has_all(["a"])
    boards[0].close()
    boards[1].close()


def test_a_store_that_fails_or_hangs_is_raised_within_the_bound_and_ever_after() -> None:
    for hangs in (False, True):
        view = StoreView(FakeStore())
        board = KVClient(view, 0, 2, BRIEF)
        board.put_all({"a": b"1"})
        release = threading.Event()
        if hangs:
            view.before = lambda name, key: release.wait(20)  # noqa: B023
        else:
            view.disconnect()
        began = time.monotonic()
        with pytest.raises(RankFailed, match="does not respond") as raised:
            board.try_get("a")
        assert raised.value.rank is None
        with pytest.raises(RankFailed, match="does not respond"):
            board.try_get("a")
        assert time.monotonic() - began < 3 * BRIEF.silent
        release.set()
        board.close()


def test_a_rank_whose_store_has_failed_leaves_no_more_pulses() -> None:
    """Else the others would wait for it for as long as for one that is alive."""
    view = StoreView(FakeStore())
    now = [0.0]
    board = KVClient(view, 0, 2, BRIEF, lambda: now[0])
    board.has_all(["a"])

    def refuse_once(name: str, key: str) -> None:
        view.before = lambda name, key: told.append((name, key))
        raise ConnectionError("once")

    told: list[tuple[str, str]] = []
    view.before = refuse_once
    with pytest.raises(RankFailed):
        board.has_all(["a"])
    for _ in range(5):
        now[0] += 10
        time.sleep(0.02)
    assert told == []
    board.close()


def stopped(answers: Any) -> None:
    view = StoreView(FakeStore())
    board = KVClient(view, 0, 2, Timeouts(silent=1.0, stuck=9.0))
    board.has_all([])
    view.before = lambda name, key: time.sleep(0.4)
    answers.put("asks")
    ask(board, answers)
    answers.put("has asked")


@pytest.mark.slow
def test_a_process_that_is_stopped_for_longer_than_the_bound_goes_on_afterwards() -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=stopped, args=(answers,))
    child.start()
    assert answers.get(timeout=20) == "asks"
    assert child.pid is not None
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(child.pid, signal.SIGCONT)
    assert answers.get(timeout=20) == "has asked"
    child.join(20)


def ask(board: KVClient, answers: Any) -> None:
    try:
        board.has_all(["a"])
    except RankFailed as e:
        answers.put(str(e))


def test_a_forked_process_cannot_speak_for_the_rank(board: KVClient) -> None:
    board.has_all(["a"])
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=ask, args=(board, answers))
    child.start()
    assert "forked" in answers.get(timeout=20)
    child.join(20)


def test_a_vigil_counts_from_its_first_look() -> None:
    store, now = FakeStore(), [100.0]
    board = KVClient(store, 0, 3, Timeouts(silent=10.0, stuck=50.0), lambda: now[0])
    pulse = {1: "1 0 there", 2: "1 0 there"}

    def beat(rank: int, text: str) -> None:
        store.values[f"pulse/{rank}"] = text.encode()

    for rank, text in pulse.items():
        beat(rank, text)
    vigil = FailureDetector(board, "the save")
    assert vigil.failed([]) is None
    assert vigil.failed([1, 2]) is None
    now[0] += 9
    beat(1, "2 0 there")
    assert vigil.failed([1, 2]) is None
    now[0] += 2
    error = vigil.failed([1, 2])
    assert error is not None
    assert (error.rank, "Rank 2 on there did not join the save" in str(error)) == (2, True)
    for beats in range(3, 9):  # alive, and not getting on
        beat(1, f"{beats} 0 there")
        now[0] += 9
        error = vigil.failed([1])
        assert (error is not None) == (beats > 6), beats
    assert "some progress within 50 s" in str(error)
    beat(1, "9 1 there")
    assert vigil.failed([1]) is None
    store.values["pulse/1"] = CLOSED_HEARTBEAT
    error = vigil.failed([1])
    assert error is not None
    assert "ended" in str(error)
    never = FailureDetector(board, "it")
    assert never.failed([7]) is None
    now[0] += 11
    assert never.failed([7]) is None  # it may live: it has not said anything yet
    now[0] += 40
    error = never.failed([7])
    assert error is not None
    assert "never joined" in str(error)
    board.close()


# -- meetings --------------------------------------------------------------------------------------


def notes(group: FakeGroup) -> list[str]:
    return [key for key in group.store.values if not key.startswith("pulse/")]


def all_turns(rank: int, what: str = "the save") -> tuple[Any, ...]:
    meeting = current_group().collective(what)
    try:
        with meeting:
            size = meeting.size
            gathered = meeting.gather([rank, "x" * rank], list)
            given = None if gathered is None else [(g, n) for n, g in enumerate(gathered)]
            mine = meeting.scatter(given, tuple[list[Any], int])
            word = meeting.broadcast("all" if rank == 0 else None, str)
            again = meeting.gather(rank, int)
    finally:
        meeting.close()
    assert mine == ([rank, "x" * rank], rank) or list(mine) == [[rank, "x" * rank], rank]
    assert word == "all"
    assert again == (list(range(size)) if rank == 0 else None)
    return gathered is None, word


@pytest.mark.parametrize("size", [2, 3, 8])
def test_values_are_gathered_dealt_out_and_shared_and_nothing_stays(size: int) -> None:
    with FakeGroup(size) as group:
        for _ in range(3):
            group.run(all_turns)
        assert notes(group) == []


def test_a_meeting_of_one() -> None:
    assert isinstance(LocalGroup().collective("it"), LocalCollective)
    with use_group(LocalGroup()):
        assert all_turns(0) == (False, "all")


def test_large_values_go_in_parts() -> None:
    def work(rank: int) -> int:
        meeting = current_group().collective("it")
        with meeting:
            values = meeting.gather(bytes(MAX_VALUE_BYTES + 1000 * rank), bytes)
            sizes = meeting.broadcast(
                None if values is None else [len(v) for v in values], list[int]
            )
        meeting.close()
        return sum(sizes)

    with FakeGroup(3) as group:
        assert len(set(group.run(work))) == 1
        assert notes(group) == []


def test_a_rank_that_hears_late_meets_the_others_where_one_has_failed() -> None:
    """Else the numbers of its meetings would be other ones from then on."""
    with FakeGroup(3) as group:
        asked: list[tuple[str, str]] = []
        looks, failed = threading.Event(), threading.Event()

        def late(name: str, key: str) -> None:
            asked.append((name, key))
            if asked.count(("check", "1/failed")) == 2 and not looks.is_set():  # not as it comes
                looks.set()
                failed.wait(20)

        group.views[2].before = late

        def work(rank: int) -> None:
            with current_group().collective("the resume") as outer:
                if rank == 0:
                    looks.wait(20)
                outer.broadcast("go on" if rank == 0 else None, str)
                try:
                    with current_group().collective("the load") as inner:
                        if rank == 1:
                            raise OSError(28, "No space left on device")
                        inner.gather(rank, int)
                        inner.broadcast("done" if rank == 0 else None, str)
                finally:
                    inner.close()
            outer.close()

        def all_of_it(rank: int) -> None:
            try:
                work(rank)
            finally:
                if rank == 1:
                    failed.set()

        made = group.outcomes(all_of_it)
        assert [type(e) for e in made] == [RankFailed, OSError, RankFailed]
        assert [e.what for e in made if isinstance(e, RankFailed)] == [
            "Rank 1 failed during the load; nothing was committed. OSError: [Errno 28] No space"
            " left on device"
        ] * 2
        group.run(all_turns)  # they still meet


@pytest.mark.parametrize("shared", [True, False])
def test_what_rank_0_has_given_is_there_for_who_comes_late_also_when_it_has_failed(
    shared: bool,
) -> None:
    with FakeGroup(3) as group:
        gone = threading.Event()
        got = []

        def work(rank: int) -> None:
            meeting = current_group().collective("the save of version_5")
            try:
                with meeting:
                    if rank == 2:
                        gone.wait(20)
                    if shared:
                        got.append(meeting.broadcast("go" if rank == 0 else None, str))
                    else:
                        got.append(meeting.scatter(["go"] * 3 if rank == 0 else None, str))
                    if rank == 0:
                        raise OSError(28, "No space left on device")
                    meeting.gather(rank, int)
                    meeting.broadcast(None, int)
            finally:
                meeting.close()
                gone.set()

        made = group.outcomes(work)
        assert got == ["go"] * 3
        assert [type(e) for e in made] == [OSError, RankFailed, RankFailed]
        assert notes(group) == []


def failing(error: BaseException, by: int, turn: int) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        meeting = current_group().collective("the save of version_5")
        try:
            with meeting:
                for n in range(4):
                    if (rank, n) == (by, turn):
                        raise error
                    meeting.gather("value" * 10, str)
                    meeting.broadcast(n if rank == 0 else None, int)
        finally:
            meeting.close()

    return work


@pytest.mark.parametrize("by", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 1, 3])
def test_an_error_of_one_rank_is_raised_by_all_and_nothing_stays(by: int, turn: int) -> None:
    error = OSError(28, "No space left on device")
    with FakeGroup(3) as group:
        outcomes = group.outcomes(failing(error, by, turn))
        assert outcomes[by] is error
        for rank in {0, 1, 2} - {by}:
            heard = outcomes[rank]
            assert isinstance(heard, RankFailed)
            assert heard.rank == by
            assert f"Rank {by} failed during the save of version_5" in str(heard)
            assert "No space left" in str(heard)
        assert notes(group) == []
        group.run(all_turns)  # the next one works


@pytest.mark.parametrize("kind", [PlanError, NotFound])
def test_an_error_of_what_they_do_together_is_the_same_on_all(kind: type[HoldfastError]) -> None:
    error = kind("a leaf is missing", expected="1", found="2", todo="look", leaf="a/b", list=[1])
    with FakeGroup(3) as group:
        outcomes = group.outcomes(failing(error, 1, 1))
        for heard in (outcomes[0], outcomes[2]):
            assert type(heard) is kind
            assert str(heard) == str(error)
            assert (heard.leaf, heard.rank) == ("a/b", 1)


def test_an_error_of_another_kind_is_the_cause() -> None:
    with FakeGroup(2) as group:
        heard = group.outcomes(failing(holdfast.errors.NoSpace("full", key="k"), 1, 1))[0]
        assert isinstance(heard, RankFailed)
        assert isinstance(heard.__cause__, holdfast.errors.NoSpace)
        assert (heard.key, heard.rank) == ("k", 1)


@pytest.mark.parametrize("by", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others_within_the_bound(by: int) -> None:
    with FakeGroup(3, BRIEF) as group:
        group.run(all_turns)

        def work(rank: int) -> Any:
            if rank == by:
                group.views[by].disconnect()
                return None
            return all_turns(rank)

        began = time.monotonic()
        outcomes = group.outcomes(work)
        assert time.monotonic() - began < 5 * BRIEF.silent
        for rank in {0, 1, 2} - {by}:
            heard = outcomes[rank]
            assert isinstance(heard, RankFailed)
            assert heard.rank == by
            assert socket.gethostname() in str(heard)


def test_a_rank_that_leaves_in_order_is_told_at_once() -> None:
    with FakeGroup(2, Timeouts(silent=2.0, stuck=60.0)) as group:

        def work(rank: int) -> Any:
            if rank == 1:
                group.groups[1].kv.has_all([])
                group.groups[1].kv.close()
                return None
            return all_turns(rank)

        heard = group.outcomes(work)[0]
        assert isinstance(heard, RankFailed)
        assert (heard.rank, "the process has ended" in str(heard)) == (1, True)


def test_ranks_that_do_different_things_find_out() -> None:
    with FakeGroup(2) as group:
        outcomes = group.outcomes(lambda rank: all_turns(rank, f"the save of version_{rank}"))
        assert any("different operations" in str(outcome) for outcome in outcomes)
        assert all(isinstance(outcome, RankFailed) for outcome in outcomes)


@pytest.mark.slow
def test_ranks_that_fail_at_any_call_to_the_store_hold_nobody_up() -> None:
    calls = 1
    with FakeGroup(2) as group:  # how many there are, about
        seen: list[str] = []
        group.views[1].before = lambda name, key: seen.append(key)
        group.run(all_turns)
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
            for outcome in group.outcomes(all_turns):
                assert outcome in [(True, "all"), (False, "all")] or isinstance(outcome, RankFailed)
            assert time.monotonic() - began < 3


# -- which group -----------------------------------------------------------------------------------


def test_the_group_of_a_process_without_others() -> None:
    assert isinstance(current_group(), LocalGroup)
    assert isinstance(current_group("alone"), LocalGroup)
    with pytest.raises(HoldfastError, match="Invalid value for group="):
        current_group("all")


def test_ranks_that_are_simulated_are_of_their_group_only_in_the_context() -> None:
    with FakeGroup(2) as group:
        with use_group(group.groups[1]):
            assert current_group() is group.groups[1]
            assert isinstance(current_group("alone"), LocalGroup)
        assert isinstance(current_group(), LocalGroup)
        assert group.run(lambda rank: current_group().rank) == [0, 1]
        seen = group.outcomes(lambda rank: 1 // rank)
        assert isinstance(seen[0], ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            group.run(lambda rank: 1 // rank)


def test_one_rank_of_torch_distributed_is_alone_and_a_fake_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(current_group(), LocalGroup)
    finally:
        dist.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore as Fake

    dist.init_process_group("fake", store=Fake(), rank=0, world_size=4)
    try:
        with pytest.raises(Unsupported, match="fake process group"):
            current_group()
    finally:
        dist.destroy_process_group()
