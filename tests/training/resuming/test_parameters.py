"""The warning about parameters of an optimizer that are not in the state."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import InexactResume

Model = nn.Sequential


def model() -> Model:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def adam(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for module in modules for p in module.parameters()])


def warnings_of(folder: Path, state: dict[str, Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limpet.Checkpointer(folder / "run", state, **options) as ckpt:
            ckpt.resume()
            for _ in range(2):
                ckpt.step()
    return [str(w.message) for w in caught if w.category is InexactResume]


def test_a_head_that_was_replaced_is_reported_once(tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    net[2] = nn.Linear(3, 5)
    (warning,) = warnings_of(tmp_path, {"model": net, "optimizer": optimizer})
    assert "2 parameters of optimizer (float32 [1, 3], float32 [1])" in warning
    assert "create the optimizer afterwards" in warning


def test_a_copy_of_the_model_is_reported(tmp_path: Path) -> None:
    net = model()
    (warning,) = warnings_of(tmp_path, {"model": copy.deepcopy(net), "optimizer": adam(net)})
    assert "6 parameters of optimizer" in warning
    assert "Add their module, not a copy of it" in warning


def test_a_module_that_is_missing_is_reported(tmp_path: Path) -> None:
    one, other = model(), model()
    state = {"model": one, "opts": {"a": adam(one), "b": adam(other, one)}}
    (warning,) = warnings_of(tmp_path, state)
    assert (
        "6 parameters of opts/b (float32 [3, 2], float32 [3], float32 [3], and 3 more)" in warning
    )
    assert "opts/a" not in warning


class WithExtraState(nn.Linear):
    """Saves a parameter of another object."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__(2, 1)
        self.others = [other]

    def get_extra_state(self) -> torch.Tensor:
        return self.others[0].detach()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.others[0].data.copy_(state)


def complete_states() -> dict[str, dict[str, Any]]:
    net, other = model(), model()
    free = nn.Parameter(torch.ones(3))
    frozen = model()
    frozen[0].requires_grad_(requires_grad=False)
    tied = nn.Linear(3, 3)
    tied_pair = nn.ModuleDict({"a": tied, "b": nn.Linear(3, 3)})
    tied_pair["b"].weight = tied.weight
    return {
        "one": {"model": net, "optimizer": adam(net)},
        "two": {"models": [net, other], "optimizer": adam(net, other)},
        "a part": {"model": net, "optimizer": adam(net[0])},
        "frozen": {"model": frozen, "optimizer": adam(frozen)},
        "tied": {"model": tied_pair, "optimizer": adam(tied_pair)},
        "a tensor": {"model": net, "scale": free, "optimizer": torch.optim.SGD([free], lr=0.1)},
        "detached": {
            "model": net,
            "scale": free.detach(),
            "optimizer": torch.optim.SGD([free], lr=0.1),
        },
        "state_dict": {"model": net, "other": dict(other.state_dict()), "optimizer": adam(other)},
        "per rank": {"model": net, "own": limpet.PerRank(other), "optimizer": adam(other, net)},
        "a parameter per rank": {
            "model": net,
            "own": limpet.PerRank({"scale": free}),
            "optimizer": torch.optim.SGD([free], lr=0.1),
        },
        "a replicated parameter": {
            "model": net,
            "scale": limpet.Replicated(free),
            "optimizer": torch.optim.SGD([free], lr=0.1),
        },
        "an array": {
            "model": net,
            "scale": free.detach().numpy(),
            "optimizer": torch.optim.SGD([free], lr=0.1),
        },
        "an extra state": {
            "model": WithExtraState(free),
            "optimizer": torch.optim.SGD([free], lr=0.1),
        },
        "no module": {"optimizer": adam(net)},
        "no optimizer": {"model": net},
        "compiled": {"model": torch.compile(net, backend="eager"), "optimizer": adam(net)},
        "averaged": {
            "model": net,
            "ema": torch.optim.swa_utils.AveragedModel(net),
            "optimizer": adam(net),
        },
        "empty": {
            "model": net,
            "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(0))], lr=0.1),
        },
        "meta": {
            "model": net,
            "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3, device="meta"))], lr=0.1),
        },
    }


@pytest.mark.parametrize("name", complete_states())
def test_a_complete_state_is_not_reported(name: str, tmp_path: Path) -> None:
    state = complete_states()[name]
    assert warnings_of(tmp_path, state, save=limpet.EverySteps(100)) == []


def test_an_optimizer_of_one_rank_is_checked(tmp_path: Path) -> None:
    state = {"model": model(), "own": limpet.PerRank(adam(model()[2]))}
    (warning,) = warnings_of(tmp_path, state)
    assert "2 parameters of own (float32 [1, 3], float32 [1]): no module in the state" in warning


class Trainer:
    """An object of the user, which saves its model itself."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


def test_an_object_that_may_have_the_parameters_is_believed(tmp_path: Path) -> None:
    net, other = model(), model()
    state = {"model": net, "trainer": Trainer(other), "optimizer": adam(net, other)}
    assert warnings_of(tmp_path, state) == []


def test_a_training_that_saves_nothing_is_not_checked(tmp_path: Path) -> None:
    state = {"model": model(), "optimizer": adam(model())}
    assert warnings_of(tmp_path, state, save=limpet.Never()) == []
