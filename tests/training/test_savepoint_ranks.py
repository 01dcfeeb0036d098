"""After a notice, the threads of all ranks save the savepoint of one step, or none does."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from limpet.deadline import Deadline
from limpet.format.names import Version
from limpet.training.saver import SaveSpec
from limpet.training.step_savepoint import SavepointSaver
from tests.fakegroup import FakeGroup

RANKS = 4


class Training:
    """A rank whose training makes steps unless its savepoint is held, and what it has saved.

    It stands for the savepoint, the saver, and the measured times of the training.
    """

    is_useful, can_flush, busy = True, False, False
    usual_seconds, step_began_at = (0.0, 0.0), 0.0
    saved_step = begun_step = 0
    invalid_reason = None

    def __init__(self, step, last=5):
        self.step, self.last = step, last
        self.is_held = False
        self.saved: list[tuple[int, Any]] = []
        self._lock = threading.Lock()

    @property
    def label(self):
        return SaveSpec(Version(self.step), "exception", {}, {}, {})

    def hold(self):
        with self._lock:
            self.is_held = True
        return True

    def release(self):
        with self._lock:
            self.is_held = False

    def prepare_flush(self): ...

    def flatten_captured(self, rank):
        return SimpleNamespace(step=self.step)

    def save_savepoint(self, flat, label, deadline, group, end_staging):
        steps = group.collective("a save").gather(label.version.step, int)
        self.saved.append((label.version.step, steps))

    def train(self):
        """Make the steps up to ``last``, each unless the savepoint is held."""
        end = time.monotonic() + 10
        while self.step < self.last and time.monotonic() < end:
            with self._lock:
                self.step += not self.is_held
            time.sleep(random.uniform(0, 0.01))


@pytest.fixture
def group():
    with FakeGroup(RANKS) as group:
        yield group


def save_on(group, trainings, seconds):
    """Let the threads of the ranks save. Return the steps that they have saved."""

    def run(rank):
        if rank not in trainings:
            return None
        training = trainings[rank]
        saver = SavepointSaver(training, training, training, group.groups[rank])
        saver.join()
        if rank == min(trainings):
            saver.hasten()  # the other threads hear of it
        saver.expect(Deadline.after(seconds, "the exit after a test"), time.monotonic())
        training.train()
        saver._ended.wait(20)
        saver.close()
        return saver.saved_step

    found = group.run(run)
    return {rank: found[rank] for rank in trainings}


@pytest.mark.parametrize("seed", range(4))
def test_ranks_at_different_steps_catch_up_with_the_latest(group, seed):
    random.seed(seed)
    trainings = {rank: Training(random.randint(1, 5)) for rank in range(RANKS)}
    trainings[seed].step = 5
    assert save_on(group, trainings, 20.0) == dict.fromkeys(range(RANKS), 5)
    assert trainings[0].saved == [(5, [5] * RANKS)]
    assert not any(t.is_held for t in trainings.values())


@pytest.mark.parametrize("dead", [0, 2])
def test_nothing_is_saved_without_a_rank_that_does_not_respond(group, dead):
    trainings = {rank: Training(5) for rank in range(RANKS) if rank != dead}
    began = time.monotonic()
    assert save_on(group, trainings, 3.0) == dict.fromkeys(trainings)
    assert time.monotonic() - began < 4
    assert not any(t.saved or t.is_held for t in trainings.values())


def test_a_save_in_flight_of_the_same_step_is_not_made_again(group):
    trainings = {rank: Training(5) for rank in range(RANKS)}
    trainings[2].begun_step = 5
    assert save_on(group, trainings, 10.0) == dict.fromkeys(range(RANKS))
    assert not any(t.saved for t in trainings.values())


def test_a_rank_that_stays_behind_keeps_the_others_only_until_a_save_must_begin(group):
    trainings = {rank: Training(5) for rank in range(RANKS)}
    trainings[1] = Training(4, last=4)
    began = time.monotonic()
    assert save_on(group, trainings, 3.0) == dict.fromkeys(range(RANKS))
    assert time.monotonic() - began < 5
    assert not any(t.is_held for t in trainings.values())
