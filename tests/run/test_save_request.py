"""Save requests: the requester, the training, their races, and failing stores."""

import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from limpet import events
from limpet.buffers import shared_pool
from limpet.errors import DeadlinePassed, Denied, Unavailable
from limpet.format.names import SAVE_REQUEST, Version, is_attempt
from limpet.run.run import Run
from limpet.run.save_request import (
    RequestedSave,
    RequestWatcher,
    put_request,
    read_request,
    remove_request,
    request_and_wait,
)
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.storage.memory import MemoryStore
from tests.trainings import leave_from

A, B = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


class FailingStore(MemoryStore):
    """A store that records its calls. While ``error`` is set, each call raises it."""

    def __init__(self):
        super().__init__()
        self.error: BaseException | None = None
        self.calls: list[str] = []
        self.after_get: Callable[[], object] = lambda: None

    def _record_call(self, call):
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def get(self, key, limit):
        self._record_call("get")
        raw = super().get(key, limit)
        self.after_get()
        return raw

    def put_if_absent(self, key, data):
        self._record_call("put_if_absent")
        return super().put_if_absent(key, data)

    def delete(self, key):
        self._record_call("delete")
        super().delete(key)

    def list(self, prefix):
        self._record_call("list")
        return super().list(prefix)


@pytest.fixture
def store():
    return FailingStore()


@pytest.fixture
def emitted():
    seen: list[tuple[str, Any]] = []
    with events.attach(lambda name, fields: seen.append((name, fields))):
        yield seen


def count_unseen(emitted):
    return sum(name == "request_unseen" for name, _ in emitted)


class Trainer:
    """A training that runs a step whenever the requester waits. It is also the clock."""

    def __init__(self, store, *, step=0, branch=0):
        self.run = Run(store)
        self.watcher = RequestWatcher(store)
        self.version = Version(step, branch)
        self.saves = True
        self.now = 0.0
        self.before_step: Callable[[], object] = lambda: None

    def step(self):
        """Run one step, and save if requested, like the Checkpointer."""
        self.version = replace(self.version, step=self.version.step + 1)
        self.watcher.poll()
        if self.watcher.pending_request and self.saves:
            request = self.watcher.accept()
            self.save("request")
            self.watcher.mark(request, True)

    def save(self, reason):
        metadata = VersionMetadata(
            step=self.version.step, branch=self.version.branch, reason=reason
        )
        state = {"x": np.arange(3)}
        finish_save(
            begin_save(
                self.run.location(self.version), state, metadata, shared_pool(), stage_now=False
            )
        )

    def wait(self, seconds):
        self.now += seconds
        self.before_step()
        self.step()

    def request(self, timeout=10):
        return request_and_wait(self.run, timeout, wait=self.wait, clock=lambda: self.now)


def test_a_request_is_answered_by_a_version_and_removed(store):
    trainer = Trainer(store)
    trainer.step()
    assert trainer.request() == RequestedSave(Version(2), joined=False)
    assert read_request(store) is None
    assert trainer.watcher.pending_request is None
    assert trainer.request().version == Version(3)
    trainer.step()
    assert len(trainer.run.listing().versions) == 2  # nothing is saved without a request


@pytest.mark.parametrize("saves_by_cadence", [False, True])
def test_other_versions_do_not_answer(store, saves_by_cadence):
    trainer = Trainer(store)
    trainer.saves = False
    if saves_by_cadence:
        trainer.before_step = lambda: trainer.save("cadence")
    else:
        trainer.save("request")
    with pytest.raises(DeadlinePassed) as e:
        trainer.request(timeout=3)
    assert trainer.now == 3
    assert "Check that a training is running" in str(e.value)
    assert read_request(store) is None


def test_the_requested_version_answers_and_not_a_later_one(store):
    trainer = Trainer(store)
    step = trainer.step

    def several_saves():
        trainer.saves = False
        step()
        trainer.save("cadence")
        trainer.saves = True
        step()
        step()
        trainer.save("cadence")

    trainer.step = several_saves
    assert trainer.request().version == Version(2)


def test_a_lower_step_on_a_new_branch_is_newer(store):
    trainer = Trainer(store)
    for step in (1, 2):
        assert trainer.request().version == Version(step)
    first = trainer.run.open(Version(1))
    branch = leave_from(trainer.run, first, first.version, "on request")
    assert Trainer(store, step=1, branch=branch).request().version == Version(2, branch)


def test_a_second_requester_joins_the_first(store):
    assert put_request(store, A) == A
    assert Trainer(store).request() == RequestedSave(Version(1), joined=True)


def test_a_requester_that_joined_does_not_withdraw_the_request(store):
    put_request(store, A)
    trainer = Trainer(store)
    trainer.saves = False
    with pytest.raises(DeadlinePassed):
        trainer.request(timeout=2)
    assert read_request(store) == A


def test_a_request_that_is_removed_by_hand_is_repeated(store):
    trainer = Trainer(store)
    waits = count()

    def remove_by_hand():
        if next(waits) < 3:
            store.delete(SAVE_REQUEST)

    trainer.before_step = remove_by_hand
    assert trainer.request().version == Version(4)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Denied("x"), ZeroDivisionError()])
def test_any_exception_withdraws_the_request(store, interrupt):
    trainer = Trainer(store)
    trainer.saves = False

    def fail():
        assert read_request(store) is not None
        raise interrupt

    trainer.before_step = fail
    with pytest.raises(type(interrupt)):
        trainer.request()
    assert read_request(store) is None


def test_a_request_written_despite_an_error_is_withdrawn(store):
    class LostReplyStore(FailingStore):
        def put_if_absent(self, key, data):
            super().put_if_absent(key, data)
            raise Unavailable("the reply was lost", outcome="unknown")

    lost = LostReplyStore()
    with pytest.raises(Unavailable):
        request_and_wait(Run(lost), 1)
    assert read_request(lost) is None


def test_a_store_error_during_the_withdrawal_does_not_hide_the_exception(store):
    def wait(seconds):
        store.error = Unavailable("gone")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        request_and_wait(Run(store), 1, wait=wait, clock=lambda: 0)


def test_a_request_answered_while_another_joins_is_repeated(store):
    put_request(store, A)
    seen = count()

    def remove_request_once():
        if next(seen) == 0:
            MemoryStore.delete(store, SAVE_REQUEST)

    def get(key, limit):
        remove_request_once()
        return FailingStore.get(store, key, limit)

    store.get = get
    assert put_request(store, B) == B


@given(st.binary(max_size=300))
def test_any_content_of_the_file_is_a_request(raw):
    store = MemoryStore()
    store.put_if_absent(SAVE_REQUEST, raw)
    found = read_request(store)
    assert found is not None
    assert is_attempt(found)
    remove_request(store, A)
    assert read_request(store) == found
    remove_request(store, found)
    assert read_request(store) is None


def test_an_empty_file_is_a_new_request_each_time(store):
    trainer = Trainer(store)
    for step in (1, 2):
        store.put_if_absent(SAVE_REQUEST, b"")
        trainer.step()
        assert read_request(store) is None
        assert Run(store).listing().versions[-1] == Version(step)


def test_readers_and_sweep_ignore_the_request(store):
    trainer = Trainer(store)
    trainer.request()
    put_request(store, A)
    run = Run(store)
    assert run.latest().verify().ok
    run.sweep(grace=0)
    assert read_request(store) == A


def test_an_accepted_request_is_pending_again_only_after_a_failure(store):
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    assert watcher.accept() == A
    watcher.poll()
    assert watcher.pending_request is None
    assert watcher.accept() is None
    watcher.mark(A, False)
    assert watcher.pending_request is None  # not before the next poll
    watcher.poll()
    assert watcher.accept() == A
    watcher.mark(A, True)
    watcher.poll()
    assert (watcher.pending_request, read_request(store)) == (None, None)


def test_a_request_that_replaced_the_answered_one_is_kept(store):
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    watcher.accept()
    remove_request(store, A)  # the requester withdrew it meanwhile
    put_request(store, B)
    watcher.poll()
    assert watcher.pending_request == B
    watcher.mark(A, True)
    assert read_request(store) == B
    assert watcher.accept() == B


@pytest.mark.parametrize("action", ["accept", "committed", "failed"])
def test_an_outdated_poll_is_ignored(store, action):
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    if action != "accept":
        watcher.accept()

    def act_first():
        store.after_get = lambda: None
        if action == "accept":
            watcher.accept()
        else:
            watcher.mark(A, action == "committed")

    store.after_get = act_first
    watcher.poll()
    assert watcher.pending_request is None


def test_an_outage_is_reported_once_and_raises_nothing(store, emitted):
    watcher = RequestWatcher(store)
    for outage in (1, 2):
        store.error = Unavailable("no answer")
        for _ in range(3):
            watcher.poll()
        assert count_unseen(emitted) == outage
        store.error = None
        watcher.poll()
    assert emitted[0][1] == {"store": store.url, "error": "no answer."}


def test_a_request_that_could_not_be_removed_is_removed_later_without_another_save(store, emitted):
    watcher = RequestWatcher(store)
    put_request(store, A)
    watcher.poll()
    watcher.accept()
    store.error = Denied("read-only now")
    watcher.mark(A, True)
    watcher.poll()
    assert count_unseen(emitted) == 1
    store.error = None
    watcher.poll()
    assert (watcher.pending_request, read_request(store)) == (None, None)
    put_request(store, A)
    watcher.poll()
    assert watcher.pending_request == A


def test_a_file_of_any_length_is_a_request(store):
    store.put_if_absent(SAVE_REQUEST, b"x" * (1 << 20))
    watcher = RequestWatcher(store)
    watcher.poll()
    assert watcher.pending_request is not None
    watcher.mark(watcher.accept(), True)
    assert read_request(store) is None


def test_the_thread_ends_when_a_watcher_that_nobody_closed_is_collected(store):
    """As in a cell of a notebook that creates another Checkpointer each time it runs."""
    waiting, goes_on = threading.Event(), threading.Event()

    def wait(seconds):
        waiting.set()
        return not goes_on.wait(20)

    watcher: RequestWatcher | None = RequestWatcher(store, wait=wait)
    watcher.start()
    (thread,) = [t for t in threading.enumerate() if t.name == "limpet-request"]
    assert waiting.wait(20)
    watcher = None
    goes_on.set()
    thread.join(20)
    assert not thread.is_alive()


def test_training_continues_if_no_thread_can_be_started(store, emitted, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    watcher = RequestWatcher(store)
    watcher.start()
    watcher.close()
    assert count_unseen(emitted) == 1


def test_close_raises_an_unexpected_exception_of_the_thread(store):
    store.error = ZeroDivisionError()
    ended = threading.Event()
    watcher = RequestWatcher(store, wait=ended.wait)
    watcher.start()
    with pytest.raises(ZeroDivisionError):
        watcher.close()
    watcher.close()


def test_a_watcher_is_inactive_in_a_forked_process(store):
    watcher = RequestWatcher(store, interval=3600)
    put_request(store, A)
    watcher.poll()
    watcher.start()
    watcher._lock.acquire()  # the thread may hold the lock during a fork
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a hang fails
        watcher.mark(A, False)
        watcher.mark(A, True)
        is_inactive = watcher.accept() is None
        watcher.close()
        os._exit(0 if is_inactive and MemoryStore.stat(store, SAVE_REQUEST) else 1)
    watcher._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watcher.close()
