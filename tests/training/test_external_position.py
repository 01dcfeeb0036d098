"""A position that another object counts, such as that of a framework."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet import (
    AtEnd,
    AtSteps,
    Checkpointer,
    EveryEpoch,
    EverySteps,
    MemoryTier,
    Progress,
)
from limpet.errors import LimpetError
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup


@dataclass
class Trainer:
    """A framework's object, which counts, and restores its numbers itself."""

    step: Any = 0
    epoch: Any = 0

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        self.step, self.epoch = state["step"], state["epoch"]


def make(trainer, **members):
    return {"weights": np.zeros(4), "trainer": trainer, "progress": Progress(trainer), **members}


def versions(store):
    return [s.step for s in limpet.Run(store).snapshots()]


def run_steps(ckpt, trainer, *steps):
    for step in steps:
        trainer.step = step
        ckpt.step()


JUMPS = 40, 95, 130, 199, 200, 201, 530, 599


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (EverySteps(100), [130, 200, 530]),
        (AtSteps([1, 95, 131, 150, 700]), [40, 95, 199]),
        (EverySteps(1), [*JUMPS]),
        (EverySteps(1000), []),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_policy_fires_once_if_a_multiple_lies_in_the_jump(save, expected, is_late, resumes):
    store, trainer = MemoryStore(), Trainer()
    state: Any = (lambda: make(trainer)) if is_late else make(trainer)
    with Checkpointer(store, state, save=save, at_end=False) as ckpt:
        if resumes:
            ckpt.resume()
        run_steps(ckpt, trainer, *JUMPS)
        assert ckpt.current_step == 599
    assert versions(store) == expected
    for step in expected:
        loaded = limpet.load(store.at(f"version_{step}"))
        assert loaded["progress"]["step"] == loaded["trainer"]["step"] == step


@pytest.mark.parametrize("is_late", [False, True])
def test_the_intervals_begin_where_the_owner_does(is_late):
    store, trainer = MemoryStore(), Trainer(150)
    state: Any = (lambda: make(trainer)) if is_late else make(trainer)
    with Checkpointer(store, state, save=EverySteps(100), at_end=False) as ckpt:
        ckpt.resume()
        run_steps(ckpt, trainer, 160, 199, 205, 260)
    assert versions(store) == [205]


def test_the_memory_tier_follows_the_jumps():
    store, trainer = MemoryStore(), Trainer()
    tiers = [MemoryTier(every=EverySteps(100), copies=1)]
    with pytest.raises(KeyError), Checkpointer(store, make(trainer), tiers=tiers) as ckpt:
        run_steps(ckpt, trainer, *JUMPS)
        raise KeyError
    again = Trainer()
    with Checkpointer(store, make(again), tiers=tiers) as ckpt:
        assert ckpt.resume() is not None
        assert again.step == ckpt.current_step in (130, 200, 530)  # one may be skipped if busy


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_numbers_of_libraries_are_accepted(number):
    store, trainer = MemoryStore(), Trainer(epoch=number(3))
    with Checkpointer(store, make(trainer) | {"trainer": 0}, save=EverySteps(2)) as ckpt:
        run_steps(ckpt, trainer, number(1), number(2))
    assert versions(store) == [2]


@pytest.mark.parametrize("start", [0, 95])
def test_a_position_that_stands_still_raises(start):
    store, trainer = MemoryStore(), Trainer(start)
    with Checkpointer(store, make(trainer), save=EverySteps(1)) as ckpt:
        assert ckpt.current_step == start
        message = rf"step\(\) was called, but the step of Trainer is still {start}: call step"
        with pytest.raises(LimpetError, match=message):
            ckpt.step()
        run_steps(ckpt, trainer, start + 1)
        with pytest.raises(LimpetError, match=f"still {start + 1}"):
            ckpt.step({"loss": 1.0})
        run_steps(ckpt, trainer, start + 3)
    assert versions(store) == [start + 1, start + 3]


@pytest.mark.parametrize("call", ["step", "save", "end_epoch", "metrics"])
@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_position_that_goes_back_raises(name, call):
    store, trainer = MemoryStore(), Trainer(epoch=5)
    with Checkpointer(store, make(trainer), save=EverySteps(1)) as ckpt:
        run_steps(ckpt, trainer, 50)
        trainer.step, trainer.epoch = 51, 6
        setattr(trainer, name, 3)
        message = (
            rf"The {name} of Trainer has gone back from {50 if name == 'step' else 5} to 3. .*at="
        )
        with pytest.raises(LimpetError, match=message):
            getattr(ckpt, call)(*([{"a": 1}] if call == "metrics" else []))
        trainer.step, trainer.epoch = 51, 6
        ckpt.step()
    assert versions(store) == [50, 51]


@pytest.mark.parametrize("number", [-1, 1.5, "7", None, True, 10**18])
@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_position_that_is_no_count_raises(name, number):
    message = rf"The {name} of Trainer must be a whole number, 0 or more, not"
    with pytest.raises(LimpetError, match=message):
        Checkpointer(MemoryStore(), make(Trainer(**{name: number})))
    trainer = Trainer()
    with Checkpointer(MemoryStore(), make(trainer)) as ckpt:
        run_steps(ckpt, trainer, 1)
        trainer.step = 2
        setattr(trainer, name, number)
        with pytest.raises(LimpetError, match=message):
            ckpt.step()
        trainer.epoch = 0
        run_steps(ckpt, trainer, 3)


def test_only_the_owner_counts():
    trainer = Trainer()
    with Checkpointer(MemoryStore(), state := make(trainer)) as ckpt:
        run_steps(ckpt, trainer, 7)
        assert repr(state["progress"]) == "Progress(epoch=0, step=7, samples=0)"
        with pytest.raises(LimpetError, match="step cannot be set: its owner counts"):
            state["progress"].step = 9
        state["progress"].samples = 70
        trainer.step = 8
        with pytest.raises(LimpetError, match=r"steps=.* owner"):
            ckpt.step(steps=2)


def test_a_save_has_the_number_of_the_moment():
    store, trainer = MemoryStore(), Trainer(120)
    with Checkpointer(store, make(trainer), save=AtEnd()) as ckpt:
        assert ckpt.save().step == 120
        run_steps(ckpt, trainer, 130)
        trainer.step = 137
        assert ckpt.save().step == 137
        trainer.step = 138
    assert versions(store) == [120, 137, 138]
    again = Trainer()
    with Checkpointer(store, make(again)) as ckpt:
        ckpt.resume()
        assert again.step == ckpt.current_step == 138


def test_epochs_are_those_of_the_owner():
    store, trainer = MemoryStore(), Trainer()
    state, seen = make(trainer), []
    with Checkpointer(store, state, save=EveryEpoch(2)) as ckpt:
        for epoch in ckpt.epochs(5):
            seen.append(epoch)
            run_steps(ckpt, trainer, trainer.step + 10, trainer.step + 20)
            trainer.epoch += 1
            ckpt.metrics({"val": 1.0})
        assert state["progress"].epoch == 5
        with pytest.raises(
            LimpetError, match=r"end_epoch\(\) was called, but the epoch of Trainer is still 5"
        ):
            ckpt.end_epoch()
    assert seen == [0, 1, 2, 3, 4]
    assert versions(store) == [40, 80, 100]
    again = Trainer()
    with Checkpointer(store, make(again), save=EveryEpoch(2)) as ckpt:
        assert [*ckpt.epochs(5)] == []
        assert (again, next(ckpt.epochs(6))) == (Trainer(100, 5), 5)


def test_a_loader_advances_by_the_growth_of_the_number():
    loader = limpet.DataLoader(range(100), batch_size=5)
    trainer = Trainer()
    with Checkpointer(MemoryStore(), make(trainer, loader=loader)) as ckpt:
        batches = iter(loader)
        for count in (1, 4):
            for _ in range(count):
                next(batches)
            run_steps(ckpt, trainer, trainer.step + count)
        next(batches)
        trainer.step += 10
        ckpt.step(batches=1)
    assert loader.state_dict()["at"] == 6 * 5


@pytest.mark.parametrize("is_late", [False, True])
def test_the_framework_restores_its_own_object(is_late):
    store = MemoryStore()
    trainer = Trainer(epoch=2)
    with Checkpointer(store, make(trainer), save=EverySteps(100), at_end=False) as ckpt:
        run_steps(ckpt, trainer, *JUMPS)
    again = Trainer()
    state: Any = (lambda: make(again)) if is_late else make(again)
    with Checkpointer(store, state, save=EverySteps(100)) as ckpt:
        snapshot = ckpt.resume(check=True)
        assert snapshot is not None
        assert snapshot.step == ckpt.current_step == again.step == 530
        with pytest.raises(LimpetError, match="still 530"):
            ckpt.step()
        run_steps(ckpt, again, 531, 600)
        assert ckpt.resume(at=130) is not None
        assert again.step == 130
        run_steps(ckpt, again, 131, 210)
    assert [str(s.version) for s in limpet.Run(store).snapshots()][-1] == "version_210.1"


@pytest.mark.parametrize(
    ("position", "found"),
    [((0, 0), "step 0, epoch 0"), ((530, 3), "step 530, epoch 3"), ((531, 2), "step 531, ")],
)
def test_an_object_that_is_not_restored_is_an_error(position, found):
    """Nothing is trained after it, unless a later resume finds both equal."""
    store, trainer = MemoryStore(), Trainer(epoch=2)
    state = make(trainer) | {"trainer": 0}
    with Checkpointer(store, state, save=EverySteps(100), at_end=False) as ckpt:
        run_steps(ckpt, trainer, *JUMPS)
    other = Trainer(*position)
    with Checkpointer(store, make(other) | {"trainer": 0}, save=EverySteps(100)) as ckpt:
        message = rf"do not have the same position. Expected step 530, epoch 2, found {found}"
        with pytest.raises(LimpetError, match=message):
            ckpt.resume()
        with pytest.raises(LimpetError, match=r"last resume\(\) failed"):
            other.epoch = 9
            run_steps(ckpt, other, 700)
        other.step, other.epoch = 530, 2  # the framework has restored it
        ckpt.resume()
        run_steps(ckpt, other, 531, 600)
    assert versions(store) == [130, 200, 530, 600]


def test_a_run_may_change_between_its_own_count_and_that_of_an_owner():
    store = MemoryStore()
    state = {"weights": np.zeros(4), "progress": Progress()}
    with Checkpointer(store, state, save=AtEnd()) as ckpt:
        ckpt.step(steps=30)
    trainer = Trainer(30)
    state = {"weights": np.zeros(4), "progress": Progress(trainer)}
    with Checkpointer(store, state, save=AtEnd()) as ckpt:
        ckpt.resume()
        run_steps(ckpt, trainer, 40)
    state = {"weights": np.zeros(4), "progress": Progress()}
    with Checkpointer(store, state, save=AtEnd()) as ckpt:
        ckpt.resume()
        ckpt.step()
    assert versions(store) == [30, 40, 41]


@pytest.mark.parametrize("keys", [None, ["weights"]])
def test_a_start_from_another_run_has_the_position_of_what_was_loaded(keys):
    first, second, trainer = MemoryStore(), MemoryStore(), Trainer()
    with Checkpointer(first, make(trainer), save=AtEnd()) as ckpt:
        run_steps(ckpt, trainer, 30)
    again = Trainer(0 if keys is None else 5)
    with Checkpointer(second, make(again), save=AtEnd()) as ckpt:
        ckpt.resume(start=first.at("version_30"), keys=keys)
        assert ckpt.current_step == again.step == (30 if keys is None else 5)
        run_steps(ckpt, again, 50)
    assert versions(second) == [50]


def test_several_ranks_read_the_same_number(tmp_path):
    def work(rank):
        trainer = Trainer()
        state = lambda: make(trainer)  # noqa: E731
        ckpt = Checkpointer(tmp_path / "run", state, save=EverySteps(100), preemption=None)
        with ckpt:
            ckpt.resume()
            run_steps(ckpt, trainer, *(trainer.step + jump for jump in (40, 95, 130)))
        return int(trainer.step)

    for expected in (130, 260):
        with FakeGroup(2) as group:
            assert group.run(work) == [expected] * 2
    assert versions(tmp_path / "run") == [130, 225, 260]
