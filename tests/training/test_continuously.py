"""``Continuously``: a save begins when the one before has ended, and no step waits for a save."""

import threading
from contextlib import contextmanager

import pytest

import limpet
from limpet.errors import LimpetError, SaveFailed, StoreError
from limpet.run.policy import AtEnd, Continuously, EverySteps, Never, OnException, OnPreemption
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.training.training_evaluation import TrainingEvaluation
from tests.trainings import initial_state, state_after, states_equal, train, training
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until


class Gate:
    """A store that writes shards only while ``open`` is set, and raises ``error`` if it is set."""

    def __init__(self):
        self.store = HookedStore(MemoryStore())
        self.store.before = self._before
        self.open = threading.Event()
        self.open.set()
        self.error: StoreError | None = None

    def _before(self, method, key):
        if method == "put" and key.endswith(".safetensors"):
            assert self.open.wait(20)
            if self.error is not None:
                raise self.error

    @property
    def steps(self):
        return [v.step for v in Run(self.store.inner).line()]


@contextmanager
def waits():
    """Record the steps that waited for a save."""
    steps: list[int] = []

    def add(name, fields):
        if name == "save_waited":
            steps.append(fields["step"])

    with limpet.attach(add):
        yield steps


@pytest.fixture
def now(monkeypatch):
    """The clock of the policy, in a list."""
    now = [100.0]
    monkeypatch.setattr("limpet.training.cadence.time.monotonic", lambda: now[0])
    return now


def test_a_save_begins_when_the_one_before_has_ended():
    gate = Gate()
    with waits() as waited, training(gate.store, Continuously(0), at_end=False) as (state, ckpt):
        gate.open.clear()
        train(state, ckpt, 5)  # the save of step 1 is in flight, and no step waits for it
        assert ckpt._saver.must_wait
        gate.open.set()
        ckpt.wait()
        train(state, ckpt, 6)
        ckpt.wait()
        gate.open.clear()
        train(state, ckpt, 9)
        ckpt_in_flight = ckpt._saver.begun_step
        gate.open.set()
    assert ckpt_in_flight == 7
    assert (gate.steps, waited) == ([1, 6, 7], [])


def test_the_seconds_count_from_the_begin_of_the_last_save(now):
    """The save of step 4 takes no time, and that of step 7 longer than the 60 s."""
    gate, begun = Gate(), list[int]()
    with training(gate.store, Continuously(60), at_end=False) as (state, ckpt):
        for step in range(1, 15):
            if step == 7:
                gate.open.clear()
            if step == 11:
                gate.open.set()
                ckpt.wait()
            train(state, ckpt, step)
            if ckpt._saver.begun_step == step:
                begun.append(step)
            if gate.open.is_set() and begun:
                ckpt.wait()
            now[0] += 25
    assert begun == gate.steps == [4, 7, 11, 14]


def test_the_last_step_is_saved_and_the_loss_is_bounded():
    gate = Gate()
    with training(gate.store, Continuously(3600)) as (state, ckpt):
        train(state, ckpt, 7)
    assert gate.steps == [7]


def test_with_other_policies():
    """They wait for the save in flight, as always."""
    gate = Gate()
    policy = EverySteps(4) | Continuously(0) | OnException()
    stopped = pytest.raises(ZeroDivisionError)
    with waits() as waited, stopped, training(gate.store, policy) as (state, ckpt):
        gate.open.clear()
        train(state, ckpt, 3)
        threading.Timer(0.05, gate.open.set).start()
        train(state, ckpt, 4)
        ckpt.wait()
        gate.open.clear()
        train(state, ckpt, 6)  # the save of step 5 is in flight
        gate.open.set()
        raise ZeroDivisionError
    assert (gate.steps, waited) == ([1, 4, 5, 6], [4])


def test_a_request_is_no_save_in_vain(now):
    """The seconds count from any save."""
    gate = Gate()
    with training(gate.store, Continuously(60), at_end=False) as (state, ckpt):
        train(state, ckpt, 1)
        now[0] += 59
        ckpt.save()
        now[0] += 59
        train(state, ckpt, 2)
        now[0] += 1
        train(state, ckpt, 3)
    assert gate.steps == [1, 3]


def test_a_save_that_failed_has_ended():
    gate = Gate()
    gate.error = StoreError("The store is away")
    options = {"at_end": False, "on_error": "warn"}
    with training(gate.store, Continuously(0), **options) as (state, ckpt):
        train(state, ckpt, 1)
        ckpt._saver.pending.wait_ended()
        gate.error = None
        with pytest.warns(SaveFailed, match="The store is away"):
            train(state, ckpt, 2)
        assert ckpt._saver.begun_step == 2
    assert gate.steps == [2]
    gate.error = StoreError("The store is away")
    with pytest.raises(StoreError), training(gate.store, Continuously(0)) as (state, ckpt):
        ckpt.resume()
        train(state, ckpt, 3)
        ckpt._saver.pending.wait_ended()
        train(state, ckpt, 4)


def test_with_a_local_tier_a_save_has_ended_when_its_promotion_has_begun(tmp_path):
    gate = Gate()
    gate.open.clear()
    tiers = [LocalTier(tmp_path / "nvme")]
    with waits() as waited, training(gate.store, Continuously(0), tiers=tiers) as (state, ckpt):

        def ends():
            return lambda: not ckpt._saver.must_wait

        train(state, ckpt, 1)
        wait_until(ends())  # it is on the disk, and the run cannot be reached
        train(state, ckpt, 2)  # one more is kept there
        for step in range(3, 9):
            train(state, ckpt, step)
            assert ckpt._saver.begun_step == 2
        assert gate.steps == []
        gate.open.set()
        wait_until(ends())
        train(state, ckpt, 9)
        assert ckpt._saver.begun_step == 9
    assert (gate.steps, waited) == ([1, 2, 9], [])
    with training(gate.store, Continuously(0), tiers=tiers) as (state, ckpt):
        ckpt.resume()
        assert states_equal(state, state_after(9))


def test_an_evaluation_begins_when_the_one_before_has_ended(now):
    """``at_least`` counts from its begin."""
    store, evaluated = MemoryStore(), list[int]()

    def evaluate(model, batch):
        evaluated.append(ckpt.current_step)
        return {"n": (1, 1)}

    for on, least, expected in (
        ("current", 0, [1, 2, 3, 4, 5, 6, 6, 6]),  # two batches each; the last step follows
        ("current", 3, [3, 4, 6, 7, 9, 10, 12, 12]),
        ("paused", 3, [3, 3, 6, 6, 9, 9, 10, 10]),
    ):
        evaluated.clear()
        last_step = max(expected) if on == "paused" else {0: 6, 3: 12}[least]
        with (
            limpet.Checkpointer(store := MemoryStore(), initial_state(), save=Never()) as ckpt,
            TrainingEvaluation(
                ckpt, None, evaluate, data=[0, 1], batch_size=1, every=Continuously(least), on=on
            ) as evaluation,
        ):
            for _ in range(last_step):
                evaluation.step()
                ckpt.step()
                now[0] += 1
        assert evaluated == expected, (on, least)
    assert [v.step for v in Run(store).line()] == [3, 6, 9, 10]


@pytest.mark.parametrize(
    "every", [Continuously(1), OnPreemption(), Never(), AtEnd(), EverySteps(5) | Continuously(1)]
)
def test_states_in_memory_follow_the_counts_only(every):
    with pytest.raises(LimpetError, match=r"every= of MemoryTier must be EverySteps\(10\), not "):
        MemoryTier(every=every)
