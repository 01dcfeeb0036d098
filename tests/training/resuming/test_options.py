"""Options of optimizers that the script has changed, and a resume replaces."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import limpet
from limpet.errors import ReplacedOptions
from limpet.training.resuming.options import OptionCheck

Optimizer = torch.optim.Optimizer


def adam(**options: Any) -> Optimizer:
    return torch.optim.Adam(nn.Linear(2, 1).parameters(), **options)


def grouped(*rates: float, **options: Any) -> Optimizer:
    """One group for each rate."""
    groups: Any = [{"params": nn.Linear(2, 1).parameters(), "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, **options)


def train(
    folder: Path,
    optimizer: Optimizer,
    after_resume: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    **more: Any,
) -> list[str]:
    """Resume, and train two steps. Return the warnings about options."""
    start = more.pop("start", None)
    state = {"optimizer": optimizer, "progress": limpet.Progress(), **more}
    with (
        warnings.catch_warnings(record=True) as caught,
        limpet.Checkpointer(folder, state, save=limpet.EverySteps(1)) as ckpt,
    ):
        warnings.simplefilter("always")
        ckpt.resume(start=start)
        after_resume()
        for _ in range(2):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            after_step()
            ckpt.step()
    found = [w for w in caught if w.category is ReplacedOptions]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def test_a_changed_option_is_named_at_each_start_until_it_is_changed_back(tmp_path: Path) -> None:
    train(tmp_path, adam(lr=0.1, weight_decay=0.1))
    for _ in range(2):
        optimizer = adam(lr=0.1, weight_decay=0.2, amsgrad=False, betas=(0.8, 0.999))
        (warning,) = train(tmp_path, optimizer)
        assert "optimizer/weight_decay is 0.1, not 0.2" in warning
        assert "optimizer/betas is [0.9, 0.999], not [0.8, 0.999]" in warning
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        assert "lr" not in warning
        assert "amsgrad" not in warning
    assert train(tmp_path, adam(lr=0.1, weight_decay=0.1)) == []


def test_another_class_with_the_same_slots_is_noticed(tmp_path: Path) -> None:
    train(tmp_path, adam(weight_decay=0.1))
    optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters(), weight_decay=0.1)
    (warning,) = train(tmp_path, optimizer)
    assert "optimizer/decoupled_weight_decay is False, not True" in warning


def test_options_that_the_training_changes_are_not_reported(tmp_path: Path) -> None:
    """A loop that decays the rate and the weight decay by hand."""
    for _ in range(3):
        optimizer = adam(lr=0.1, weight_decay=0.2)

        def decay(group: dict[str, Any] = optimizer.param_groups[0]) -> None:
            group["lr"] *= 0.5
            group["weight_decay"] *= 0.5

        assert train(tmp_path, optimizer, after_step=decay) == []
    assert "lr is" in train(tmp_path, adam(lr=0.3, weight_decay=0.2))[0]


@pytest.mark.parametrize("cycles", [False, True])
def test_options_that_a_scheduler_changes_are_not_reported(cycles: bool, tmp_path: Path) -> None:
    def run(rate: float) -> list[str]:
        optimizer = adam(lr=rate)
        scheduler = (
            OneCycleLR(optimizer, rate, total_steps=50) if cycles else ExponentialLR(optimizer, 0.5)
        )
        return train(tmp_path, optimizer, after_step=scheduler.step, scheduler=scheduler)

    for _ in range(3):
        assert run(0.1) == []
    (warning,) = run(0.3)
    assert "optimizer/initial_lr is" in warning
    assert "/lr is" not in warning


def set_after_resume(optimizer: Optimizer, rate: float) -> Callable[[], None]:
    def set_rate() -> None:
        optimizer.param_groups[0]["lr"] = rate

    return set_rate


def decay_of(optimizer: Optimizer) -> Callable[[], None]:
    def decay() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    return decay


def test_an_option_that_is_set_after_the_resume_is_that_of_the_script(tmp_path: Path) -> None:
    """The recipe of docs/resume.md in a loop that decays the rate: only the first start warns."""
    train(tmp_path, adam(lr=0.1, weight_decay=0.1))
    for number in range(4):
        optimizer = adam(lr=0.3, weight_decay=0.1)
        found = train(tmp_path, optimizer, set_after_resume(optimizer, 0.3), decay_of(optimizer))
        assert len(found) == (number == 0)
    for _ in range(2):  # the other options still count
        optimizer = adam(lr=0.4, weight_decay=0.2)
        found = train(tmp_path, optimizer, set_after_resume(optimizer, 0.4), decay_of(optimizer))
        assert len(found) == 1
        assert "weight_decay is 0.1, not 0.2" in found[0]
    assert "lr is" not in found[0]


def test_a_rate_that_the_loop_computes_is_reported_once(tmp_path: Path) -> None:
    train(tmp_path, adam(lr=0.1))
    for number in range(3):
        optimizer = adam(lr=0.3)
        found = train(tmp_path, optimizer, after_step=set_after_resume(optimizer, 0.01 * number))
        assert len(found) == (number == 0)


def test_the_recipe_for_schedulers_is_reported_once(tmp_path: Path) -> None:
    def run(rate: float, number: int) -> list[str]:
        optimizer = adam(lr=rate)
        scheduler = ExponentialLR(optimizer, 0.5)

        def set_rate() -> None:
            if number == 1:
                optimizer.param_groups[0]["lr"] = rate
                scheduler.base_lrs = [rate]

        return train(tmp_path, optimizer, set_rate, scheduler.step, scheduler=scheduler)

    assert [len(run(0.1 if n == 0 else 0.3, n)) for n in range(4)] == [0, 1, 0, 0]


def test_the_options_of_each_group_are_compared(tmp_path: Path) -> None:
    train(tmp_path, grouped(0.1, 0.2, 0.3))
    assert train(tmp_path, grouped(0.1, 0.2, 0.3)) == []
    (warning,) = train(tmp_path, grouped(0.1, 0.5, 0.3))
    assert "optimizer/1/lr is 0.2, not 0.5" in warning
    assert "/0/" not in warning
    (warning,) = train(tmp_path, grouped(0.2, 0.2, 0.2, weight_decay=0.5))
    for part in ("0/lr is 0.1, not 0.2", "2/lr is 0.3, not 0.2", "2/weight_decay is 0.01, not 0.5"):
        assert part in warning
    assert "1/lr" not in warning


def test_a_version_stores_the_options_once(tmp_path: Path) -> None:
    train(tmp_path, grouped(*[0.1] * 1000, 0.2))
    snapshot = limpet.Run(tmp_path).latest()
    assert snapshot is not None
    recorded = snapshot.metadata["training"]["options"]
    first, *others = recorded["optimizer"]
    assert first["lr"] == 0.1
    assert others == [{}] * 63
    assert len(json.dumps(recorded)) < 1000


def test_a_second_resume_in_one_process_compares_the_options_of_the_script(tmp_path: Path) -> None:
    """A notebook cell that is run twice: the first training has changed the rate."""
    optimizer = adam(lr=0.1)

    def decay() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    for _ in range(2):
        assert train(tmp_path, optimizer, after_step=decay) == []


def test_a_start_from_another_run_replaces_options_too(tmp_path: Path) -> None:
    train(tmp_path / "a", adam(lr=0.1))
    start = f"{tmp_path / 'a'}@latest"
    for folder in (tmp_path / "b", tmp_path / "b"):
        (warning,) = train(folder, adam(lr=0.3), start=start)
        assert "optimizer/lr is 0.1, not 0.3" in warning


def test_versions_without_a_valid_record_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an earlier release, or of another program."""
    for number, record in enumerate(({}, {"options": 1}, {"options": {"optimizer": [3]}})):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(OptionCheck, "to_metadata", lambda self, record=record: record)
            train(folder, adam(lr=0.1))
        assert train(folder, adam(lr=0.3)) == []
        assert train(folder, adam(lr=0.3)) == []
        assert len(train(folder, adam(lr=0.5))) == 1


def test_tensors_and_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    for lr in (torch.tensor(0.1), torch.tensor(0.2)):
        optimizer = adam(lr=lr, capturable=False, foreach=False)
        optimizer.param_groups[0]["max_norm"] = float("inf")
        assert train(tmp_path, optimizer) == []


def test_one_optimizer_for_two_runs(tmp_path: Path) -> None:
    """The second stage begins with the rate at the end of the first one, in each process."""
    for _ in range(2):
        optimizer = adam(lr=0.1)
        for folder in ("a", "b"):
            decay = decay_of(optimizer)
            assert train(tmp_path / folder, optimizer, after_step=decay) == []
            optimizer.param_groups[0]["lr"] = 0.05


class Equal(torch.optim.SGD):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Composite(torch.optim.SGD):
    """Consists of two optimizers, and has its own kind of groups."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1).parameters(), lr=0.1)
        self.param_groups = [{"lr": 0.1}, 3]  # type: ignore[list-item]

    def step(self, closure: Any = None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_unusual_optimizers_do_not_end_a_resume(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        state = {"equal": Equal(nn.Linear(2, 1).parameters(), lr=lr), "composite": Composite()}
        with (
            warnings.catch_warnings(record=True) as caught,
            limpet.Checkpointer(tmp_path, state, save=limpet.EverySteps(1)) as ckpt,
        ):
            warnings.simplefilter("always")
            ckpt.resume()
            ckpt.step()
    (found,) = [str(w.message) for w in caught if w.category is ReplacedOptions]
    assert "equal/lr is 0.1, not 0.2" in found


def test_unusual_values_do_not_end_a_resume(tmp_path: Path) -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    values: list[Any] = [(0.9, 0.99), np.float64(0.8), "a" * 1000, [1] * 1000, object(), "\x1b[31m"]
    for number, value in enumerate(values):
        optimizer = adam(lr=0.1)
        optimizer.param_groups[0]["gamma"] = value if number != 4 else 1.0
        found = train(tmp_path, optimizer)
        assert len(found) == (number in (1, 5))
        assert all(part not in "".join(found) for part in ("np.", "\x1b"))
        optimizer = adam(lr=0.1)
        optimizer.param_groups[0]["gamma"] = value
        OptionCheck("run", {"o": optimizer, "list": endless}, 0).begin()


def test_an_optimizer_of_one_rank_is_compared(tmp_path: Path) -> None:
    train(tmp_path, adam(), own=limpet.PerRank({"o": adam(lr=0.1)}))
    (warning,) = train(tmp_path, adam(), own=limpet.PerRank({"o": adam(lr=0.3)}))
    assert "own/o/lr is 0.1, not 0.3" in warning


def test_the_record_is_bounded(tmp_path: Path) -> None:
    optimizers = [adam(lr=0.1) for _ in range(300)]
    with limpet.Checkpointer(tmp_path, {"o": optimizers}, save=limpet.AtEnd()) as ckpt:
        ckpt.resume()
        ckpt.step()
    snapshot = limpet.Run(tmp_path).latest()
    assert snapshot is not None
    assert len(json.dumps(snapshot.metadata["training"]["options"])) < 20_000
