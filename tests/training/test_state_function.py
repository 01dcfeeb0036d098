"""A Checkpointer whose state is given as a function, because the state does not exist yet."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet import AtEnd, Checkpointer, EveryEpoch, EverySteps, OnException
from limpet.errors import LimpetError, Preempted
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.trainings import initial_state, state_after, states_equal, train_step


class Late:
    """A function that returns a new state, and counts its calls."""

    def __init__(self, make=initial_state):
        self.make, self.calls, self.state = make, 0, dict[str, Any]()

    def __call__(self):
        self.calls += 1
        self.state = self.make()
        return self.state


def versions(store):
    return [s.step for s in limpet.Run(store).snapshots()]


def test_a_training_resumes_into_the_state_that_the_function_returns():
    store = MemoryStore()
    for last in (5, 12):
        late = Late()
        with Checkpointer(store, late, save=EverySteps(4) | AtEnd()) as ckpt:
            assert (late.calls, ckpt.state) == (0, {})
            assert (ckpt.resume() is None) == (last == 5)
            while late.state["progress"].step < last:
                ckpt.step({"loss": train_step(late.state)})
            assert late.calls == 1
            assert ckpt.state is late.state
        assert states_equal(late.state, state_after(last))
    assert versions(store) == [4, 5, 8, 12]


@pytest.mark.parametrize("first", ["step", "save", "metrics", "end_epoch", "epochs"])
def test_the_first_call_that_needs_the_state_calls_the_function_once(first):
    store, late = MemoryStore(), Late()
    policy = EverySteps(1) | EveryEpoch() | OnException()
    with Checkpointer(store, late, save=policy) as ckpt:
        calls: dict[str, Callable[[], object]] = {
            "step": ckpt.step,
            "save": ckpt.save,
            "metrics": lambda: ckpt.metrics({"a": 1}),
            "end_epoch": ckpt.end_epoch,
            "epochs": lambda: next(ckpt.epochs(2)),
        }
        calls[first]()
        assert late.calls == 1
        ckpt.step()
        ckpt.step()
    assert late.calls == 1
    assert versions(store)[-1] == ckpt.current_step == late.state["progress"].step


def test_before_the_state_exists_everything_else_works():
    store, late = MemoryStore(), Late()
    ckpt = Checkpointer(store, late, save=EverySteps(1) | AtEnd())
    assert repr(ckpt) == f"<Checkpointer {store.url} at step 0>"
    assert (ckpt.current_step, ckpt.should_stop, ckpt.start_report) == (0, False, None)
    assert ckpt.statistics()["saves"] == 0
    assert ckpt.wait() is None
    ckpt.close()
    ckpt.close()
    with pytest.raises(LimpetError, match="The Checkpointer is closed"):
        ckpt.step()
    with pytest.raises(KeyError), Checkpointer(store, late, save=OnException() | AtEnd()):
        raise KeyError
    assert (late.calls, versions(store)) == (0, [])


@pytest.mark.parametrize("resumes", [True, False])
def test_a_notice_before_the_state_exists_is_followed_after_the_first_steps(resumes):
    store, late = MemoryStore(), Late()
    with (
        pytest.raises(Preempted) as left,
        Checkpointer(store, late, save=EverySteps(1 << 30)) as ckpt,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        if resumes:
            ckpt.resume()
        while True:
            ckpt.step()
    assert left.value.code == 75
    assert late.calls == 1
    assert versions(store) == [ckpt.current_step] == [late.state["progress"].step]


def test_a_notice_without_any_step_ends_nothing():
    """As with a state that exists."""
    store, late = MemoryStore(), Late()
    with Checkpointer(store, late):
        os.kill(os.getpid(), signal.SIGTERM)
    assert (late.calls, versions(store)) == (0, [])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: None, r"state must be .*a function that returns one, not None"),
        (lambda: torch.nn.Linear(2, 2), r"state must be .*not Linear"),
        (lambda: {"a": limpet.Progress(), "b": limpet.Progress()}, "several Progress objects"),
        (
            lambda: {"optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).state_dict()},
            "a copy made once",
        ),
    ],
)
@pytest.mark.parametrize("call", ["resume", "step", "save"])
def test_an_invalid_state_raises_when_the_function_has_returned_it(made, message, call):
    results = [made, initial_state]
    with Checkpointer(MemoryStore(), lambda: results.pop(0)()) as ckpt:  # noqa: PLW0108
        with pytest.raises(LimpetError, match=message):
            getattr(ckpt, call)()
        assert ckpt.state == {}
        getattr(ckpt, call)()  # asks again
        assert ckpt.state.keys() == initial_state().keys()


def test_an_error_of_the_function_is_raised_and_the_step_is_not_counted():
    def fail():
        raise ValueError("no optimizer yet")

    with Checkpointer(MemoryStore(), fail) as ckpt:
        for call in (ckpt.resume, ckpt.step, ckpt.save):
            with pytest.raises(ValueError, match="no optimizer yet"):
                call()
        assert ckpt.current_step == 0


def test_the_function_cannot_call_the_checkpointer():
    ckpt: Any = Checkpointer(MemoryStore(), lambda: {"step": ckpt.save().step})
    with ckpt, pytest.raises(LimpetError, match=r"save\(\) was called while resume\(\)"):
        ckpt.resume()


@pytest.mark.parametrize("resumes", [True, False])
def test_an_optimizer_and_a_loader_may_be_created_late(resumes):
    """As frameworks do: the Checkpointer exists first, then the model, then the optimizer."""

    class Loop:
        def __init__(self):
            self.ckpt = Checkpointer(store, self.state, save=EverySteps(2), overlap=True)
            torch.manual_seed(0)
            self.model = torch.nn.Linear(4, 1)
            data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
            self.loader = limpet.DataLoader(data, batch_size=4, shuffle=True, seed=0)
            self.progress = limpet.Progress()

        def state(self):
            names = "model", "optimizer", "loader", "progress"
            return {name: getattr(self, name) for name in names}

        def run(self, last, resumes):
            with self.ckpt as ckpt:
                self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
                if resumes:
                    ckpt.resume()
                while True:
                    for batch in self.loader:
                        if self.progress.step == last:
                            return self.model.weight.detach().clone()
                        self.optimizer.zero_grad()
                        self.model(batch).square().mean().backward()
                        self.optimizer.step()
                        ckpt.step()

    store = MemoryStore()
    whole = Loop().run(7, resumes=True)
    store = MemoryStore()
    Loop().run(4, resumes)
    assert torch.equal(Loop().run(7, resumes=True), whole)
    assert versions(store) == [2, 4, 6, 7]
    training = limpet.open(store.at("version_6")).metadata["training"]
    assert training["options"]["optimizer/lr"] == [0.1]


@pytest.mark.parametrize("resumes", [True, False])
def test_steps_that_the_script_has_set_cause_no_save(resumes):
    def make():
        state = {"weights": np.zeros(3), "progress": limpet.Progress()}
        state["progress"].step = 1000
        return state

    store = MemoryStore()
    with Checkpointer(store, make, save=EverySteps(100)) as ckpt:
        if resumes:
            ckpt.resume()
        for _ in range(100):
            ckpt.step()
    assert versions(store) == [1100]


def test_several_ranks_save_and_resume(tmp_path):
    def work(rank):
        late = Late()
        options = {"save": EverySteps(3), "at_end": False, "preemption": None}
        with Checkpointer(tmp_path / "run", late, **options) as ckpt:
            ckpt.resume()
            for _ in range(4):
                ckpt.step({"loss": train_step(late.state)})
        steps = late.state["progress"].step
        return states_equal(late.state, state_after(steps)), steps

    for steps in (4, 7):
        with FakeGroup(2) as group:
            assert group.run(work) == [(True, steps)] * 2
    assert versions(tmp_path / "run") == [3, 6]
