"""Requests for a save: both sides, their races, and stores that fail."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from queue import Queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import events
from holdfast.buffers import shared_pool
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.errors import DeadlinePassed, Denied, HoldfastError, Unavailable
from holdfast.format.names import MANIFEST, SAVE_REQUEST, Version, is_attempt
from holdfast.run.run import Run
from holdfast.run.save_request import (
    SIGNAL,
    RequestedSave,
    RequestWatcher,
    put_request,
    read_request,
    remove_request,
    request_and_wait,
)
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Stat

A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


class Shaky(MemoryStore):
    """Raises ``error`` from every small call while it is set; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.asked: list[str] = []
        self.between: Callable[[], object] = lambda: None

    def _meet(self, call: str) -> None:
        self.asked.append(call)
        if self.error is not None:
            raise self.error

    def get(self, key: str, limit: int) -> bytes:
        self._meet("get")
        raw = super().get(key, limit)
        self.between()
        return raw

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        self._meet("put_if_absent")
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._meet("delete")
        super().delete(key)

    def list(self, prefix: str) -> Iterator[Stat]:
        self._meet("list")
        return super().list(prefix)


@pytest.fixture
def store() -> Shaky:
    return Shaky()


@pytest.fixture
def told() -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []
    with events.attach(lambda name, fields: seen.append((name, fields))):
        yield seen


def unseen(told: list[tuple[str, Any]]) -> int:
    return sum(name == "request_unseen" for name, _ in told)


class Trainer:
    """A training that makes a step whenever the one who asks waits; also the clock."""

    def __init__(self, store: MemoryStore, *, step: int = 0, branch: int = 0) -> None:
        self.run = Run(store)
        self.watcher = RequestWatcher(store)
        self.version = Version(step, branch)
        self.saves = True
        self.now = 0.0
        self.before_step: Callable[[], object] = lambda: None

    def step(self) -> None:
        """One step, which saves if that is wanted, as the Checkpointer does it."""
        self.version = replace(self.version, step=self.version.step + 1)
        self.watcher.poll()
        if self.watcher.pending_request and self.saves:
            request = self.watcher.accept()
            self.save("request")
            self.watcher.mark_done(request)

    def save(self, reason: str) -> None:
        label = VersionMetadata(step=self.version.step, branch=self.version.branch, reason=reason)
        state = {"x": np.arange(3)}
        finish_save(
            begin_save(
                self.run.location(self.version), state, label, shared_pool(), stage_now=False
            )
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.before_step()
        self.step()

    def ask(self, timeout: float = 10) -> RequestedSave:
        return request_and_wait(self.run, timeout, wait=self.wait, clock=lambda: self.now)


# -- the one who asks ------------------------------------------------------------------------------


def test_a_request_becomes_a_version_and_is_gone(store: Shaky) -> None:
    trainer = Trainer(store)
    trainer.step()
    assert trainer.ask() == RequestedSave(Version(2), joined=False)
    assert read_request(store) is None
    assert trainer.watcher.pending_request is None
    assert trainer.ask().version == Version(3)
    trainer.step()
    assert len(trainer.run.listing().versions) == 2  # nothing is saved that nobody asked for


def test_versions_that_were_there_are_no_answer(store: Shaky) -> None:
    trainer = Trainer(store)
    trainer.save("request")
    trainer.saves = False
    with pytest.raises(DeadlinePassed) as e:
        trainer.ask(timeout=3)
    assert trainer.now == 3
    assert "found none" in str(e.value)
    assert "Check that a training is running" in str(e.value)
    assert read_request(store) is None


def test_a_version_that_came_for_another_reason_is_told_but_does_not_answer(store: Shaky) -> None:
    trainer = Trainer(store)
    trainer.saves = False
    trainer.before_step = lambda: trainer.save("cadence")
    with pytest.raises(DeadlinePassed, match=r"found version_2, which does not answer"):
        trainer.ask(timeout=3)


def test_the_version_on_request_is_the_answer_and_not_the_cadence_after_it(store: Shaky) -> None:
    trainer = Trainer(store)
    step = trainer.step

    def others() -> None:
        trainer.saves = False
        step()
        trainer.save("cadence")
        trainer.saves = True
        step()
        step()
        trainer.save("cadence")

    trainer.step = others  # type: ignore[method-assign]
    assert trainer.ask().version == Version(2)


def test_without_a_reason_the_newest_that_can_be_read_is_the_answer(store: Shaky) -> None:
    trainer = Trainer(store)

    def others() -> None:
        for _ in range(3):
            trainer.save("cadence")
            trainer.step()
        damaged = trainer.run.location(Version(2)).key(MANIFEST)
        store.delete(damaged)
        store.put_if_absent(damaged, b"{}")
        store.delete(SAVE_REQUEST)

    trainer.saves = False
    answer = request_and_wait(trainer.run, 10, wait=lambda _: others(), clock=lambda: 0)
    assert answer.version == Version(1)


def test_on_a_new_branch_a_lower_step_is_newer(store: Shaky) -> None:
    trainer = Trainer(store)
    for step in (1, 2):
        assert trainer.ask().version == Version(step)
    first = trainer.run.open(Version(1))
    branch = trainer.run.leave_from(first, first.version, "on request")
    assert Trainer(store, step=1, branch=branch).ask().version == Version(2, branch)


def test_a_second_one_joins_the_first(store: Shaky) -> None:
    assert put_request(store, A) == A
    trainer = Trainer(store)
    assert trainer.ask() == RequestedSave(Version(1), joined=True)


def test_one_who_joins_takes_nothing_back(store: Shaky) -> None:
    put_request(store, A)
    trainer = Trainer(store)
    trainer.saves = False
    with pytest.raises(DeadlinePassed):
        trainer.ask(timeout=2)
    assert read_request(store) == A


def test_one_who_joined_too_late_asks_again(store: Shaky) -> None:
    """The request that was joined is removed when its version had been counted already."""
    put_request(store, A)
    trainer = Trainer(store)
    trainer.watcher.poll()
    trainer.watcher.accept()
    trainer.save("request")
    trainer.before_step = lambda: trainer.watcher.mark_done(A)
    answer = trainer.ask()
    assert answer == RequestedSave(Version(2), joined=False)
    assert trainer.now == 2


def test_a_request_that_is_removed_by_hand_is_made_again(store: Shaky) -> None:
    trainer = Trainer(store)
    waits = count()

    def by_hand() -> None:
        if next(waits) < 3:
            store.delete(SAVE_REQUEST)

    trainer.before_step = by_hand
    assert trainer.ask().version == Version(4)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Denied("x"), ZeroDivisionError()])
def test_whatever_ends_it_takes_the_request_back(store: Shaky, interrupt: BaseException) -> None:
    trainer = Trainer(store)
    trainer.saves = False

    def fail() -> None:
        assert read_request(store) is not None
        raise interrupt

    trainer.before_step = fail
    with pytest.raises(type(interrupt)):
        trainer.ask()
    assert read_request(store) is None


def test_a_put_that_failed_but_happened_is_taken_back(store: Shaky) -> None:
    class Lost(Shaky):
        def put_if_absent(self, key: str, data: bytes) -> Stat:
            super().put_if_absent(key, data)
            raise Unavailable("the reply was lost", outcome="unknown")

    lost = Lost()
    with pytest.raises(Unavailable):
        request_and_wait(Run(lost), 1)
    assert read_request(lost) is None


def test_a_store_that_fails_on_the_way_out_hides_nothing(store: Shaky) -> None:
    def wait(seconds: float) -> None:
        store.error = Unavailable("gone")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        request_and_wait(Run(store), 1, wait=wait, clock=lambda: 0)


def test_a_folder_that_may_not_be_written_is_said_at_once(store: Shaky) -> None:
    class ReadOnly(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> Stat:
            raise Denied("read-only")

    with pytest.raises(Denied):
        request_and_wait(Run(ReadOnly()), 1)


def test_answered_at_the_moment_of_joining(store: Shaky) -> None:
    put_request(store, A)
    seen = count()

    def vanish() -> None:
        if next(seen) == 0:
            MemoryStore.delete(store, SAVE_REQUEST)

    def get(key: str, limit: int) -> bytes:
        vanish()
        return Shaky.get(store, key, limit)

    store.get = get  # type: ignore[method-assign]
    assert put_request(store, B) == B


# -- the file --------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_whatever_is_in_the_file_is_a_request(raw: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent(SAVE_REQUEST, raw)
    found = read_request(store)
    assert found is not None
    assert is_attempt(found)
    remove_request(store, A)
    assert read_request(store) == found
    remove_request(store, found)
    assert read_request(store) is None


def test_a_file_whose_id_is_no_id_is_a_request(store: Shaky) -> None:
    put_request(store, "../../etc/passwd")
    assert is_attempt(read_request(store) or "")


def test_one_bit_flipped_is_another_request(store: Shaky) -> None:
    put_request(store, A)
    raw = store.get(SAVE_REQUEST, 1 << 16)
    for at in range(len(raw)):
        other = MemoryStore()
        other.put_if_absent(SAVE_REQUEST, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert read_request(other) not in (None, A)


def test_an_empty_file_asks_each_time_it_is_made(store: Shaky) -> None:
    trainer = Trainer(store)
    for step in (1, 2):
        store.put_if_absent(SAVE_REQUEST, b"")
        trainer.step()
        assert read_request(store) is None
        assert Run(store).listing().versions[-1] == Version(step)


def test_readers_pass_it_over(store: Shaky) -> None:
    trainer = Trainer(store)
    trainer.ask()
    put_request(store, A)
    run = Run(store)
    latest = run.latest()
    assert latest is not None
    assert latest.verify().ok
    run.sweep(grace=0)
    assert read_request(store) == A


# -- the training ----------------------------------------------------------------------------------


def test_a_look_is_one_get(store: Shaky) -> None:
    watcher = RequestWatcher(store)
    watcher.poll()
    put_request(store, A)
    store.asked.clear()
    watcher.poll()
    assert watcher.pending_request == A
    assert store.asked == ["get"]


def test_what_is_taken_is_wanted_no_more_until_the_save_failed(store: Shaky) -> None:
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    assert watcher.accept() == A
    watcher.poll()
    assert watcher.pending_request is None
    assert watcher.accept() is None
    watcher.mark_failed(A)
    assert watcher.pending_request is None  # the training has the time of a look to go on
    watcher.poll()
    assert watcher.accept() == A
    watcher.mark_done(A)
    watcher.poll()
    assert (watcher.pending_request, read_request(store)) == (None, None)


def test_a_request_that_took_the_place_of_the_answered_one_stays(store: Shaky) -> None:
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    watcher.accept()
    remove_request(store, A)  # the one who asked gave up meanwhile
    put_request(store, B)
    watcher.poll()
    assert watcher.pending_request == B
    watcher.mark_done(A)
    assert read_request(store) == B
    assert watcher.accept() == B


def test_one_that_was_taken_back_is_wanted_no_more(store: Shaky) -> None:
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    remove_request(store, A)
    watcher.poll()
    assert watcher.pending_request is None
    watcher.mark_done(None)
    watcher.mark_failed(None)
    watcher.mark_done(A)


@pytest.mark.parametrize("answer", ["accept", "mark_done", "mark_failed"])
def test_a_look_that_was_overtaken_counts_not(store: Shaky, answer: str) -> None:
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    if answer != "accept":
        watcher.accept()

    def overtake() -> None:
        store.between = lambda: None
        if answer == "accept":
            watcher.accept()
        else:
            getattr(watcher, answer)(A)

    store.between = overtake
    watcher.poll()
    assert watcher.pending_request is None


def test_an_outage_is_told_once_and_raises_nothing(
    store: Shaky, told: list[tuple[str, Any]]
) -> None:
    watcher = RequestWatcher(store)
    for outage in (1, 2):
        store.error = Unavailable("no answer")
        for _ in range(3):
            watcher.poll()
        assert unseen(told) == outage
        store.error = None
        watcher.poll()
    assert told[0][1] == {"store": store.url, "error": "no answer."}


def test_an_outage_at_the_removal_makes_up_for_it_without_another_save(
    store: Shaky, told: list[tuple[str, Any]]
) -> None:
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    watcher.accept()
    store.error = Denied("read-only now")
    watcher.mark_done(A)
    watcher.poll()
    assert unseen(told) == 1
    store.error = None
    watcher.poll()
    assert (watcher.pending_request, read_request(store)) == (None, None)
    put_request(store, A)
    watcher.poll()
    assert watcher.pending_request == A


def test_one_answered_in_an_outage_and_removed_by_hand_may_be_asked_again(store: Shaky) -> None:
    watcher = RequestWatcher(store)
    store.put_if_absent(SAVE_REQUEST, b"")
    watcher.poll()
    request = watcher.accept()
    store.error = Unavailable("x")
    watcher.mark_done(request)
    store.error = None
    store.delete(SAVE_REQUEST)
    watcher.poll()
    store.put_if_absent(SAVE_REQUEST, b"")
    watcher.mark_failed(request)
    watcher.poll()
    assert watcher.pending_request == request


def test_a_file_that_is_too_long_is_told(store: Shaky, told: list[tuple[str, Any]]) -> None:
    store.put_if_absent(SAVE_REQUEST, b"x" * (1 << 20))
    watcher = RequestWatcher(store)
    watcher.poll()
    assert unseen(told) == 1
    assert watcher.pending_request is None


# -- its thread ------------------------------------------------------------------------------------


class Ticks:
    """The waiting of a watcher's thread: it looks once for each ``tick()``."""

    def __init__(self) -> None:
        self._go: Queue[bool] = Queue()
        self._waiting: Queue[float] = Queue()

    def wait(self, seconds: float) -> bool:
        self._waiting.put(seconds)
        return self._go.get(timeout=20)

    def tick(self) -> None:
        self._waiting.get(timeout=20)
        self._go.put(False)

    def end(self) -> float:
        seconds = self._waiting.get(timeout=20)
        self._go.put(True)
        return seconds


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name == "holdfast-request"}


def test_the_thread_looks_at_once_and_then_at_intervals(store: Shaky) -> None:
    ticks = Ticks()
    watcher = RequestWatcher(store, interval=7.5, wait=ticks.wait)
    put_request(store, A)
    store.asked.clear()
    watcher.start()
    ticks.tick()
    ticks.tick()
    assert ticks.end() == 7.5
    watcher.close()
    assert store.asked == ["get"] * 3
    assert watcher.pending_request == A
    assert not threads()


def test_close_ends_the_real_wait_and_can_be_called_twice(store: Shaky) -> None:
    watcher = RequestWatcher(store, interval=3600)
    watcher.close()
    watcher.start()
    assert all(t.daemon for t in threading.enumerate() if t.name in threads())
    watcher.close()
    watcher.close()
    assert not threads()


def test_where_no_thread_can_be_started_training_goes_on(
    store: Shaky, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    watcher = RequestWatcher(store)
    watcher.start()
    watcher.close()
    assert unseen(told) == 1


def test_a_bug_on_the_thread_is_raised_by_close(store: Shaky) -> None:
    store.error = ZeroDivisionError()
    ended = threading.Event()
    watcher = RequestWatcher(store, wait=ended.wait)
    watcher.start()
    with pytest.raises(ZeroDivisionError):
        watcher.close()
    watcher.close()


def test_in_a_forked_process_it_does_nothing(store: Shaky) -> None:
    watcher = RequestWatcher(store, interval=3600)
    put_request(store, A)
    watcher.poll()
    watcher.start()
    watcher._lock.acquire()  # as the thread may hold it at that moment
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # what hangs fails
        watcher.mark_failed(A)
        watcher.mark_done(A)
        good = watcher.accept() is None
        watcher.close()
        os._exit(0 if good and MemoryStore.stat(store, SAVE_REQUEST) else 1)
    watcher._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watcher.close()


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """The signals that the handler of before has got."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_asks_once_and_is_passed_on(store: Shaky, previous: list[int]) -> None:
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert previous == [signal.SIGUSR1]
    watcher.poll()  # there is no file; the signal counts all the same
    assert watcher.pending_request == SIGNAL
    assert watcher.accept() == SIGNAL
    assert watcher.pending_request is None
    watcher.mark_failed(SIGNAL)
    watcher.mark_done(SIGNAL)
    watcher.poll()
    assert watcher.pending_request is None
    assert "delete" not in store.asked


def test_a_signal_and_a_file_are_answered_by_one_save(store: Shaky, previous: list[int]) -> None:
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    put_request(store, A)
    signal.raise_signal(signal.SIGUSR1)
    watcher.poll()
    assert watcher.accept() == A
    watcher.mark_done(A)
    assert watcher.pending_request is None
    watcher.close()


def test_close_gives_the_signal_back(store: Shaky, previous: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    watcher.install_signal_handler(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is not before
    watcher.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_close_leaves_a_handler_that_came_later(store: Shaky, previous: list[int]) -> None:
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    later = signal.getsignal(signal.SIGUSR1)

    def outer(number: int, frame: Any) -> None:
        assert callable(later)
        later(number, frame)

    signal.signal(signal.SIGUSR1, outer)
    watcher.close()
    assert signal.getsignal(signal.SIGUSR1) is outer
    signal.raise_signal(signal.SIGUSR1)
    assert previous == [signal.SIGUSR1]


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_default_action_is_not_chained(store: Shaky, previous: list[int], before: Any) -> None:
    signal.signal(signal.SIGUSR1, before)
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)  # by default it would end this process
    assert watcher.pending_request == SIGNAL
    watcher.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_only_the_main_thread_can_set_it(store: Shaky, previous: list[int]) -> None:
    watcher = RequestWatcher(store)
    raised: list[BaseException] = []

    def elsewhere() -> None:
        try:
            watcher.install_signal_handler(signal.SIGUSR1)
        except HoldfastError as e:
            raised.append(e)

    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "Call save_on_signal from the main thread" in str(raised[0])
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, -1, 0, 999, "USR1", None, 1.5])
def test_what_is_no_signal_that_can_be_handled(store: Shaky, number: Any) -> None:
    watcher = RequestWatcher(store)
    with pytest.raises(
        HoldfastError, match=r"No handler could be installed .*such as signal\.SIGUSR1"
    ):
        watcher.install_signal_handler(number)
    watcher.close()


def test_close_from_another_thread_leaves_the_signal_and_no_error(
    store: Shaky, previous: list[int]
) -> None:
    watcher = RequestWatcher(store)
    watcher.install_signal_handler(signal.SIGUSR1)
    thread = threading.Thread(target=watcher.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert previous == [signal.SIGUSR1]
