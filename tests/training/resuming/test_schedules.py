"""Arguments of schedulers that a resume replaces, and a training that becomes longer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import limpet
from limpet.errors import ReplacedSchedule

Make = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]

MAKES: dict[str, Make] = {
    "OneCycleLR": lambda o, n: lr_scheduler.OneCycleLR(o, 0.1, total_steps=n),
    "CosineAnnealingLR": lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n),
    "LinearLR": lambda o, n: lr_scheduler.LinearLR(o, 0.5, 0.1, total_iters=n),
    "PolynomialLR": lambda o, n: lr_scheduler.PolynomialLR(o, n, 2.0),
    "SequentialLR": lambda o, n: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, n - 3)],
        [3],
    ),
}


def make_state(make: Make, steps: int) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer, steps)
    progress = limpet.Progress()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}


def train(
    folder: Path, make: Make, steps: int, *, longer: bool = False, stop_at: int | None = None
) -> tuple[list[float], list[str]]:
    """Train until ``steps``, as docs/resume.md describes. Return the learning rates of the steps,
    and the warnings about schedulers."""
    state = make_state(make, steps)
    optimizer, scheduler, progress = state["optimizer"], state["scheduler"], state["progress"]
    rates = []
    with (
        warnings.catch_warnings(record=True) as caught,
        limpet.Checkpointer(folder, state, save=limpet.EverySteps(1)) as ckpt,
    ):
        warnings.simplefilter("always")
        own = scheduler.state_dict()
        ckpt.resume()
        if longer:
            made = scheduler.last_epoch
            scheduler.load_state_dict(own)
            for group, rate in zip(optimizer.param_groups, own["_last_lr"], strict=True):
                group["lr"] = rate
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(made):
                    scheduler.step()
        while progress.step < (stop_at or steps):
            rates.append(optimizer.param_groups[0]["lr"])
            state["model"](torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
            ckpt.step()
    found = [w for w in caught if w.category is ReplacedSchedule]
    assert all(w.filename == __file__ for w in found)
    return rates, [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("OneCycleLR", "scheduler/total_steps is 10, not 20"),
        ("CosineAnnealingLR", "scheduler/T_max is 10, not 20"),
        ("LinearLR", "scheduler/total_iters is 10, not 20"),
        ("PolynomialLR", "scheduler/total_iters is 10, not 20"),
        ("SequentialLR", "scheduler/_schedulers/1/T_max is 7, not 17"),
    ],
)
def test_a_training_that_becomes_longer(name: str, part: str, tmp_path: Path) -> None:
    make = MAKES[name]
    train(tmp_path / "run", make, 10)
    assert train(tmp_path / "run", make, 10)[1] == []
    rates, (warning,) = train(tmp_path / "run", make, 20, longer=True, stop_at=15)
    assert f"{tmp_path / 'run' / 'version_10'} differ from those of the script: {part}. " in warning
    rates += (more := train(tmp_path / "run", make, 20, longer=True))[0]
    assert more[1] == []  # the versions have the new length now
    expected, _ = train(tmp_path / "other", make, 20)
    assert rates == expected[10:]
    assert train(tmp_path / "run", make, 20) == ([], [])


def test_what_changes_during_a_training_is_no_argument(tmp_path: Path) -> None:
    class Own(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
            self.factor = factor
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            self.factor *= 0.9
            return [0.1 * self.factor for _ in self.optimizer.param_groups]

    def restarts(optimizer: torch.optim.Optimizer, _: int) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2)

    makes: list[Make] = [lambda o, _: Own(o, 1.0), restarts]
    for number, make in enumerate(makes):
        for steps in (5, 10):
            assert train(tmp_path / str(number), make, steps)[1] == []
