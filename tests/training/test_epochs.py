"""``ckpt.epochs`` yields the epochs that remain, and ends each one."""

from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError, PlanError, Preempted
from limpet.preemption import Preemption
from limpet.run.policy import AtEnd, EveryEpoch, EverySteps, Never, OnException, StopWhen
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from tests.notices.announced import Announced
from tests.trainings import initial_state
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("error", "ignore::limpet.errors.UnsavedSteps")

BATCHES = 4
EPOCHS = 3


class Killed(BaseException):
    """Ends a training without anything that follows, as SIGKILL does."""


class Training:
    """A training in a new process, as the documents write it. ``log``: what it has done."""

    def __init__(self, *, loader=True, progress=True):
        self.log: list[Any] = []
        self.state: dict[str, Any] = {"weights": np.zeros(1000, "f4")}
        if progress:
            self.state["progress"] = limpet.Progress()
        self.loader: limpet.DataLoader | None = None
        if loader:
            self.loader = limpet.DataLoader(range(4 * BATCHES), 4, shuffle=True, seed=0)
            self.state["loader"] = self.loader

    def run(self, store, count=EPOCHS, kill=lambda place, step: None, *, save=None, **options):
        save = EverySteps(1) if save is None else save
        ckpt = limpet.Checkpointer(store, self.state, save=save, **options)
        try:
            with ckpt:
                for epoch in ckpt.epochs(count):
                    batches: Any = range(BATCHES) if self.loader is None else self.loader
                    for batch in batches:
                        batch = batch if self.loader is None else batch.tolist()
                        self.log.append((epoch, batch))
                        self.state["weights"] += np.sum(batch)
                        ckpt.step({"loss": float(self.state["weights"][0])})
                        kill("step", ckpt.current_step)
                    kill("evaluation", ckpt.current_step)
                    self.log.append(f"evaluation {epoch}")
                    ckpt.metrics({"val": 1.0 / (epoch + 1)})
        except Killed:
            pass
        return ckpt


def versions(store):
    return [v.step for v in Run(store).line()]


def kill_at(place, step):
    def kill(at, now):
        if (at, now) == (place, step):
            raise Killed

    return kill


UNINTERRUPTED = Training()
UNINTERRUPTED.run(MemoryStore())


@pytest.mark.parametrize("place", ["step", "evaluation"])
@pytest.mark.parametrize("step", range(1, EPOCHS * BATCHES + 1))
def test_a_killed_training_continues_in_the_epoch(place, step):
    """Only the interrupted evaluation is repeated, because each step is saved."""
    if place == "evaluation" and step % BATCHES:
        return
    store, first, second = MemoryStore(), Training(), Training()
    first.run(store, kill=kill_at(place, step))
    second.run(store)
    assert first.log + second.log == UNINTERRUPTED.log
    assert second.state["progress"].epoch == EPOCHS
    assert (second.state["weights"] == UNINTERRUPTED.state["weights"]).all()


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("loader", [True, False])
@pytest.mark.parametrize("save", [EveryEpoch(), EverySteps(BATCHES), AtEnd(), EverySteps(1)])
def test_a_finished_training_yields_nothing(loader, progress, save):
    """Also if the last step was saved before its epoch ended, and without a ``Progress``."""
    store = MemoryStore()
    Training(loader=loader, progress=progress).run(store, save=save)
    before = versions(store)
    for count in (EPOCHS, EPOCHS - 1, 0):
        again = Training(loader=loader, progress=progress)
        again.run(store, count, save=save)
        assert again.log == []
    assert versions(store) == before
    assert Run(store).ended() == "finished"


@pytest.mark.parametrize("save", [EveryEpoch(), EverySteps(BATCHES), AtEnd()])
def test_more_epochs_continue_where_fewer_ended(save):
    """Also if the last step was saved before its epoch ended."""
    store, first, second = MemoryStore(), Training(), Training()
    first.run(store, 1, save=save)
    second.run(store, EPOCHS, save=save)
    assert first.log + second.log == UNINTERRUPTED.log


@pytest.mark.parametrize("progress", [True, False])
def test_more_epochs_make_the_last_steps_again_if_they_were_not_saved(progress):
    """The training had ended, so the same number of epochs yields nothing."""
    store, trainings = MemoryStore(), [Training(progress=progress) for _ in range(3)]
    for training, count in zip(trainings, (3, 3, 4), strict=True):
        training.run(store, count, save=EveryEpoch(2), at_end=False)
    expected = Training()
    expected.run(MemoryStore(), 4)
    assert [t.log for t in trainings] == [
        expected.log[: 3 * BATCHES + 3],
        [],
        expected.log[2 * BATCHES + 2 :],
    ]


@pytest.mark.parametrize("progress", [True, False])
def test_every_epoch_saves_with_the_metrics_of_the_epoch(progress):
    store = MemoryStore()
    Training(progress=progress).run(store, save=EveryEpoch())
    run = Run(store)
    assert versions(store) == [4, 8, 12]
    snapshots = [*run.snapshots()]
    assert [s.metadata["metrics"]["val"] for s in snapshots] == [1.0, 1 / 2, 1 / 3]
    assert all("loss" in s.metadata["metrics"] for s in snapshots)
    if progress:
        assert [limpet.load(store.at(f"version_{n}"))["progress"]["epoch"] for n in (4, 8)] == [
            1,
            2,
        ]


def test_metrics_between_the_steps_of_an_epoch_belong_to_the_last_step():
    store = MemoryStore()
    with limpet.Checkpointer(store, initial_state(), save=EverySteps(2)) as ckpt:
        ckpt.metrics({"before": 0.0})  # of no step
        ckpt.step({"loss": 1.0})
        ckpt.metrics({"a": 1.0})
        ckpt.step({"loss": 2.0})
        ckpt.metrics({"a": 2.0})
        ckpt.metrics({"b": 3.0})
        with pytest.raises(PlanError, match="not a number"):
            ckpt.metrics({"c": "x"})
    assert Run(store).metrics(2) == {"loss": 2.0, "a": 2.0, "b": 3.0}


def test_an_epoch_ends_with_continue_but_not_with_break():
    store, state = MemoryStore(), initial_state()
    progress = state["progress"]
    with limpet.Checkpointer(store, state, save=EveryEpoch()) as ckpt:
        for _ in ckpt.epochs(5):
            ckpt.step()
            if progress.epoch < 2:
                continue
            break
        assert progress.epoch == 2
        assert [*take(ckpt.epochs(3), ckpt)] == [2]
    assert progress.epoch == 3
    assert versions(store) == [1, 2, 4]


def take(epochs, ckpt):
    for epoch in epochs:
        ckpt.step()
        yield epoch


@pytest.mark.parametrize("how", ["error", "return"])
def test_an_epoch_does_not_end_with_an_error_or_a_return(how):
    store, state = MemoryStore(), initial_state()

    def train():
        with limpet.Checkpointer(store, state, save=OnException() | AtEnd()) as ckpt:
            for epoch in ckpt.epochs(3):
                ckpt.step()
                if epoch == 1 and how == "return":
                    return
                if epoch == 1:
                    raise ValueError("stop")

    if how == "error":
        with pytest.raises(ValueError, match="stop"):
            train()
    else:
        train()
    assert state["progress"].epoch == 1
    again = initial_state()
    with limpet.Checkpointer(store, again, save=Never()) as ckpt:
        assert next(ckpt.epochs(3)) == 1
        assert ckpt.current_step == 2


def test_no_epoch_begins_after_an_early_stop():
    store = MemoryStore()
    stop = StopWhen("val", patience=2, mode="max")  # and val gets smaller
    first = Training()
    ckpt = first.run(store, 10, save=EveryEpoch(), stop=stop)
    assert ckpt.should_stop
    assert [x for x in first.log if isinstance(x, str)] == [f"evaluation {n}" for n in range(3)]
    again = Training()
    again.run(store, 10, save=EveryEpoch(), stop=stop)
    assert again.log == []


def test_a_loop_that_has_resumed_does_not_resume_again():
    store, state = MemoryStore(), Training(loader=False).state
    Training(loader=False).run(store, 1, save=EveryEpoch())
    with limpet.Checkpointer(store, state, save=Never()) as ckpt:
        ckpt.resume()
        state["weights"][:] = 7
        assert next(ckpt.epochs(2)) == 1
        assert state["weights"][0] == 7


def test_a_notice_leaves_at_the_end_of_the_epoch():
    store, source, state = MemoryStore(), Announced(), initial_state()
    preemption = Preemption(notices=[source])
    with (
        pytest.raises(Preempted) as raised,
        limpet.Checkpointer(store, state, save=EverySteps(100), preemption=preemption) as ckpt,
    ):
        for _ in ckpt.epochs(2):
            ckpt.step(steps=4)
            source.announce(60.0)
            wait_until(ckpt._preemption.agreement._proposals.qsize)
            ckpt.metrics({"val": 0.5})
    assert raised.value.code == 75
    assert Run(store).metrics(4)["val"] == 0.5
    assert limpet.load(store.at("version_4"))["progress"]["epoch"] == 1


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", None])
def test_an_invalid_number_of_epochs_is_refused_at_the_call(count):
    ckpt = limpet.Checkpointer(MemoryStore(), initial_state(), save=Never())
    with ckpt, pytest.raises(LimpetError, match="The number of epochs must be"):
        ckpt.epochs(count)


def test_an_epoch_that_the_body_has_ended_or_left_is_not_ended_again():
    state = Training(loader=False).state
    with limpet.Checkpointer(MemoryStore(), state, save=EveryEpoch()) as ckpt:
        seen: list[Any] = []
        for epoch in ckpt.epochs(4):
            seen.append(epoch)
            ckpt.step()
            if epoch != 1:
                ckpt.end_epoch({"val": epoch})
            if len(seen) == 3:  # for example, the loss is not finite
                ckpt.resume(at=1)
        for outer in ckpt.epochs(6):  # a loop in a loop ends no epoch twice
            for inner in ckpt.epochs(6):
                seen.append((outer, inner))
                ckpt.step()
        assert seen == [0, 1, 2, 1, 2, 3, (4, 4), (4, 5)]
