"""Notices in one process: what is saved, how the training leaves, and what a restart finds.

The numbers in the docstrings are those of BEHAVIOURS.md, section A: what TensorFlow's
``PreemptionCheckpointHandler`` does.
"""

import os
import random
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from copy import copy

import pytest

from limpet import Preemption
from limpet.errors import LimpetError, NoSpace, Preempted, Unavailable
from limpet.loading.snapshot import reader_of
from limpet.notices.exit_status import forget_done, read_records
from limpet.notices.notice import Notice
from limpet.notices.signals import SignalNotice
from limpet.ranks.agreement import RoundDeadline
from limpet.run.policy import AtEnd, Continuously, EverySteps, Never, OnException, OnPreemption
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training import response, step_savepoint
from limpet.training.checkpointer import Checkpointer
from limpet.training.guard import PreemptionGuard
from tests.notices.announced import Announced
from tests.notices.metadata_servers import GcpServer
from tests.trainings import initial_state, state_after, states_equal, train_step
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until, wait_until_no_thread

EVERY_STEP = 0.002
"""Seconds that a step of these trainings takes."""


class Training:
    """A training that gets notices from ``source``."""

    def __init__(self, store, save=None, **settings):
        self.source = Announced()
        self.state = initial_state()
        preemption = Preemption(**{"notices": [self.source], **settings})
        save = EverySteps(10**9) if save is None else save
        self.ckpt = Checkpointer(store, self.state, save=save, preemption=preemption)

    @property
    def step(self):
        return self.ckpt.current_step

    def train(self, last_step, at=None):
        """Train until ``last_step``. ``at``: what to call after a step."""
        while self.step < last_step and not self.ckpt.should_stop:
            self.ckpt.step({"loss": train_step(self.state)})
            if at is not None and self.step in at:
                at[self.step]()
            time.sleep(EVERY_STEP)


def reasons(store):
    return [s.metadata["reason"] for s in Run(store).snapshots()]


def leave(training, last_step=10_000, **at):
    with pytest.raises(SystemExit) as left, training.ckpt:
        training.ckpt.resume()
        training.train(last_step, **at)
    assert isinstance(left.value, Preempted)
    return left.value


_earlier_threads: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _know_earlier_threads():
    """A test of a save that hangs leaves a timer, which ends at its deadline."""
    _earlier_threads.clear()
    _earlier_threads.update(threading.enumerate())


def no_threads():
    wait_until_no_thread("limpet", earlier=_earlier_threads)
    return True


def hooked(before):
    store = HookedStore(MemoryStore())
    store.before = before
    return store


@pytest.fixture(autouse=True)
def the_process_is_not_ended(monkeypatch):
    """Record the ends of the process instead of ending pytest."""
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append((code, why)))
    return ends


@pytest.mark.parametrize("grace", [None, 0])
def test_a_notice_saves_once_and_raises_system_exit(grace):
    """3, 10, 26, 39"""
    store = MemoryStore()
    training = Training(store, grace=grace)
    left = leave(training, at={5: training.source.announce})
    assert left.code == 75
    assert left.step == left.saved_step == training.step
    (snapshot,) = Run(store).snapshots()
    assert snapshot.step == training.step
    assert snapshot.metadata["reason"] == "preemption"
    assert no_threads()


@pytest.mark.slow
def test_a_grace_period_saves_twice_and_trains_in_between():
    """4, 5, 6"""
    store = MemoryStore()
    training = Training(store, grace=4)
    began = time.monotonic()
    left = leave(training, at={5: training.source.announce})
    assert left.code == 75
    assert time.monotonic() - began < 4
    first, second = Run(store).snapshots()
    assert second.step - first.step > 10
    assert left.step == second.step
    assert reasons(store) == ["preemption"] * 2


def test_the_same_process_can_resume_after_the_exit_and_finish():
    """2, 7, 11: no step is lost or repeated."""
    store = MemoryStore()
    step = 0
    for seed in range(4):
        training = Training(store)
        chosen = step + random.Random(seed).randint(1, 30)
        left = leave(training, at={chosen: training.source.announce})
        assert left.code == 75
        step = left.step
    training = Training(store, AtEnd())
    with training.ckpt:
        training.ckpt.resume()
        training.train(step + 20)
    assert states_equal(training.state, state_after(step + 20))
    assert Run(store).line()[-1].step == step + 20


def test_a_training_that_ends_first_does_not_leave():
    """14"""
    store = MemoryStore()
    training = Training(store, AtEnd(), grace=600)
    with training.ckpt:
        training.ckpt.resume()
        training.train(20, at={18: training.source.announce})
    assert Run(store).line()[-1].step == 20
    assert reasons(store)[-1] in ("end", "preemption")  # the first save may be at the last step
    assert no_threads()


def test_a_notice_before_the_first_step_saves_one_of_the_first_two():
    store = MemoryStore()
    training = Training(store)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.ckpt.resume()
        training.source.announce()
        wait_until(lambda: training.ckpt._preemption._deadline is not None)
        training.train(100)
    assert left.value.step <= 2
    assert [s.step for s in Run(store).snapshots()] == [left.value.step]


def test_a_notice_of_a_risk_before_the_first_step_saves_and_goes_on():
    """A source reports a risk only once."""
    store = MemoryStore()
    training = Training(store)
    with training.ckpt:
        training.ckpt.resume()
        training.ckpt._preemption.on_notice(Notice("a test", None, stops=False))
        training.train(50)
    snapshots = Run(store).snapshots()
    assert snapshots[0].step <= 2


def test_a_training_leaves_in_time_for_a_notice_of_a_rank_that_has_died_since():
    """D: that rank would have proposed to leave when the grace period is nearly over."""
    store = MemoryStore()
    training = Training(store, grace=10)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.train(3)
        answer = training.ckpt._preemption
        answer._exit_seconds = lambda: 9.7
        answer.on_deadline(RoundDeadline(time.monotonic() + 10, "a notice of rank 1"))
        training.train(3000)
    assert (left.value.code, left.value.step) == (75, left.value.saved_step)
    assert "because of a notice of rank 1" in left.value.reason


def test_a_later_notice_never_gives_more_time():
    """32: the process will be stopped at the earlier time all the same."""
    training = Training(MemoryStore(), grace=3600)
    with training.ckpt:
        training.train(3)
        answer, left = training.ckpt._preemption, list[float]()
        for seconds in (600.0, 7200.0, 300.0, 400.0):
            answer.on_notice(Notice("a test", seconds))
            assert answer._deadline is not None
            left.append(answer._deadline.at - time.monotonic())
        answer.on_deadline(RoundDeadline(time.monotonic() + 500, "a notice of rank 1"))
        left.append(answer._deadline.at - time.monotonic())
    assert left == pytest.approx([600, 600, 300, 300, 300], abs=30)


@pytest.mark.parametrize(
    "save", [EverySteps(7), OnException(), AtEnd(), OnPreemption(), Continuously(3600), None]
)
@pytest.mark.parametrize("block", [True, False])
def test_any_policy_saves_when_preempted(save, block):
    if not block and save is not None and save.on_exception:
        return
    store = MemoryStore()
    training = Training(store, save)
    if block:
        left = leave(training, at={5: training.source.announce})
    else:
        try:
            with pytest.raises(Preempted) as raised:
                training.train(10**6, at={5: training.source.announce})
            left = raised.value
        finally:
            training.ckpt.close()
    assert left.code == 75
    assert Run(store).line()[-1].step == left.step
    assert no_threads()


@pytest.mark.filterwarnings("error")
def test_on_preemption_saves_at_a_preemption_or_on_request_only():
    store = MemoryStore()
    training = Training(store, OnPreemption())
    with training.ckpt:
        training.train(20)
    assert Run(store).snapshots() == []
    training = Training(store, OnPreemption())
    left = leave(training, at={25: training.source.announce})
    assert left.code == 75
    assert reasons(store) == ["preemption"]
    training = Training(store, OnPreemption())
    with training.ckpt:
        training.ckpt.resume()
        assert training.step == left.step
        training.train(left.step + 5)
        training.ckpt.save()
        training.train(left.step + 10)
    assert reasons(store) == ["preemption", "request"]
    training = Training(store, OnPreemption())
    with pytest.raises(ZeroDivisionError), training.ckpt:
        training.ckpt.resume()
        training.train(left.step + 8)
        raise ZeroDivisionError
    assert reasons(store) == ["preemption", "request"]


def test_never_saves_nothing_and_says_so(capsys):
    store = MemoryStore()
    training = Training(store, Never())
    left = leave(training, at={5: training.source.announce})
    assert left.code == 76
    assert left.saved_step is None
    assert Run(store).snapshots() == []
    assert "; nothing is saved" in capsys.readouterr().err


def test_preemption_can_be_turned_off():
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(MemoryStore(), initial_state(), preemption=None) as ckpt:
        ckpt.step()
        assert signal.getsignal(signal.SIGTERM) == before
        assert not [t for t in threading.enumerate() if t.name == "limpet-notices"]
    with pytest.raises(LimpetError, match="preemption= must be"):
        Checkpointer(MemoryStore(), initial_state(), preemption=True)


@pytest.mark.parametrize("stops", [True, False])
def test_nothing_is_saved_in_a_signal_handler(stops):
    """C4: the signal comes in the middle of a step, when the state is that of no step. While the
    handler runs, and until the step ends, nothing is written. The end of the step saves."""
    written: list[tuple[str, str]] = []
    store = hooked(lambda method, key: written.append((method, key)) if "put" in method else None)
    state = initial_state()
    preemption = Preemption(notices=[SignalNotice(signal.SIGUSR1, stops=stops)])
    before = signal.getsignal(signal.SIGUSR1)
    ckpt = Checkpointer(store, state, save=EverySteps(10**9), preemption=preemption)
    with suppress(Preempted), ckpt:
        ckpt.resume()
        for _ in range(3):
            ckpt.step({"loss": train_step(state)})
        written.clear()
        state["weights"] += 1  # the first half of a step
        signal.raise_signal(signal.SIGUSR1)  # returns when the handler has returned
        assert written == []
        wait_until(lambda: ckpt._preemption.agreement._proposals.qsize() > 0)
        assert written == []
        state["weights"] -= 1
        ckpt.step({"loss": train_step(state)})
    assert signal.getsignal(signal.SIGUSR1) == before
    (snapshot,) = Run(store.inner).snapshots()
    assert snapshot.step == 4
    assert snapshot["weights"][:].tobytes() == state_after(4)["weights"].tobytes()


@pytest.mark.parametrize("source", ["platform", "SIGTERM"])
def test_without_settings_the_notices_of_the_platform_and_sigterm_count(source, monkeypatch):
    """18, 38: nothing but the environment says that the training runs on Google Cloud."""
    store, state = MemoryStore(), initial_state()
    with GcpServer() as server:
        if source == "platform":
            server.announce()
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        with (
            pytest.raises(Preempted) as left,
            Checkpointer(store, state, save=EverySteps(10**9)) as ckpt,
        ):
            while ckpt.current_step < 3000:
                ckpt.step({"loss": train_step(state)})
                time.sleep(EVERY_STEP)
                if ckpt.current_step == 5:
                    server.announce() if source == "platform" else signal.raise_signal(
                        signal.SIGTERM
                    )
    assert (left.value.code, left.value.saved_step) == (75, left.value.step)
    assert ("SIGTERM" in left.value.reason) == (source == "SIGTERM")
    assert no_threads()


def test_the_last_save_follows_the_one_in_flight():
    """D: the version of the last step names the one before as its parent, so it waits for it."""
    begun = threading.Event()

    def slow(method, key):
        if (method, key) == ("put_if_absent", "version_5/manifest.json"):
            begun.set()
            time.sleep(0.3)

    store = hooked(slow)
    training = Training(store, EverySteps(5))
    with pytest.raises(Preempted), training.ckpt:
        training.train(5)
        assert begun.wait(10)
        training.source.announce()
        wait_until(lambda: training.ckpt._preemption.agreement._proposals.qsize() > 0)
        training.train(100)
    first, last = Run(store.inner).snapshots()
    assert (first.step, last.step) == (5, 6)
    assert reader_of(last).manifest.parent is not None
    assert reader_of(last).manifest.parent.version == "version_5"


def test_a_training_announces_itself_to_limpet_run(tmp_path, monkeypatch):
    """C4: otherwise, a worker that is killed before it has said anything would not be missed."""
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))
    training = Training(MemoryStore())
    with training.ckpt:
        training.ckpt.resume()
        (record,) = read_records(str(tmp_path))
        assert (record.pid, record.status, record.left) == (os.getpid(), None, None)
    forget_done()


def test_an_exit_function_that_returns_lets_the_training_end_itself():
    """34"""
    store, calls = MemoryStore(), list[int]()
    training = Training(store, AtEnd(), exit_fn=lambda: calls.append(1))
    with training.ckpt:
        training.train(10_000, at={5: training.source.announce})
        assert training.ckpt.should_stop
        stopped_at = training.step
        training.source.announce()  # ignored from now on
        training.ckpt.step({"loss": train_step(training.state)})
    assert calls == [1]
    assert [s.step for s in Run(store).snapshots()] == [stopped_at, stopped_at + 1]
    assert no_threads()


def test_an_exit_function_may_exit_with_its_own_code():
    """33"""
    training = Training(MemoryStore(), exit_fn=lambda: sys.exit(42))
    with pytest.raises(SystemExit) as left, training.ckpt:
        training.train(10_000, at={5: training.source.announce})
    assert left.value.code == 42
    assert Run(training.ckpt.run.store).line()[-1].step == training.step


def test_a_save_function_replaces_the_save():
    """17"""
    store, calls = MemoryStore(), list[int]()
    training = Training(store, save_fn=lambda: calls.append(training.step))
    left = leave(training, at={5: training.source.announce})
    assert left.code == 75
    assert calls == [left.step]
    assert Run(store).snapshots() == []


@pytest.mark.parametrize("is_left_by_function", [False, True])
@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError(), OSError("disk"), TimeoutError(), LimpetError("no"), NoSpace("full")],
    ids=lambda e: type(e).__name__,
)
def test_an_error_of_a_save_function_is_raised(error, is_left_by_function):
    def save():
        raise error

    exits = list[int]()
    options = {"exit_fn": lambda: exits.append(1)} if is_left_by_function else {}
    training = Training(MemoryStore(), save_fn=save, **options)
    with pytest.raises(type(error)) as raised, training.ckpt:
        training.train(10_000, at={5: training.source.announce})
    assert raised.value is error
    assert exits == []
    assert no_threads()


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_save_function_may_save_by_the_checkpointer(is_guarded):
    store, saved = MemoryStore(), list[int]()

    def save():
        saved.append(training.ckpt.save({"val": 0.5}).step)
        assert training.ckpt.wait().step == saved[-1]
        for call in ("step", "close", "resume", "end_epoch"):
            with pytest.raises(LimpetError, match=r"was called while save_fn\(\)"):
                getattr(training.ckpt, call)()

    training = Training(store, EverySteps(3), save_fn=save)
    if is_guarded:
        run, step = PreemptionGuard(training.ckpt).run, training.ckpt.step
        training.ckpt.step = lambda metrics=None: run(step, metrics)
    left = leave(training, at={5: training.source.announce})
    assert (left.code, left.step, left.saved_step) == (75, *saved, *saved)
    assert Run(store).latest().metrics["val"] == 0.5
    restarted = Training(store)
    with restarted.ckpt:
        assert restarted.ckpt.resume().step == left.step
        assert states_equal(restarted.state, state_after(left.step))
    assert no_threads()


def test_a_save_by_the_checkpointer_that_fails_in_a_save_function_is_raised():
    def fail(method, key):
        if method == "put":
            raise NoSpace("The disk is full")

    training = Training(hooked(fail), save_fn=lambda: training.ckpt.save({}))
    with pytest.raises(NoSpace), training.ckpt:
        training.train(10_000, at={5: training.source.announce})


def test_a_save_that_fails_leaves_with_76_in_time(capsys):
    def fail(method, key):
        if method == "put":
            raise NoSpace("The disk is full")

    training = Training(hooked(fail))
    left = leave(training, at={5: training.source.announce})
    assert left.code == 76
    assert left.saved_step is None
    assert "The disk is full" in capsys.readouterr().err
    assert no_threads()


def test_an_earlier_save_that_failed_does_not_prevent_the_last_one():
    failures = [NoSpace("The disk is full")]

    def fail(method, key):
        if method == "put" and failures:
            raise failures.pop()

    store = hooked(fail)
    training = Training(store, EverySteps(5))
    announced = training.source.announce
    with pytest.raises(Preempted) as left, training.ckpt, warnings.catch_warnings():
        while training.step < 5:
            training.ckpt.step({"loss": train_step(training.state)})
        announced()
        wait_until(training.ckpt._preemption.agreement._proposals.qsize)
        training.train(100)
    assert left.value.code == 75
    assert [s.step for s in Run(store.inner).snapshots()] == [left.value.step]


@pytest.mark.slow
def test_a_store_that_hangs_does_not_keep_the_training(the_process_is_not_ended):
    """The save cannot end, so the timer ends the process before the deadline."""
    released = threading.Event()

    def hang(method, key):
        if method == "put":
            released.wait(60)

    training = Training(hooked(hang))
    began = time.monotonic()
    left = leave(training, at={5: lambda: training.source.announce(0.0)})  # in the past: 5 s left
    assert left.code == 76
    assert time.monotonic() - began < 5
    wait_until(lambda: the_process_is_not_ended, began + 6 - time.monotonic())
    ((code, why),) = the_process_is_not_ended
    assert code == 76
    assert "this process ends now, before it is killed" in why
    released.set()
    with pytest.raises(Unavailable, match="The time is over for the exit after a test"):
        training.ckpt._saver.pending.wait()


class LimitedStore(MemoryStore):
    """Records the time that each deletion of the writer lock has."""

    def __init__(self, deadline=None):
        super().__init__()
        self.deadline, self.seconds = deadline, list[float]()

    def within(self, deadline):
        view = copy(self)
        view.deadline = deadline
        return view

    def delete(self, key):
        if key == "writer.json":
            assert self.deadline is not None, "it may wait for as long as the store does"
            self.seconds.append(self.deadline.seconds_left)
        super().delete(key)


def test_the_writer_lock_is_released_in_the_time_that_is_left():
    """A store that does not answer after the last save would keep the process until it is killed.
    After an exit function has returned, nobody kills it."""
    store = LimitedStore()
    leave(training := Training(store), at={5: lambda: training.source.announce(20.0)})
    assert 0 < store.seconds.pop() <= 1
    with Training(store).ckpt as ckpt:
        ckpt.resume()
        ckpt.step({})
    assert 5 < store.seconds.pop() <= 10
    training = Training(store, exit_fn=lambda: None)
    with training.ckpt:
        training.ckpt.resume()
        training.train(10_000, at={12: lambda: training.source.announce(20.0)})
    assert 5 < store.seconds.pop() <= 10


@pytest.mark.slow
def test_a_step_that_takes_too_long_ends_the_process_in_time(the_process_is_not_ended, monkeypatch):
    """The state was too expensive to be captured after its last step."""
    monkeypatch.setattr(step_savepoint, "SHARE", 0.0)
    training = Training(MemoryStore())
    began = time.monotonic()
    with training.ckpt:
        training.train(3)
        training.source.announce(1.0)
        wait_until(lambda: the_process_is_not_ended, began + 10 - time.monotonic())
    ((code, why),) = the_process_is_not_ended
    assert code == 76
    assert "Its last step is 3, and nothing is saved" in why


def test_measured_times_leave_room_for_the_last_save_and_survive_a_restart():
    """The deadline budget: a step takes 20 ms here, and a save 0.3 s."""

    def slow(method, key):
        if method == "put_if_absent" and "manifest" in key:
            time.sleep(0.3)

    store = hooked(slow)
    training = Training(store, EverySteps(5), grace=4)
    with training.ckpt:
        for _ in range(12):
            training.ckpt.step({"loss": train_step(training.state)})
            time.sleep(0.02)
    step, save = training.ckpt._goodput.usual_seconds
    assert 0.02 <= step < 0.2
    assert 0.3 <= save < 1
    resumed = Training(store.inner, grace=4)
    with resumed.ckpt:
        resumed.ckpt.resume()
        assert resumed.ckpt._goodput.usual_seconds == pytest.approx((step, save), rel=0.5)
        assert 0.5 + 2 * step + 1.25 * save < resumed.ckpt._preemption._exit_seconds() < 4
