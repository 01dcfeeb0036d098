"""A source of notices that fails: the training ends as without it, and then the error is raised."""

import signal
import subprocess
import sys
import time

import pytest

from limpet import Preemption
from limpet.errors import LimpetError, Preempted
from limpet.run.policy import AtEnd, EverySteps
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.notices.announced import Announced
from tests.trainings import initial_state, train_step
from tests.waiting import wait_until


class Broken:
    name = "broken"
    interval = 0.01
    polls = 0

    def poll(self):
        self.polls += 1
        return True


class Training:
    def __init__(self, store, save=None):
        self.good, self.bad, self.state = Announced(), Broken(), initial_state()
        save = EverySteps(10**9) if save is None else save
        sources = Preemption(notices=[self.good, self.bad])
        self.ckpt = Checkpointer(store, self.state, save=save, preemption=sources)

    def train(self, steps=2):
        self.ckpt.resume()
        for _ in range(steps):
            train_step(self.state)
            self.ckpt.step()
        wait_until(lambda: self.bad.polls)


def train_on(store):
    """Train as another process would: the run must be free. Return the first step."""
    state = initial_state()
    with Checkpointer(store, state, save=AtEnd()) as ckpt:
        ckpt.resume()
        first = ckpt.current_step
        train_step(state)
        ckpt.step()
    return first


def test_preempted_is_raised_with_the_error_as_a_note(capsys):
    store, notes = MemoryStore(), "a source of notices failed: LimpetError: A source of notices"
    training = Training(store)
    with pytest.raises(Preempted) as left, training.ckpt:
        training.train()
        training.good.announce(30.0)
        for _ in range(3000):
            training.ckpt.step()
            time.sleep(0.002)
    assert left.value.code == 75
    assert notes in "".join(left.value.__notes__)
    assert notes in capsys.readouterr().err
    assert train_on(store) == Run(store).snapshots()[0].step


def test_the_error_of_a_source_is_raised_when_all_is_saved_and_closed():
    store = MemoryStore()
    training = Training(store, AtEnd())
    with pytest.raises(LimpetError, match="something else than a notice"), training.ckpt:
        training.train()
    training.ckpt.close()
    assert [s.step for s in Run(store).snapshots()] == [2]
    assert train_on(store) == 2


@pytest.mark.parametrize("way", ["with", "finally"])
def test_an_error_of_the_training_is_raised_with_the_other_one_as_a_note(way):
    store = MemoryStore()
    training = Training(store)

    def train():
        if way == "with":
            with training.ckpt:
                fail()
        try:
            fail()
        finally:
            training.ckpt.close()

    def fail():
        training.train()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert "a source of notices failed: LimpetError" in "".join(raised.value.__notes__)
    assert train_on(store) == 0


SCRIPT = """
import sys, time
import numpy as np
import limpet
from limpet.preemption import Notice, SignalNotice

class Broken:
    name, interval = "broken", 0.01
    def poll(self):
        return Notice("x", "30")

state = {"x": np.zeros(4), "progress": limpet.Progress()}
sources = limpet.Preemption(notices=[Broken(), SignalNotice()])
with limpet.Checkpointer(
    sys.argv[1], state, save=limpet.EverySteps(10**6), preemption=sources
) as ckpt:
    ckpt.resume()
    while ckpt.current_step < 2000:
        ckpt.step()
        if ckpt.current_step == 20:
            print("begun", flush=True)
        time.sleep(0.005)
"""


@pytest.mark.slow
def test_sigterm_after_a_source_has_failed_saves_and_exits_with_75(tmp_path):
    command, pipe = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "which is saved, because of SIGTERM" in err
    assert "a source of notices failed" in err
    assert len(Run(tmp_path / "run").snapshots()) == 1
