"""The end of a training: whether the last step is saved, and which warning names lost steps."""

import gc
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import closing, suppress
from pathlib import Path

import pytest

from limpet import events
from limpet.errors import LimpetError, NoSpace, SaveFailed, StoreError, UnsavedSteps
from limpet.run.policy import (
    AtEnd,
    AtSteps,
    Continuously,
    EveryEpoch,
    EverySeconds,
    EverySteps,
    Never,
    OnException,
    OnPreemption,
    SavePolicy,
)
from limpet.run.run import Run
from limpet.run.save_request import put_request
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import initial_state, state_after, states_equal, train, training

pytestmark = pytest.mark.filterwarnings("error")


def saved(store):
    """Return the step and the reason of each version."""
    return [(s.step or 0, s.metadata["reason"]) for s in Run(store).snapshots()]


class FailingStore(MemoryStore):
    """A store whose next writes of shards raise the ``errors``, and which waits for ``open``."""

    def __init__(self):
        super().__init__()
        self.errors: list[BaseException] = []
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def put(self, key, length):
        self.reached.set()
        assert self.open.wait(20)
        if self.errors:
            raise self.errors.pop(0)
        return super().put(key, length)


def no_space():
    return NoSpace("Cannot write: No space left on device")


def test_the_default_saves_the_last_step():
    """25 steps end long before the ten minutes of the default are over."""
    store = MemoryStore()
    with Checkpointer(store, state := initial_state()) as ckpt:
        train(state, ckpt, 25)
    assert saved(store) == [(25, "end")]
    resumed = initial_state()
    with Checkpointer(store, resumed) as ckpt:
        assert ckpt.resume() is not None
    assert states_equal(resumed, state_after(25))
    assert saved(store) == [(25, "end")]  # a training that only resumes saves nothing


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (AtEnd(), [(7, "end")]),
        (EverySteps(5) | AtEnd(), [(5, "cadence"), (7, "end")]),
        (AtEnd() | EverySteps(5) | EverySeconds(600), [(5, "cadence"), (7, "end")]),
        (EverySteps(7) | AtEnd(), [(7, "cadence")]),
        (OnException() | AtEnd(), [(7, "end")]),
    ],
)
def test_at_end_combines_with_other_policies(policy, expected):
    store = MemoryStore()
    with training(store, policy) as (state, ckpt):
        train(state, ckpt, 7)
    assert saved(store) == expected


@pytest.mark.parametrize("steps", [0, 3])
def test_nothing_is_saved_twice(steps):
    store = MemoryStore()
    with training(store, AtEnd()) as (state, ckpt):
        train(state, ckpt, steps)
        ckpt.save()
    assert saved(store) == [(steps, "request")]


def test_a_training_without_a_step_saves_nothing():
    store = MemoryStore()
    with training(store, AtEnd()):
        pass
    with training(store, AtEnd()) as (_, ckpt):
        assert ckpt.resume() is None
    assert not list(store.list(""))


def test_a_training_that_goes_back_saves_its_last_step_on_the_branch():
    store = MemoryStore()
    with training(store, EverySteps(2) | AtEnd()) as (state, ckpt):
        train(state, ckpt, 5)
    with training(store, AtEnd()) as (state, ckpt):
        ckpt.resume(at=2)
        train(state, ckpt, 4)
    assert [str(v) for v in Run(store).line()] == ["version_2", "version_4.1"]


def test_the_last_save_waits_for_the_one_in_flight():
    store = FailingStore()
    with training(store, EverySteps(4) | AtEnd()) as (state, ckpt):
        store.open.clear()
        train(state, ckpt, 7)
        threading.Timer(0.05, store.open.set).start()
    assert saved(store) == [(4, "cadence"), (7, "end")]


def test_a_pending_request_is_answered_by_the_last_save():
    store = MemoryStore()
    with training(store, AtEnd()) as (state, ckpt):
        train(state, ckpt, 3)
        put_request(store, "a" * 12)
        ckpt._watcher.poll()
    assert saved(store) == [(3, "request")]


def test_a_full_disk_at_the_end_with_warn_warns_once():
    store = FailingStore()
    state = initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(2) | AtEnd(), on_error="warn")
    train(state, ckpt, 3)
    ckpt.wait()
    store.errors.append(no_space())
    with pytest.warns(SaveFailed, match=r"NOTHING WAS SAVED.*since step 2.*No space") as caught:
        ckpt.close()
    assert len(caught) == 1
    assert saved(store) == [(2, "cadence")]


def test_the_last_state_is_saved_although_the_save_before_failed():
    store = FailingStore()
    with (
        pytest.raises(StoreError, match="temporary"),
        training(store, EverySteps(2) | AtEnd()) as (state, ckpt),
    ):
        train(state, ckpt, 2)
        ckpt.wait()
        store.errors.append(StoreError("A temporary error"))
        store.open.clear()
        train(state, ckpt, 5)  # the save of 4 is in flight, and will fail
        threading.Timer(0.05, store.open.set).start()
    assert saved(store) == [(2, "cadence"), (5, "end")]


def test_a_state_from_before_a_resume_is_not_saved_after_an_exception():
    """The training has gone back. A version of the later step would undo that."""
    store = MemoryStore()
    with (
        pytest.raises(ValueError, match="NaN"),
        training(store, EverySteps(3) | OnException()) as (state, ckpt),
    ):
        train(state, ckpt, 5)
        snapshot = ckpt.resume()
        assert snapshot is not None
        assert snapshot.step == 3
        raise ValueError("NaN")
    assert saved(store) == [(3, "cadence")]


def test_an_interrupt_during_the_last_save_releases_everything():
    """The save still completes."""
    store = FailingStore()
    ckpt = Checkpointer(store, state := initial_state(), save=AtEnd())
    train(state, ckpt, 3)
    store.open.clear()
    store.reached.clear()

    main, stopped = threading.get_ident(), threading.Event()

    def interrupt_once(number, frame):
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    def interrupt():
        store.reached.wait(20)
        # A signal that arrives right before the wait blocks has no effect until the next signal.
        while not stopped.wait(0.05):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt_once)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    finally:
        stopped.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
        store.open.set()
    ckpt.close()
    pending = ckpt._saver.pending
    assert pending is None or pending.wait(20)
    assert saved(store) == [(3, "end")]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_saved_after_an_exception(kind):
    """The state may belong to no step."""
    store = MemoryStore()
    with pytest.raises(kind), training(store, EverySteps(2) | AtEnd()) as (state, ckpt):
        train(state, ckpt, 3)
        state["weights"] += 1
        raise kind("NaN")
    assert saved(store) == [(2, "cadence")]


def raise_in_finally(ckpt):
    try:
        raise ValueError("NaN")
    finally:
        ckpt.close()


def raise_in_closing(ckpt):
    with closing(ckpt):
        raise ValueError("NaN")


def close_in_handler(ckpt):
    try:
        raise ValueError("NaN")
    except ValueError:
        ckpt.close()


@pytest.mark.parametrize("end", [raise_in_finally, raise_in_closing, close_in_handler])
def test_close_during_an_exception_saves_nothing_and_warns(end):
    store = MemoryStore()
    ckpt = Checkpointer(store, state := initial_state(), save=EverySteps(2) | AtEnd())
    train(state, ckpt, 3)
    with (
        pytest.warns(
            UnsavedSteps, match=r"Step 3 is not in any version.*ValueError: NaN"
        ) as caught,
        suppress(ValueError),
    ):
        end(ckpt)
    assert len(caught) == 1
    assert saved(store) == [(2, "cadence")]


@pytest.mark.parametrize("block", [False, True])
def test_a_training_inside_an_exception_handler_saves_its_last_step(block):
    """As in a loop that tries again with a smaller batch after a failure."""
    store = MemoryStore()
    try:
        raise MemoryError("batch too large")
    except MemoryError:
        ckpt = Checkpointer(store, state := initial_state())
        if block:
            with ckpt:
                train(state, ckpt, 3)
        else:
            train(state, ckpt, 3)
            ckpt.close()
    assert saved(store) == [(3, "end")]


@pytest.mark.parametrize("code", [None, 0, 3])
def test_an_exit_that_reports_success_does_not_hide_lost_steps(code):
    store = MemoryStore()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SystemExit), training(store, AtEnd()) as (state, ckpt):
            train(state, ckpt, 3)
            sys.exit(code)
    assert saved(store) == []
    assert [str(w.message)[:40] for w in caught] == (
        [] if code else ["Steps 1 to 3 are not in any version of m"]
    )


class OnceAtStart(SavePolicy):
    """A policy of a user."""

    def due(self, now):
        return now.last_step == 0


EACH_POLICY = [
    (EverySteps(5), [5, 8]),
    (EverySeconds(600) | EverySteps(5), [5, 8]),
    (AtSteps([2]), [2, 8]),
    (EveryEpoch(), [8]),
    (Continuously(600), [8]),
    (OnException(), [8]),
    (SavePolicy(), [8]),
    (OnceAtStart(), [1, 8]),
    (OnPreemption() | EverySteps(5), [5, 8]),
    (EverySteps(5) | OnPreemption(), [5, 8]),
    (OnPreemption(), []),
    (OnPreemption() | OnPreemption(), []),
    (Never(), []),
]


@pytest.mark.parametrize(("policy", "expected"), [*EACH_POLICY, (AtEnd(), [8])])
def test_every_policy_but_two_saves_the_last_step(policy, expected):
    store = MemoryStore()
    with training(store, policy) as (state, ckpt):
        train(state, ckpt, 8)
    assert [step for step, _ in saved(store)] == expected


@pytest.mark.parametrize(("policy", "expected"), EACH_POLICY)
def test_at_end_false_saves_no_last_step_and_does_not_warn(policy, expected):
    store, emitted = MemoryStore(), list[str]()
    with (
        events.attach(lambda name, fields: emitted.append(name)),
        training(store, policy, at_end=False) as (state, ckpt),
    ):
        train(state, ckpt, 8)
    assert [step for step, _ in saved(store)] == expected[:-1]
    assert "left_unsaved" not in emitted


@pytest.mark.parametrize(
    ("policy", "expected"), [pair for pair in EACH_POLICY if not pair[0].on_exception]
)
@pytest.mark.parametrize("at_end", [True, False])
def test_after_an_exception_the_warning_stays_except_for_two_policies(policy, expected, at_end):
    state = initial_state()
    ckpt = Checkpointer(MemoryStore(), state, save=policy, at_end=at_end)
    train(state, ckpt, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        close_in_handler(ckpt)
    found = [(w.category, Path(w.filename).name) for w in caught]
    assert found == ([(UnsavedSteps, "test_end.py")] if expected else [])


@pytest.mark.parametrize(
    "policy", [AtEnd(), EverySteps(5) | AtEnd(), AtEnd() | EverySteps(5) | OnException()]
)
def test_at_end_false_contradicts_a_policy_that_asks_for_the_end(policy):
    with pytest.raises(LimpetError, match=r"at_end=False contradicts save=.*AtEnd\(\)") as e:
        Checkpointer(MemoryStore(), initial_state(), save=policy, at_end=False)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value", [None, 0, 1, "no", EverySteps(5)])
def test_at_end_is_true_or_false(value):
    with pytest.raises(LimpetError, match=r"at_end= must be True or False, not "):
        Checkpointer(MemoryStore(), initial_state(), at_end=value)


def test_a_checkpointer_that_would_not_save_at_the_end_may_be_discarded():
    for options in ({"save": EverySteps(5), "at_end": False}, {"save": OnPreemption()}):
        ckpt: Checkpointer | None = Checkpointer(MemoryStore(), state := initial_state(), **options)
        assert ckpt is not None
        train(state, ckpt, 3)
        watcher = ckpt._watcher
        ckpt = None
        gc.collect()  # a warning would be an error here
        watcher.close()


UNCLOSED = """
import sys, warnings
import limpet as hf
from tests.trainings import initial_state, train
def main():
    state = initial_state()
    ckpt = hf.Checkpointer(sys.argv[1], state{arguments})
    train(state, ckpt, 3)
    {end}
    return ckpt
ckpt = main()
"""


def run_script(folder, arguments, end):
    command = [sys.executable, "-c", UNCLOSED.format(arguments=arguments, end=end), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "end", "expected"),
    [
        (", save=hf.AtEnd()", "", "Steps 1 to 3 are not in any version"),
        ("", "import atexit; atexit.register(ckpt.close)", "Steps 1 to 3 are not in any version"),
        ("", "import os; os.fork() or sys.exit()", "Steps 1 to 3 are not in any version"),
    ],
)
def test_the_end_of_the_process_only_warns(arguments, end, expected, tmp_path):
    """At that time, other libraries may have shut down, and no thread can be started."""
    done = run_script(tmp_path / "run", arguments, end)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UnsavedSteps") == 1, done.stderr
    assert expected in done.stderr
    assert "close()" in done.stderr or "atexit" in end
    reasons = [reason for _, reason in saved(tmp_path / "run")]
    assert "end" not in reasons


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ZeroDivisionError('x')"])
def test_after_an_exception_the_end_of_the_process_names_what_would_save(error, tmp_path):
    """A ``with`` block without ``OnException`` would save nothing either."""
    done = run_script(tmp_path / "run", "", f"raise {error}")
    advice = "Only OnException() saves then, in a with block"
    assert "Steps 1 to 3 are not in any version" in done.stderr
    assert f"an exception ({error.partition('(')[0]}" in done.stderr
    assert advice in done.stderr
    assert "call close()" not in done.stderr


def test_in_an_interactive_session_an_earlier_exception_is_no_cause(tmp_path):
    script = UNCLOSED.format(arguments="", end="").replace("sys.argv[1]", repr(str(tmp_path)))
    lines = ["1/0", script.replace("ckpt = main()", "\nckpt = main()").strip(), ""]
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join(lines),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ZeroDivisionError" in done.stderr
    assert "the process ended before close()" in done.stderr, done.stderr
    assert "an exception (" not in done.stderr


def test_a_checkpointer_that_is_garbage_collected_warns_once():
    """A cell of a notebook that is run again replaces the Checkpointer."""
    store, emitted = MemoryStore(), list[str]()
    ckpt: Checkpointer | None = Checkpointer(store, state := initial_state())
    assert ckpt is not None
    train(state, ckpt, 3)
    watcher = ckpt._watcher
    with (
        # a sink may hold a lock at the moment of the collection
        events.attach(lambda name, fields: emitted.append(name)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        ckpt = None
        gc.collect()
    watcher.close()
    [warning] = caught
    assert warning.category is UnsavedSteps
    assert "Steps 1 to 3 are not in any version" in str(warning.message)
    # a thread that began before may only now have found the platform
    assert [name for name in emitted if name != "platform_detected"] == []
    assert saved(store) == []


def test_never_saves_only_on_request():
    store = MemoryStore()
    with training(store, Never()) as (state, ckpt):
        train(state, ckpt, 3)
        ckpt.save()
        put_request(store, "a" * 12)
        ckpt._watcher.poll()
        train(state, ckpt, 5)
        ckpt.wait()
    assert saved(store) == [(3, "request"), (4, "request")]
    with pytest.raises(ValueError, match="NaN"), training(MemoryStore(), Never()) as (state, ckpt):
        train(state, ckpt, 3)
        raise ValueError("NaN")


@pytest.mark.parametrize(
    "combine",
    [
        lambda: Never() | EverySteps(5),
        lambda: EverySteps(5) | Never(),
        lambda: EverySteps(5) | (AtEnd() | Never()),
        lambda: Never() | Never(),
    ],
)
def test_never_cannot_be_combined(combine):
    with pytest.raises(LimpetError, match=r"Never\(\) cannot be combined"):
        combine()
