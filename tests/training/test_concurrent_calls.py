"""Calls of a Checkpointer during another call, by a signal handler or by a second thread."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import limpet
from limpet import events
from limpet.errors import LimpetError
from limpet.run.policy import EverySteps, OnException
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import (
    initial_state,
    state_after,
    states_equal,
    threads_of_trainings,
    train,
    train_step,
    training,
)
from tests.waiting import run_threads, wait_until

SOURCE = str(Path(limpet.__file__).parent)
METHODS: dict[str, Callable[[Checkpointer], object]] = {
    "step": lambda ckpt: ckpt.step(),
    "save": lambda ckpt: ckpt.save(),
    "resume": lambda ckpt: ckpt.resume(),
    "wait": lambda ckpt: ckpt.wait(),
    "close": lambda ckpt: ckpt.close(),
}


def check_run(store, steps):
    """Check that the run has exactly these versions, each as without an interruption."""
    snapshots = Run(store).snapshots()
    assert [s.step for s in snapshots] == steps
    for snapshot in snapshots:
        loaded, expected = (
            limpet.load(store.at(f"version_{snapshot.step}")),
            state_after(snapshot.step),
        )
        assert loaded["weights"].tobytes() == expected["weights"].tobytes()
        assert loaded["history"] == expected["history"]
    assert not [s.key for s in store.list("") if "/" not in s.key]


class Handler:
    """A profile function that makes a call at every call and return of a running call.

    Like a signal handler, it runs in the thread of the call. It catches the errors.
    """

    def __init__(self, ckpt, call):
        self.ckpt = ckpt
        self.call = call
        self.messages: list[str] = []

    def __call__(self, frame, event, _):
        if not self.ckpt._lifecycle.running or not frame.f_code.co_filename.startswith(SOURCE):
            return
        if frame.f_code.co_name == "call" and event in ("call", "return", "c_call", "c_return"):
            return  # before the call has entered, or after it has left, a call is allowed
        try:
            self.call(self.ckpt)
        except LimpetError as e:
            self.messages.append(str(e))
        else:
            self.messages.append("no error")


@pytest.mark.parametrize("name", METHODS)
def test_a_call_in_a_signal_handler_is_refused_at_every_point_of_a_call(name):
    store = MemoryStore()
    messages: list[str] = []
    with training(store, EverySteps(3) | OnException()) as (state, ckpt):

        def attack(call):
            handler = Handler(ckpt, METHODS[name])
            sys.setprofile(handler)
            try:
                call()
            finally:
                sys.setprofile(None)
            messages.extend(handler.messages)

        attack(ckpt.resume)
        for _ in range(6):
            loss = train_step(state)
            attack(lambda loss=loss: ckpt.step({"loss": loss}))
        train(state, ckpt, 7)
        attack(ckpt.save)
        attack(ckpt.wait)
        attack(ckpt.close)
    assert len(messages) > 1000
    assert all(
        f"{name}() was called while " in m and "SignalNotice" in m and "this thread" in m
        for m in messages
    ), {*messages}
    check_run(store, [3, 6, 7])
    assert ckpt.statistics()["saves"] == 3
    assert ckpt.statistics()["failures"] == 0


# CPython may print that the save's thread did not start, if the handler raises while it starts
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(3))
def test_a_real_signal_during_steps_changes_nothing(seed, monkeypatch):
    """The handler does not catch the error, so that it ends the call in progress."""
    store, state = MemoryStore(), initial_state()
    errors: list[LimpetError] = []
    # an error in a sink would detach it, also in that of a training that another test left open
    monkeypatch.setattr(events, "_defaults", {})
    with Checkpointer(store, state, save=EverySteps(2), quiet=True) as ckpt:
        ckpt.step({"loss": train_step(state)})

        def handler(number, frame):
            if ckpt._lifecycle.running:
                ckpt.save()

        previous = signal.signal(signal.SIGALRM, handler)
        try:
            end = time.monotonic() + 30
            while len(errors) < 20 and time.monotonic() < end:
                loss, began_at = train_step(state), state["progress"].step
                # the moments sweep over a step, however long it takes
                delay = 0.0001 + 0.0002 * (began_at % 20 + seed / 3)
                signal.setitimer(signal.ITIMER_REAL, delay)
                try:
                    ckpt.step({"loss": loss})
                except LimpetError as e:
                    errors.append(e)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                state["progress"]._step = max(state["progress"].step, began_at + 1)
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert errors
        assert all("SignalNotice" in str(e) for e in errors), errors
        ckpt.save()
        last = ckpt.current_step

    def living():  # an interrupt may leave a thread that never runs in the list: see start_thread
        return threads_of_trainings()

    wait_until(lambda: not living(), shown=living)
    assert Run(store).snapshots()[-1].step == last
    expected = initial_state()
    for snapshot in Run(store).snapshots():
        while expected["progress"].step < snapshot.step:
            train_step(expected)
            expected["progress"].step += 1
        assert snapshot.verify().ok
        weights = limpet.load(store.at(f"version_{snapshot.step}"))["weights"]
        assert weights.tobytes() == expected["weights"].tobytes()


@pytest.fixture
def tiny_switch_interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("tiny_switch_interval")
@pytest.mark.parametrize("policy", [EverySteps(7), EverySteps(1) | OnException()])
def test_of_concurrent_calls_all_but_one_raise(policy):
    store, state = MemoryStore(), initial_state()
    counted: list[int] = []
    others: list[BaseException] = []
    refused: list[str] = []
    with Checkpointer(store, state, save=policy) as ckpt:
        ckpt.step()

        def work(number):
            name = ("step", "step", "save", "wait")[number % 4]
            for _ in range(60):
                try:
                    METHODS[name](ckpt)
                except LimpetError as e:
                    (refused if "was called while" in str(e) else others).append(str(e))
                except BaseException as e:
                    others.append(e)
                else:
                    counted.append(name == "step")

        run_threads((threading.Thread(target=work, args=(n,)) for n in range(8)), 60)
        assert not others
        assert refused
        assert ckpt.current_step == 1 + sum(counted)
        last = ckpt.save()
    assert last.step == ckpt.current_step
    assert all(s.verify().ok for s in Run(store).snapshots())
    assert ckpt.statistics()["failures"] == 0
    assert ckpt.statistics()["saves"] == len(Run(store).snapshots())


def in_thread(call):
    errors: list[BaseException] = []

    def run():
        try:
            call()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_training_may_move_from_thread_to_thread():
    store, state = MemoryStore(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(2) | OnException())
    in_thread(ckpt.__enter__)
    in_thread(ckpt.resume)
    for step in range(1, 7):
        in_thread(lambda step=step: train(state, ckpt, step))
    train(state, ckpt, 7)
    in_thread(lambda: ckpt.__exit__(None, None, None))
    check_run(store, [2, 4, 6, 7])


def test_a_generator_may_hold_the_block():
    store = MemoryStore()

    def steps():
        with training(store, EverySteps(2) | OnException()) as (state, ckpt):
            for _ in range(10):
                ckpt.step({"loss": train_step(state)})
                yield state, ckpt

    generator = steps()
    for _ in range(4):
        state, _ = next(generator)
    with pytest.raises(RuntimeError):
        generator.throw(RuntimeError("in the loop"))
    assert states_equal(state, state_after(4))
    check_run(store, [2, 4])
    generator = steps()
    with pytest.raises(LimpetError, match="resume"):
        next(generator)


class BlockingStore(MemoryStore):
    """A store in which a save waits until the test lets it continue."""

    def __init__(self):
        super().__init__()
        self.blocked, self.go = threading.Event(), threading.Event()

    def put_if_absent(self, key, data):
        if key.endswith("manifest.json"):
            self.blocked.set()
            assert self.go.wait(30)
        return super().put_if_absent(key, data)


@pytest.mark.parametrize("error", [None, SystemExit(3), ValueError("loss is NaN")])
def test_leaving_the_block_during_a_call_of_another_thread_is_refused(error):
    """An exception that leaves the block is not replaced."""
    store, state = BlockingStore(), initial_state()
    ckpt = Checkpointer(store, state, save=EverySteps(100) | OnException())
    ckpt.__enter__()
    train(state, ckpt, 3)
    saving = threading.Thread(target=ckpt.save)
    saving.start()
    assert store.blocked.wait(30)
    for name, call in METHODS.items():
        with pytest.raises(LimpetError, match="another thread") as refused:
            call(ckpt)
        assert f"{name}() was called while save()" in str(refused.value)
    if error is None:
        with pytest.raises(LimpetError, match="close"):
            ckpt.__exit__(None, None, None)
    else:
        ckpt.__exit__(type(error), error, None)
        assert "save() of the same Checkpointer was running" in str(error.__notes__)
    store.go.set()
    saving.join(30)
    train(state, ckpt, 4)  # nothing is closed
    ckpt.save()
    ckpt.close()
    check_run(store, [3, 4])
