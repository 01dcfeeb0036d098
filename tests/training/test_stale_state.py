"""A version of a state that nobody trains: the optimizer steps, but no trainable leaf changes."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import InexactResume, LimpetError, PlanError, StateUnchanged
from limpet.run.policy import AtEnd, EverySteps, OnException
from limpet.run.run import Run
from limpet.saving import stale_state
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.unreliable_stores import HookedStore

SMALL, LARGE = 4, 160
"""Widths of a layer: its weight shares a chunk with other leaves, or has chunks of its own."""


class Training:
    """A model that trains. ``live`` holds the objects that the loop uses."""

    def __init__(self, width: int = SMALL, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.width = width

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "rng": limpet.RNG()}

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().mean().backward()
        self.optimizer.step()


@contextmanager
def stale_warnings(count: int) -> Iterator[list[Any]]:
    """Assert that the block issues this number of warnings, all of them ``StateUnchanged``, apart
    from the one about an optimizer of another model, which comes at the first step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "(?s).*no module in the state has them", InexactResume)
        yield caught
    assert [w.category for w in caught] == [StateUnchanged] * count, [
        str(w.message) for w in caught
    ]


def run_steps(training: Training, state: dict[str, Any], steps: int = 4, **options: Any) -> Any:
    """Make steps, and save after each. Return the store."""
    store = options.pop("store", None) or MemoryStore()
    options = {"save": EverySteps(1), **options}
    with Checkpointer(store, state, **options) as ckpt:
        for _ in range(steps):
            training.train_step()
            ckpt.step()
            ckpt.wait()
    return store


def copied_state(training: Training) -> dict[str, Any]:
    """Return a state that was copied as a whole."""
    model = copy.deepcopy(training.model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "n": [0]}


def copied_model(training: Training) -> dict[str, Any]:
    """Return a state with the optimizer that trains, but with a copy of the model."""
    return {**training.state, "model": copy.deepcopy(training.model)}


def copied_tensors(training: Training) -> dict[str, Any]:
    """Return a state with a state dict of copies, as some libraries return it."""
    tensors = {name: t.detach().clone() for name, t in training.model.state_dict().items()}
    return {"model": tensors, "rng": limpet.RNG()}


class CachedStateDict:
    """An object that looks up the tensors once and then saves these, as in NeMo-RL#3312."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.cached = {name: t.detach().clone() for name, t in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return self.cached

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cached = state


def cached_tensors(training: Training) -> dict[str, Any]:
    return {"model": CachedStateDict(training.model)}


STALE = (copied_state, copied_model, copied_tensors, cached_tensors)


@pytest.mark.parametrize("options", [{}, {"incremental": True}], ids=str)
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("make_state", STALE)
def test_a_copy_of_the_model_causes_one_warning(
    make_state: Callable[[Training], dict[str, Any]], width: int, options: dict[str, Any]
) -> None:
    training = Training(width)
    with stale_warnings(1) as caught:
        store = run_steps(training, make_state(training), **options)
    message = str(caught[0].message)
    assert "has changed since version_1, although an optimizer has stepped" in message
    assert "model/0.bias, model/0.weight" in message
    is_unknown = make_state in (copied_tensors, cached_tensors)  # no tensor requires a gradient
    assert ("running_mean" in message) == is_unknown
    assert caught[0].filename == __file__
    assert [s.step for s in Run(store).snapshots()] == [1, 2, 3, 4]


def test_a_large_copy_with_overlap_is_found() -> None:
    """The small leaves are not staged when the save begins, but before it is written."""
    training = Training(LARGE)
    with stale_warnings(1):
        run_steps(training, copied_state(training), overlap=True)


def test_a_live_state_that_gets_no_gradients_causes_a_warning() -> None:
    training = Training()
    training.train_step = training.optimizer.step  # type: ignore[method-assign,assignment]
    with stale_warnings(1):
        run_steps(training, training.state)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_the_loaded_data_after_a_stale_save_raises_on_request(width: int) -> None:
    """Nothing is committed, so that no resume takes the stale version for the newest one."""
    training, store = Training(width), MemoryStore()
    model = copy.deepcopy(training.model)
    state = {"model": model, "optimizer": training.optimizer}
    options: dict[str, Any] = {"save": EverySteps(100), "on_unchanged": "raise"}
    with stale_warnings(0), Checkpointer(store, state, on_error="warn", **options) as ckpt:
        training.train_step()
        ckpt.step()
        ckpt.save()
        for _ in range(2):
            training.train_step()
            ckpt.step()
            with pytest.raises(PlanError, match=r"Nothing was committed.*since version_1") as e:
                ckpt.save()
            assert e.value.leaves == tuple(
                sorted(f"model/{n}" for n, _ in model.named_parameters())
            )
        assert [s.step for s in Run(store).snapshots()] == [1]
        model.load_state_dict(training.model.state_dict())  # the user corrects the mistake
        ckpt.save()
    assert [s.step for s in Run(store).snapshots()] == [1, 3]


def test_a_background_save_raises_at_the_next_step_whatever_on_error_says() -> None:
    training, store = Training(), MemoryStore()
    options: dict[str, Any] = {"on_unchanged": "raise", "on_error": "warn"}
    with pytest.raises(PlanError, match="no trainable leaf has changed"):
        run_steps(training, copied_state(training), store=store, **options)
    assert [s.step for s in Run(store).snapshots()] == [1]


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_an_invalid_choice_is_refused(value: Any) -> None:
    with pytest.raises(LimpetError, match="Invalid value for on_unchanged="):
        Checkpointer(MemoryStore(), {"x": 1}, on_unchanged=value)


def test_frozen_leaves_do_not_count() -> None:
    training = Training(LARGE)
    for p in training.model[0].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    with stale_warnings(0):
        run_steps(training, training.state)
    with stale_warnings(1) as caught:
        run_steps(training, copied_state(training))
    assert "model/0" not in str(caught[0].message)
    assert "model/2.weight" in str(caught[0].message)


# -- no false alarms -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_training_causes_no_warning(optimizer: Any, width: int, options: dict[str, Any]) -> None:
    training = Training(width, optimizer)
    with stale_warnings(0):
        run_steps(training, training.state, **options)


def no_steps(training: Training) -> None:
    """Evaluate: buffers and random generators change, and no optimizer steps."""
    training.model(torch.randn(8, training.width))


def zero_rate(training: Training) -> None:
    """Warm up: the schedule begins with a learning rate of 0."""
    training.optimizer.param_groups[0]["lr"] = 0.0
    Training.train_step(training)


def zero_rate_tensor(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    Training.train_step(training)


def skipped_by_scaler(training: Training) -> None:
    """Skip a step whose gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu")
    training.optimizer.zero_grad()
    loss = training.model(torch.randn(8, training.width)).square().mean()
    scaler.scale(loss * float("inf")).backward()
    scaler.step(training.optimizer)


def skipped_inside(training: Training) -> None:
    """Skip a step as a fused optimizer does, which gets the flag of the ``GradScaler``."""
    training.optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    training.optimizer.zero_grad()
    training.optimizer.step()
    del training.optimizer.found_inf  # type: ignore[attr-defined]


def other_optimizer(training: Training) -> None:
    """Train another model in the same process."""
    other = torch.nn.Linear(3, 7)
    other(torch.randn(8, 3)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    "step",
    [no_steps, zero_rate, zero_rate_tensor, skipped_by_scaler, skipped_inside, other_optimizer],
)
def test_an_unchanged_state_without_a_step_causes_no_warning(
    step: Callable[[Training], None],
) -> None:
    training = Training()
    training.train_step()
    training.train_step = lambda: step(training)  # type: ignore[method-assign]
    with stale_warnings(0):
        run_steps(training, training.state)


def test_one_changed_leaf_is_enough() -> None:
    training = Training(LARGE, torch.optim.SGD)
    bias = training.model[2].bias  # type: ignore[index]
    training.optimizer = torch.optim.SGD([bias], lr=0.1)
    with stale_warnings(0):
        run_steps(training, {"model": training.model})


def test_alternating_phases_with_other_frozen_parts_cause_no_warning() -> None:
    """The layout stays the same. Each phase trains another part and freezes the rest."""
    training = Training(SMALL, torch.optim.SGD)
    parts = [training.model[0], training.model[2]]  # type: ignore[index]
    phase = [0]

    def step() -> None:
        for number, part in enumerate(parts):
            part.requires_grad_(number == phase[0] % 2)
        phase[0] += 1
        Training.train_step(training)

    training.train_step = step  # type: ignore[method-assign]
    with stale_warnings(0):
        run_steps(training, {"model": training.model}, steps=6)


def test_a_layout_that_changes_with_every_save_causes_no_false_alarm() -> None:
    training = Training(LARGE)
    state = {**training.state, "history": torch.zeros(1)}
    training_step = training.train_step

    def step() -> None:
        training_step()
        state["history"] = torch.zeros(len(state["history"]) * 2)

    training.train_step = step  # type: ignore[method-assign]
    with stale_warnings(0):
        run_steps(training, state)


def test_a_stale_state_is_found_beside_a_leaf_that_grows() -> None:
    training = Training(LARGE)
    state = {**copied_state(training), "z": torch.zeros(1, dtype=torch.uint8)}
    training_step = training.train_step

    def step() -> None:
        training_step()
        state["z"] = torch.zeros(len(state["z"]) + 1, dtype=torch.uint8)

    training.train_step = step  # type: ignore[method-assign]
    with stale_warnings(1):
        run_steps(training, state)


def test_a_state_of_arrays_is_not_checked() -> None:
    training = Training()
    with stale_warnings(0):
        run_steps(training, {"x": np.zeros(3), "n": 1})


def test_a_save_after_an_exception_is_not_checked() -> None:
    training, store = Training(), MemoryStore()
    policy = EverySteps(1) | OnException()
    options: dict[str, Any] = {"save": policy, "on_unchanged": "raise"}
    with (
        pytest.raises(ValueError, match="NaN"),
        Checkpointer(store, training.state, **options) as ckpt,
    ):
        training.train_step()
        ckpt.step()
        training.train_step()
        ckpt.step()
        raise ValueError("NaN")
    assert [s.step for s in Run(store).snapshots()] == [1, 2]


def test_the_first_version_after_a_resume_is_not_compared() -> None:
    training = Training()
    store = run_steps(training, training.state)
    state = copied_state(training) | {"rng": limpet.RNG()}
    del state["n"]
    with stale_warnings(1) as caught, Checkpointer(store, state, save=AtEnd()) as ckpt:
        assert ckpt.resume() is not None  # a loop may know where it is
        for _ in range(2):
            training.train_step()
            ckpt.step()
            ckpt.save()
    assert "since version_5" in str(caught[0].message)


# -- costs ---------------------------------------------------------------------------------------


def test_the_check_reads_and_writes_nothing() -> None:
    """A training whose state is checked makes the same calls as one whose state has no tensors."""
    counts = []
    for is_checked in (True, False):
        calls = Counter[str]()
        store = HookedStore(MemoryStore())
        store.before = lambda method, key, calls=calls: calls.update([method])
        training = Training()
        run_steps(training, training.state if is_checked else {"x": np.zeros(3)}, store=store)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert "get_range" not in counts[0]


def test_the_leaves_are_examined_once_per_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    examine = stale_state.storage_address
    monkeypatch.setattr(stale_state, "storage_address", lambda t: (calls.append(t), examine(t))[1])
    training = Training()
    with Checkpointer(MemoryStore(), training.state, save=EverySteps(1)) as ckpt:
        counts = []
        for _ in range(4):
            training.train_step()
            ckpt.step()
            counts.append(len(calls))
            calls.clear()
    # the second count is for the parameters of the optimizer, at its first step since then
    assert counts[0] > counts[1] > counts[2] == counts[3] == 0


def test_the_hook_of_a_closed_checkpointer_is_removed() -> None:
    training = Training()
    ckpt = Checkpointer(MemoryStore(), training.state, save=EverySteps(1))
    training.train_step()
    ckpt.step()
    count = ckpt._saver.checks.stale._steps
    assert count is not None
    training.train_step()
    assert count.count == 1
    ckpt.close()
    training.train_step()
    assert count.count == 1
