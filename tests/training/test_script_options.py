"""Options of optimizers that the script has changed, and a resume replaces."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import limpet
from limpet.training import state_check

Optimizer = torch.optim.Optimizer


def adam(**options):
    return torch.optim.Adam(nn.Linear(2, 1).parameters(), **options)


def train(folder, optimizer, after_step=lambda: None, is_resumed=True, **more):
    """Resume, and train two steps. Return the texts of the event about options."""
    start, found = more.pop("start", None), list[str]()
    state = {"optimizer": optimizer, "progress": limpet.Progress(), **more}

    def sink(name, fields):
        if name == "options_replaced":
            found.extend(fields["options"])

    with limpet.attach(sink), limpet.Checkpointer(folder, state, save=limpet.EverySteps(1)) as ckpt:
        if is_resumed:
            ckpt.resume(start=start)
        for _ in range(2):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            after_step()
            ckpt.step()
    return found


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_changed_option_is_named_at_the_next_start(is_resumed, tmp_path):
    """Every version records the options, also in a process that never calls ``resume``."""
    train(tmp_path, adam(lr=0.001, weight_decay=0.1), is_resumed=is_resumed)
    optimizer = adam(lr=0.0001, weight_decay=0.1, betas=(0.8, 0.9))
    found = train(tmp_path, optimizer)
    assert found == [
        "optimizer/lr: the script has 0.0001, had 0.001; the version's 0.001 is in use",
        "optimizer/betas: the script has [0.8, 0.9], had [0.9, 0.999]; the version's [0.9, 0.999]"
        " is in use",
    ]
    assert optimizer.param_groups[0]["lr"] == 0.001
    assert train(tmp_path, adam(lr=0.0001, weight_decay=0.1, betas=(0.8, 0.9))) == []


def test_options_that_the_training_changes_are_not_reported(tmp_path):
    for _ in range(3):
        optimizer = adam(lr=0.1)
        scheduler = ExponentialLR(optimizer, 0.5)
        assert train(tmp_path, optimizer, scheduler.step, scheduler=scheduler) == []
    optimizer = adam(lr=0.3)
    scheduler = ExponentialLR(optimizer, 0.5)
    found = train(tmp_path, optimizer, scheduler.step, scheduler=scheduler)
    assert (
        found[0] == "optimizer/lr: the script has 0.3, had 0.1; the version's 0.0015625 is in use"
    )


def test_the_options_of_each_group_and_optimizer_are_compared(tmp_path):
    def grouped(*rates):
        groups: Any = [{"params": nn.Linear(2, 1).parameters(), "lr": rate} for rate in rates]
        return torch.optim.AdamW(groups)

    def run(*rates, own=0.1):
        return train(tmp_path, grouped(*rates), own=limpet.PerRank([adam(lr=own)]))

    assert run(0.1, 0.2, 0.2) == []
    assert run(0.1, 0.2, 0.2) == []
    (text,) = run(0.1, 0.5, 0.2)
    assert text.startswith("optimizer/lr: the script has [0.1, 0.5, 0.2], had [0.1, 0.2, 0.2]; ")
    (text,) = run(0.1, 0.5, 0.2, own=0.3)
    assert text.startswith("own/0/lr: the script has 0.3, had 0.1")


def test_a_start_from_another_run_replaces_options_too(tmp_path):
    train(tmp_path / "a", adam(lr=0.1))
    (text,) = train(tmp_path / "b", adam(lr=0.3), start=f"{tmp_path / 'a'}@latest")
    assert text.startswith("optimizer/lr: the script has 0.3, had 0.1")


class Composite(torch.optim.SGD):
    """Has its own kind of groups."""

    def __init__(self):
        super().__init__(nn.Linear(2, 1).parameters(), lr=0.1)
        self.param_groups = [{"lr": 0.1, 7: 3}, 3]

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        pass


def test_only_a_bounded_number_of_plain_options_is_recorded(tmp_path):
    optimizer = adam(lr=np.float64(0.1))
    odd = [float("inf"), torch.tensor(1.0), "a" * 1000, [1] * 1000, object(), (0.5, object())]
    optimizer.param_groups[0] |= {f"odd {i}": value for i, value in enumerate(odd)}
    groups: Any = [{"params": nn.Linear(2, 1).parameters(), "lr": 0.1} for _ in range(1000)]
    many = [Composite(), *(adam() for _ in range(300))]
    recorded = state_check.read_options(
        {"odd": optimizer, "groups": torch.optim.AdamW(groups), "many": many}
    )
    assert recorded["odd/lr"] == recorded["groups/lr"] == [0.1]
    assert not any(name.startswith("odd/odd") for name in recorded)
    assert len({name.rpartition("/")[0] for name in recorded}) <= 64
    assert len(json.dumps(recorded)) < 30_000


@pytest.mark.parametrize("earlier", [None, 3, [], {"o": [{"lr": 1}]}, {"o/lr": 3}])
def test_records_that_limpet_did_not_write_are_no_error(earlier):
    found = state_check.describe_changes({"o/lr": [0.1]}, earlier, {"o/lr": [0.2]})
    assert len(found) == (earlier == {"o/lr": 3})
