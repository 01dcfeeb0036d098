"""If the state does not match the version, the error of ``resume`` has advice that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import DTypeMismatch, LimpetError, PlanError, ShapeMismatch
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import training

Kind = type[optim.Optimizer]


def network(width: int = 2, layers: int = 1, kind: Kind = optim.AdamW, lr: float = 0.1) -> Any:
    model = nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(1, layers)))
    optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": optim.lr_scheduler.StepLR(optimizer, 2),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
    }


def train(state: Any, ckpt: Checkpointer, steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.randn(4, 3)).square().mean().backward()
        state["optimizer"].step()
        state["schedule"].step()
        ckpt.step()


def make_run(url: str) -> str:
    """Save a run of five steps. Return its URL."""
    state = network()
    with Checkpointer(url, state, save=limpet.EverySteps(5)) as ckpt:
        train(state, ckpt, 5)
    return url


def advice_of_resume(url: str, state: Any, kind: type[PlanError]) -> tuple[str, dict[str, Any]]:
    """Return the error message of ``resume``, and the arguments of the call that it advises."""
    with Checkpointer(url, state) as ckpt, pytest.raises(kind) as e:
        ckpt.resume()
    call = re.search(
        r"Restore the earlier structure of the state\..*another folder and (resume\(.*?\))",
        str(e.value),
    )
    assert call is not None, e.value
    return str(e.value), eval(call[1], {"resume": dict})


@pytest.mark.parametrize(
    ("changed", "kind", "expected"),
    [
        ({"width": 4}, ShapeMismatch, {"mismatched": "keep"}),
        ({"kind": optim.SGD}, DTypeMismatch, {"keys": ["model", "progress", "rng"]}),
        ({"layers": 2}, PlanError, {"missing": "keep"}),
        ({"width": 4, "layers": 2}, PlanError, {"missing": "keep", "mismatched": "keep"}),
    ],
)
def test_the_advice_matches_the_difference_and_works(
    changed: dict[str, Any], kind: type[PlanError], expected: dict[str, Any]
) -> None:
    url = make_run(f"memory://advice-{'-'.join(changed)}")
    state = network(**changed, lr=0.5)
    message, arguments = advice_of_resume(url, state, kind)
    assert arguments == {"start": f"{url}@latest", **expected}
    assert "to keys=" not in message
    with Checkpointer(MemoryStore(), state, save=limpet.EverySteps(1)) as ckpt:
        assert ckpt.resume(**arguments) is not None
        assert ckpt.current_step == 5
        is_loaded = "keys" not in expected
        assert bool(state["optimizer"].state) is (is_loaded and "width" not in changed)
        assert (state["optimizer"].param_groups[0]["lr"] == 0.5) is not is_loaded
        assert (state["schedule"].base_lrs == [0.5]) is not is_loaded
        train(state, ckpt, 2)
    old = limpet.load(f"memory://advice-{'-'.join(changed)}/version_5", keys="model")["model"]
    assert old["0.weight"].shape == (2, 3)


def test_advice_for_removed_and_excluded_keys() -> None:
    url = "memory://advice-gone"
    with Checkpointer(url, {"a": np.ones(2), "b": {"c": 1, "d": 2}, "removed": 1}) as ckpt:
        ckpt.step()
        ckpt.save()
    b = {"c": 0}
    _, arguments = advice_of_resume(url, {"a": np.ones(2), "b": b}, PlanError)
    assert arguments == {"start": f"{url}@latest", "unexpected": "ignore"}
    message, arguments = advice_of_resume(url, {"a": [1], "b": {"e": 1}}, PlanError)
    assert arguments == {
        "start": f"{url}@latest", "keys": ["b"], "missing": "keep", "unexpected": "ignore",
    }  # fmt: skip
    assert "Add the matching keys of a to keys=." in message
    _, arguments = advice_of_resume(url, {"a": np.ones(3), "b": {"e": 1}}, PlanError)
    assert arguments == {
        "start": f"{url}@latest",
        "missing": "keep",
        "unexpected": "ignore",
        "mismatched": "keep",
    }
    _, arguments = advice_of_resume(url, {"a": np.ones(2, "f"), "b": b | {"d": 1}}, PlanError)
    assert arguments == {"start": f"{url}@latest", "unexpected": "ignore", "mismatched": "cast"}
    _, arguments = advice_of_resume(url, {"a": [1], "b": {"c": 1, "d": 1}}, PlanError)
    assert arguments == {
        "start": f"{url}@latest",
        "keys": ["b"],
    }  # a key that is not selected is not missing


def test_the_optimizer_is_kept_if_only_other_values_differ() -> None:
    url = "memory://advice-other"
    state = network() | {"mask": np.ones(2), "a/b*": 1}
    with Checkpointer(url, state) as ckpt:
        train(state, ckpt, 1)
        ckpt.save()
    _, arguments = advice_of_resume(url, state | {"mask": np.ones(3)}, ShapeMismatch)
    assert arguments["mismatched"] == "keep"
    _, arguments = advice_of_resume(url, state | {"mask": [3]}, PlanError)
    assert arguments["keys"] == ["model", "optimizer", "schedule", "progress", "rng", "a~1b*"]
    state["mask"] = torch.ones(3)  # a tensor could be a parameter
    _, arguments = advice_of_resume(url, state, PlanError)
    assert arguments["keys"] == ["model", "progress", "rng", "a~1b*"]


def test_the_advice_is_short() -> None:
    url, state = "memory://advice-long", {f"k{i}": np.ones(2) for i in range(40)}
    with Checkpointer(url, state) as ckpt:
        ckpt.step()
        ckpt.save()
    for changed in (1, 40):
        message, arguments = advice_of_resume(
            url, state | {f"k{i}": 1 for i in range(changed)}, DTypeMismatch
        )
        assert arguments["keys"] == [...]
        assert len(message) < 700


@pytest.mark.parametrize("at", ["latest", "runs/q@100"])
def test_the_error_for_an_address_says_how_to_resume(at: Any) -> None:
    message = r'at= must be a step, or the name of a version such as "91\.1", not'
    with (
        training(MemoryStore(), limpet.EverySteps(1)) as (_, ckpt),
        pytest.raises(LimpetError, match=message),
    ):
        ckpt.resume(at)


@pytest.mark.parametrize("start", [3, True, 2.5, ["runs/a"], b"runs/a"])
def test_start_must_be_an_address(start: Any) -> None:
    with training(MemoryStore(), limpet.EverySteps(1)) as (_, ckpt):
        with pytest.raises(LimpetError, match=r'Invalid value for start=.*"RUN@120".*at=120'):
            ckpt.resume(start=start)
        ckpt.resume()


def test_start_can_be_a_path(tmp_path: Path) -> None:
    make_run(str(tmp_path / "a"))
    state = network()
    with Checkpointer(MemoryStore(), state) as ckpt:
        ckpt.resume(start=tmp_path / "a" / "version_5")  # type: ignore[arg-type]
        assert ckpt.current_step == 5
