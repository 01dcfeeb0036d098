"""``PreemptionGuard`` in one process. The numbers are those of BEHAVIOURS.md, section A."""

import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest

import limpet
from limpet.errors import LimpetError, Preempted
from limpet.preemption import Preemption, PreemptionGuard
from limpet.run.policy import AtEnd, EverySteps, OnException
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training import guard, response
from tests.notices.announced import Announced
from tests.trainings import initial_state, state_after, states_equal, train_step
from tests.waiting import wait_until

STEPS_PER_EPOCH = 7


@pytest.fixture(autouse=True)
def process_ends(monkeypatch):
    """Record the exit codes of the process instead of ending pytest."""
    ends: list[int] = []
    monkeypatch.setattr(response, "end_process", lambda code, why: ends.append(code))
    return ends


class GuardedTraining:
    """A training whose loop calls ``guard.run``."""

    def __init__(self, store, save=None, at_end=True, **settings):
        self.source = Announced()
        self.state = initial_state()
        self.ckpt = limpet.Checkpointer(
            store,
            self.state,
            save=EverySteps(10**9) if save is None else save,
            at_end=at_end,
            preemption=Preemption(notices=[self.source], **settings),
        )
        self.guard = PreemptionGuard(self.ckpt)

    def train_step(self):
        return train_step(self.state)

    def train_steps(self, count):
        """Make several steps in one call."""
        for _ in range(count):
            self.ckpt.step({"loss": self.train_step()})
        return self.ckpt.current_step

    def announce(self, seconds=None):
        """Announce a stop, and wait until the watcher has proposed to leave."""
        self.source.announce(seconds)
        wait_until(self.ckpt._preemption.agreement._proposals.qsize)


def test_run_passes_arguments_and_the_result_and_counts_one_step():
    """12, 29"""
    training = GuardedTraining(MemoryStore())
    with training.ckpt:
        assert training.guard.run(lambda *args, **kwargs: (args, kwargs), 1, b=2) == (
            (1,),
            {"b": 2},
        )
        assert training.guard.run(dict, fn=3) == {"fn": 3}
        assert training.guard.run(print, end="") is None
        assert training.ckpt.current_step == training.guard.total_run_calls == 3


def test_run_saves_and_leaves_after_a_notice():
    """3, 10, 12"""
    store = MemoryStore()
    training = GuardedTraining(store)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.ckpt.resume()
        for _ in range(5):
            training.guard.run(training.train_step)
        training.announce()
        training.guard.run(training.train_step)
    assert (left.value.code, left.value.step, left.value.saved_step) == (75, 6, 6)
    assert [(s.step, s.metadata["reason"]) for s in Run(store).snapshots()] == [(6, "preemption")]


def test_a_restart_continues_in_the_same_epoch_and_step():
    """2, 7, 11: ``total_run_calls`` gives the epoch and the step within it."""
    store, seen = MemoryStore(), list[tuple[int, int]]()
    for life in range(4):
        training = GuardedTraining(store, AtEnd())
        with suppress(Preempted), training.ckpt:
            training.ckpt.resume()
            for epoch in range(training.guard.total_run_calls // STEPS_PER_EPOCH, 3):
                done = training.guard.total_run_calls % STEPS_PER_EPOCH
                for step in range(done, STEPS_PER_EPOCH):
                    seen.append((epoch, step))
                    if life < 3 and step == life + 2:
                        training.announce()
                    training.guard.run(training.train_step)
    assert seen == [(epoch, step) for epoch in range(3) for step in range(STEPS_PER_EPOCH)]
    assert states_equal(training.state, state_after(3 * STEPS_PER_EPOCH))


@pytest.mark.parametrize("save", [EverySteps(2), EverySteps(10**9)])
def test_a_function_of_many_steps_is_not_left_before_its_end(save):
    """All steps count. Saves and notices take effect at the end of a call, so that the number of
    calls in a version is exact."""
    store = MemoryStore()
    training = GuardedTraining(store, save)
    with pytest.raises(Preempted) as left, training.ckpt:
        assert training.guard.run(training.train_steps, 5) == 5
        training.guard.run(lambda: (training.announce(), training.train_steps(5)))
    assert left.value.step == left.value.saved_step == 10
    steps = [s.step for s in Run(store).snapshots()]
    assert steps == ([5, 10] if save == EverySteps(2) else [10])
    resumed = GuardedTraining(store)
    with resumed.ckpt:
        resumed.ckpt.resume()
        assert resumed.guard.total_run_calls == 2
    assert states_equal(resumed.state, state_after(10))


def test_the_time_of_a_call_is_that_of_a_step_in_the_deadline_budget():
    store = MemoryStore()
    training = GuardedTraining(store, AtEnd())
    with training.ckpt:
        training.guard.run(lambda: (training.train_steps(150), time.sleep(0.2)))
        assert training.ckpt._goodput.usual_seconds[0] >= 0.2
    resumed = GuardedTraining(store)
    with resumed.ckpt:
        resumed.ckpt.resume()
        resumed.train_steps(150)  # more than are remembered
        assert resumed.ckpt._goodput.usual_seconds[0] >= 0.2


def test_an_exception_of_the_function_is_raised_and_training_may_go_on():
    store = MemoryStore()
    training = GuardedTraining(store, AtEnd())

    def fail():
        raise ValueError("a bad batch")

    with training.ckpt:
        training.guard.run(training.train_step)
        training.announce()
        with pytest.raises(ValueError, match="a bad batch"):
            training.guard.run(fail)
        assert training.guard.total_run_calls == 1
        with pytest.raises(Preempted):  # the notice is not forgotten
            training.guard.run(training.train_step)
    assert [s.step for s in Run(store).snapshots()] == [2]


def test_on_exception_stores_the_calls_before_the_failed_one():
    store = MemoryStore()
    training = GuardedTraining(store, OnException())
    with pytest.raises(ZeroDivisionError), training.ckpt:
        for _ in range(3):
            training.guard.run(training.train_step)
        training.guard.run(lambda: 1 / 0)
    resumed = GuardedTraining(store)
    with resumed.ckpt:
        resumed.ckpt.resume()
        assert (resumed.ckpt.current_step, resumed.guard.total_run_calls) == (3, 3)


def test_a_run_that_other_versions_occupy_is_refused_before_the_first_call():
    store = MemoryStore()
    with GuardedTraining(store, AtEnd()).ckpt as ckpt:
        ckpt.step()
    training, calls = GuardedTraining(store), list[int]()
    with pytest.raises(LimpetError, match="holds versions of an earlier training"):
        training.guard.run(lambda: calls.append(1))
    assert calls == []


def test_a_nested_call_leaves_at_the_end_of_the_outer_one():
    training = GuardedTraining(MemoryStore())

    def outer():
        training.announce()
        for _ in range(3):
            training.guard.run(training.train_step)

    with pytest.raises(Preempted) as left, training.ckpt:
        training.guard.run(outer)
    assert left.value.step == 3


def test_without_preemption_a_guard_only_counts():
    store = MemoryStore()
    ckpt = limpet.Checkpointer(store, initial_state(), save=AtEnd(), preemption=None)
    with ckpt, PreemptionGuard(ckpt).watch_scope():
        assert PreemptionGuard(ckpt).run(int, "7") == 7
        PreemptionGuard(ckpt).save_if_preempted({"loss": 0.5})
    assert [s.step for s in Run(store).snapshots()] == [2]


def test_save_if_preempted_counts_a_step_saves_and_leaves():
    """13, 30: without a save function, the arguments are those of ``ckpt.step``."""
    store = MemoryStore()
    training = GuardedTraining(store)
    with pytest.raises(Preempted) as left, training.ckpt:
        for step in range(10):
            training.train_step()
            if step == 4:
                training.announce()
            training.guard.save_if_preempted({"loss": float(step)}, batches=1)
    assert left.value.step == 5
    assert Run(store).snapshots()[0].metadata["metrics"] == {"loss": 4.0}


def test_save_if_preempted_passes_its_arguments_to_the_save_function():
    """17, 30"""
    store, calls = MemoryStore(), list[Any]()

    def save(*args, **kwargs):
        calls.append((args, kwargs))

    training = GuardedTraining(store, save_fn=save)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.guard.save_if_preempted("early", a=0)
        training.announce()
        training.guard.save_if_preempted("late", a=1)
    assert calls == [(("late",), {"a": 1})]
    assert (left.value.code, left.value.step) == (75, 2)
    assert Run(store).snapshots() == []


def test_a_scope_notes_the_notice_and_leaves_at_its_end(monkeypatch):
    store, order = MemoryStore(), list[str]()
    training = GuardedTraining(store)
    monkeypatch.setattr(guard, "synchronize_device", lambda: order.append("synchronized"))

    def scope():
        with training.guard.watch_scope():
            for step in range(10):
                if training.ckpt.should_stop:
                    break
                order.append(f"step {step}")
                if step == 2:
                    training.announce()
                training.guard.run(training.train_step)
            order.append("end")

    with pytest.raises(Preempted) as left, training.ckpt:
        scope()
    assert order == ["step 0", "step 1", "step 2", "end", "synchronized"]
    assert left.value.saved_step == 3


def test_a_scope_that_does_not_end_is_left_in_time(process_ends):
    training = GuardedTraining(MemoryStore())
    with pytest.raises(Preempted) as left, training.ckpt, training.guard.watch_scope():
        training.announce(0.0)  # in the past: 5 s are left
        began = time.monotonic()
        training.ckpt._preemption._exit_seconds = lambda: 4.8
        while True:
            training.guard.run(training.train_step)
            time.sleep(0.001)
    assert 0.1 < time.monotonic() - began < 4
    assert left.value.code == 75
    assert process_ends == []


def test_an_exit_function_that_returns_lets_the_training_go_on_after_a_scope():
    """34"""
    store, calls = MemoryStore(), list[int]()
    training = GuardedTraining(store, AtEnd(), exit_fn=lambda: calls.append(1))
    with training.ckpt:
        with training.guard.watch_scope():
            training.announce()
            training.guard.run(training.train_step)
            assert training.ckpt.should_stop
        assert training.ckpt.should_stop
        training.guard.run(training.train_step)
    assert calls == [1]
    assert [s.step for s in Run(store).snapshots()] == [1, 2]


@pytest.mark.parametrize("guarded", [True, False])
def test_an_error_of_the_device_is_raised_and_nothing_is_saved(guarded, monkeypatch):
    """The error of an operation that the device runs asynchronously appears at the end."""
    store = MemoryStore()
    training = GuardedTraining(store, at_end=False)

    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    accelerator = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: SimpleNamespace(type="cuda"),
        synchronize=fail,
    )
    fake = SimpleNamespace(
        accelerator=accelerator, cuda=SimpleNamespace(is_initialized=lambda: True)
    )
    monkeypatch.setattr(guard, "torch_or_none", lambda: fake)
    with (
        pytest.raises(RuntimeError, match="device-side assert"),
        training.ckpt if guarded else nullcontext(),
        training.guard.watch_scope(),
    ):
        training.guard.run(training.train_step)
        training.announce()
    training.ckpt._preemption.close()
    training.ckpt.close()
    assert Run(store).snapshots() == []


def call_many_steps(training):
    training.guard.run(training.train_steps, 3)


def call_run(training):
    training.guard.run(training.train_step)


def call_save_if_preempted(training):
    training.train_step()
    training.guard.save_if_preempted({"loss": 0.5})


def call_nested(training):
    """What is called in a call is a part of it."""
    training.guard.run(lambda: (call_save_if_preempted(training), call_run(training)))


def announce_and_call(training, call):
    training.announce()
    call(training)


def in_scope(call):
    def make_call(training):
        with training.guard.watch_scope():
            call(training)

    return make_call


@pytest.mark.parametrize("by", ["notice", "loss", "failing call", "notice in a call"])
@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (call_run, 1),
        (call_save_if_preempted, 1),
        (call_many_steps, 3),
        (call_nested, 2),
        (in_scope(call_run), 1),
        (in_scope(call_save_if_preempted), 1),
    ],
)
def test_every_form_of_call_counts_and_a_restart_repeats_and_skips_none(call, steps, by):
    """2, 7: epochs of ``STEPS_PER_EPOCH`` calls, with several lives."""
    store = MemoryStore()
    for life in range(4):
        training, made = GuardedTraining(store, EverySteps(2) | AtEnd()), 0
        with suppress(Preempted, KeyboardInterrupt), training.ckpt:
            training.ckpt.resume()
            first = training.guard.total_run_calls
            assert first * steps == training.ckpt.current_step
            for _epoch in range(first // STEPS_PER_EPOCH, 3):
                for _ in range(training.guard.total_run_calls % STEPS_PER_EPOCH, STEPS_PER_EPOCH):
                    is_last = life < 3 and made == life + 3
                    if is_last and by == "loss":
                        raise KeyboardInterrupt
                    if is_last and by == "failing call":
                        with pytest.raises(ZeroDivisionError):
                            training.guard.run(lambda: 1 / 0)
                        with pytest.raises(LimpetError, match="steps="):
                            training.guard.save_if_preempted(steps=-1)
                    if is_last and by == "notice in a call":
                        training.guard.run(announce_and_call, training, call)
                    elif is_last and by == "notice":
                        training.announce()
                    call(training)
                    made += 1
                    assert training.guard.total_run_calls == first + made
    assert training.guard.total_run_calls == 3 * STEPS_PER_EPOCH
    assert training.ckpt.current_step == 3 * STEPS_PER_EPOCH * steps
    assert states_equal(training.state, state_after(3 * STEPS_PER_EPOCH * steps))
