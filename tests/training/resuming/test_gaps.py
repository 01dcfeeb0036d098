"""The warning at the first step about what the state lacks for an exact resume."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import limpet
from limpet.errors import InexactResume
from limpet.preemption import PreemptionGuard
from limpet.training.resuming import gaps

pytestmark = pytest.mark.usefixtures("find_live")

DATA = TensorDataset(torch.arange(12.0).reshape(12, 1))


def model_of(*layers: nn.Module) -> nn.Module:
    first = nn.Linear(1, 4)
    for parameter in first.parameters():
        nn.init.constant_(parameter, -1.0)  # RReLU draws for negative values only
    return nn.Sequential(first, *layers)


def warnings_of_steps(
    folder: Path,
    state: dict[str, Any],
    loader: Iterable[Any],
    before_step: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[str]:
    """Train as a user does, and return the warnings about gaps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limpet.Checkpointer(folder / "run", state, **options) as ckpt:
            ckpt.resume()
            for batch in loader:
                for model in (v for v in state.values() if isinstance(v, nn.Module)):
                    model(batch[0] if isinstance(batch, list) else torch.ones(1, 1))
                before_step()
                ckpt.step()
    return [str(w.message) for w in caught if w.category is InexactResume]


class Position:
    """A loader or sampler of the user."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_one_warning_lists_all_that_is_lacking(tmp_path: Path) -> None:
    model = model_of(nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model, "optimizer": optimizer}
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    (warning,) = warnings_of_steps(tmp_path, state, loader)
    for part in ("no RNG", "Dropout", "a shuffling DataLoader", "no position", "StepLR", "keep"):
        assert part in warning
    del scheduler


def test_a_complete_state_causes_no_warning(tmp_path: Path) -> None:
    model = model_of(nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = torch.optim.lr_scheduler.LinearLR(optimizer)
    second = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [5])
    sampler = limpet.ElasticSampler(len(DATA), batch_size=2)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    state |= {"rng": limpet.RNG(), "progress": limpet.Progress()}
    assert warnings_of_steps(tmp_path, state, DataLoader(DATA, batch_sampler=sampler)) == []


# -- random numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Dropout(0.1), "Dropout"),
        (nn.Dropout2d(0.1), "Dropout2d"),
        (nn.AlphaDropout(0.1), "AlphaDropout"),
        (nn.RReLU(), "RReLU"),
        (nn.Dropout(0.0), ""),
        (nn.Dropout(0.1).eval(), ""),
        (nn.ReLU(), ""),
    ],
)
def test_modules_that_draw(layer: nn.Module, name: str, tmp_path: Path) -> None:
    found = warnings_of_steps(tmp_path, {"model": model_of(layer)}, range(2))
    assert len(found) == bool(name)
    assert not name or f"drawn by {name}" in found[0]


def test_a_dropout_that_draws_nothing_is_no_gap(tmp_path: Path) -> None:
    model = model_of()
    model.register_module("unused", nn.Dropout(0.5))
    model.forward = model[0].forward  # type: ignore[method-assign]
    assert warnings_of_steps(tmp_path, {"model": model}, range(2)) == []


def test_the_users_own_generator_states_are_recognized(tmp_path: Path) -> None:
    state = {"model": model_of(nn.Dropout()), "torch_rng": torch.get_rng_state()}
    assert warnings_of_steps(tmp_path, state, range(2)) == []
    state = {"model": model_of(nn.Dropout()), "rng": limpet.PerRank(limpet.RNG())}
    assert warnings_of_steps(tmp_path / "b", state, range(2)) == []


def test_draws_of_other_code_are_not_reported(tmp_path: Path) -> None:
    def draw() -> None:
        random.random(), np.random.random(), torch.rand(1)

    assert warnings_of_steps(tmp_path, {"model": model_of()}, range(2), draw) == []


# -- the position in the data ----------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(6.0).reshape(6, 1))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, batch_size=2), True),
        (DataLoader(Stream(), batch_size=2), True),
        (DataLoader(DATA, batch_size=12), False),  # one batch: every epoch begins anew
        ([[torch.ones(1, 1)]] * 3, False),  # not a DataLoader: nothing is known
    ],
)
def test_a_loader_without_a_position(loader: Any, expected: bool, tmp_path: Path) -> None:
    found = warnings_of_steps(tmp_path, {"model": model_of()}, loader)
    assert ["no position in the data" in w for w in found] == [True] * expected
    assert not any("RNG" in w for w in found)  # the seed of the workers is no reason


def test_a_loader_that_is_not_used_is_no_gap(tmp_path: Path) -> None:
    evaluation = DataLoader(DATA, batch_size=2, shuffle=True)
    waiting = iter(evaluation)  # has yielded nothing
    assert warnings_of_steps(tmp_path, {"model": model_of()}, range(2)) == []
    del waiting


def test_an_iterator_of_an_earlier_cell_is_no_gap(tmp_path: Path) -> None:
    stale = iter(DataLoader(DATA, batch_size=2, shuffle=True))
    next(stale)  # the traceback of an interrupted cell keeps it alive
    assert warnings_of_steps(tmp_path / "a", {"model": model_of()}, range(2)) == []
    loader = DataLoader(DATA, batch_size=2)
    (warning,) = warnings_of_steps(tmp_path / "b", {"model": model_of()}, loader)
    assert "no position" in warning
    assert "shuffling" not in warning
    (warning,) = warnings_of_steps(tmp_path / "c", {"model": model_of()}, stale)  # goes on
    assert "shuffling" in warning


def test_a_position_of_the_user_is_recognized(tmp_path: Path) -> None:
    loader = DataLoader(DATA, batch_size=2)
    state: dict[str, Any] = {"model": model_of(), "data": Position()}
    assert warnings_of_steps(tmp_path / "a", state, loader) == []

    state = {"model": model_of(), "batch": 0, "epoch": 0}
    count = {"batch": 0}

    def add() -> None:
        count["batch"] += 1
        state["batch"] = count["batch"]

    assert warnings_of_steps(tmp_path / "b", state, loader, add) == []

    progress = limpet.Progress()
    state = {"model": model_of(), "progress": progress}

    def add_samples() -> None:
        progress.samples += 2

    assert warnings_of_steps(tmp_path / "c", state, loader, add_samples) == []
    # an epoch alone is no position
    state = {"model": model_of(), "epoch": 0, "progress": limpet.Progress()}
    assert len(warnings_of_steps(tmp_path / "d", state, loader)) == 1


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (limpet.AtEnd(), 0),
        (limpet.AtEnd() | limpet.OnException(), 1),
        (limpet.EverySteps(2), 1),
        (limpet.AtEnd() | limpet.EverySeconds(600), 1),
    ],
)
def test_a_training_that_saves_between_epochs_needs_no_position(
    policy: limpet.SavePolicy, expected: int, tmp_path: Path
) -> None:
    loader = DataLoader(DATA, batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limpet.Checkpointer(tmp_path, {"model": model_of()}, save=policy) as ckpt:
            ckpt.resume()
            for _ in loader:
                ckpt.step()
    assert [w.category for w in caught].count(InexactResume) == expected


def test_a_shuffling_loader_with_its_own_generator_needs_no_rng(tmp_path: Path) -> None:
    sampler = RandomSampler(DATA, generator=torch.Generator())
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    (warning,) = warnings_of_steps(tmp_path, {"model": model_of()}, loader)
    assert "RNG" not in warning


# -- schedulers ------------------------------------------------------------------------------------


def test_a_scheduler_of_another_optimizer_is_no_gap(tmp_path: Path) -> None:
    model = model_of()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(other, 10)
    state = {"model": model, "optimizer": optimizer}
    assert warnings_of_steps(tmp_path, state, range(2)) == []
    discarded = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    del discarded
    assert warnings_of_steps(tmp_path / "b", state, range(2)) == []
    del scheduler


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_scheduler_inside_an_object_of_the_state_is_no_gap(in_dict: bool, tmp_path: Path) -> None:
    class Schedules(Position):
        def __init__(self, *schedulers: Any) -> None:
            self.schedulers = dict(enumerate(schedulers)) if in_dict else schedulers

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model, "optimizer": optimizer, "schedules": Schedules(scheduler)}
    assert warnings_of_steps(tmp_path, state, range(2)) == []


# -- when ------------------------------------------------------------------------------------------


def test_a_training_that_saves_nothing_is_not_checked(tmp_path: Path) -> None:
    state = {"model": model_of(nn.Dropout())}
    assert warnings_of_steps(tmp_path, state, range(2), save=limpet.Never()) == []


def test_a_save_before_the_first_step_is_not_the_first_step(tmp_path: Path) -> None:
    model = model_of(nn.Dropout())
    with limpet.Checkpointer(tmp_path / "run", {"model": model}) as ckpt:
        ckpt.save()
        model(torch.ones(1, 1))
        with pytest.warns(InexactResume, match="Dropout"):
            ckpt.step()


def test_the_steps_of_a_guarded_call_are_checked(tmp_path: Path) -> None:
    model = model_of(nn.Dropout())
    with limpet.Checkpointer(tmp_path / "run", {"model": model}) as ckpt:

        def step() -> None:
            model(torch.ones(1, 1))
            ckpt.step()

        with pytest.warns(InexactResume, match="Dropout"):
            PreemptionGuard(ckpt).run(step)


def test_live_objects_are_searched_only_if_something_may_be_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search takes up to 0.1 s for a million objects."""
    searches: list[None] = []
    monkeypatch.setattr(gaps, "_find_live", lambda: (searches.append(None), ([], []))[1])
    model = model_of(nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = limpet.ElasticSampler(len(DATA), batch_size=2)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler, "rng": limpet.RNG()}
    assert warnings_of_steps(tmp_path, state, DataLoader(DATA, batch_sampler=sampler)) == []
    assert searches == []
    del state["rng"]
    warnings_of_steps(tmp_path / "b", state, DataLoader(DATA, batch_sampler=sampler))
    assert searches == [None] * 2  # one at the creation, for iterators of an earlier cell
