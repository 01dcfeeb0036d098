"""If the state does not match the version, the error of ``resume`` has advice that works."""

import pytest
import torch
from torch import nn, optim

import limpet
from limpet.errors import LimpetError, PlanError, ShapeMismatch
from limpet.storage.memory import MemoryStore
from limpet.training.checkpointer import Checkpointer
from tests.trainings import training

Kind = type[optim.Optimizer]


def network(width=2, layers=1, kind=optim.AdamW, lr=0.1):
    model = nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(1, layers)))
    optimizer = kind(model.parameters(), lr=lr)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": optim.lr_scheduler.StepLR(optimizer, 2),
        "progress": limpet.Progress(),
        "rng": limpet.RNG(),
    }


def train(state, ckpt, steps):
    for _ in range(steps):
        state["model"](torch.randn(4, 3)).square().mean().backward()
        state["optimizer"].step()
        state["schedule"].step()
        ckpt.step()


def make_run(url):
    """Save a run of five steps. Return its URL."""
    state = network()
    with Checkpointer(url, state, save=limpet.EverySteps(5)) as ckpt:
        train(state, ckpt, 5)
    return url


@pytest.mark.parametrize(
    ("changed", "kind", "expected"),
    [
        ({"width": 4}, ShapeMismatch, {"mismatched": "keep"}),
        ({"layers": 2}, PlanError, {"missing": "keep"}),
        ({"width": 4, "layers": 2}, PlanError, {"missing": "keep", "mismatched": "keep"}),
    ],
)
def test_the_advice_matches_the_difference_and_works(changed, kind, expected):
    url = make_run(f"memory://advice-{'-'.join(changed)}")
    state = network(**changed, lr=0.5)
    with Checkpointer(url, state) as ckpt, pytest.raises(kind) as e:
        ckpt.resume()
    _, advice = str(e.value).split(f'another folder and resume(start="{url}@latest"), with options')
    for option in ("missing", "unexpected", "mismatched"):
        assert (f'{option}="{expected.get(option)}"' in advice) is (option in expected)
    with Checkpointer(MemoryStore(), state, save=limpet.EverySteps(1)) as ckpt:
        assert ckpt.resume(start=f"{url}@latest", **expected) is not None
        assert ckpt.current_step == 5
        assert bool(state["optimizer"].state) is ("width" not in changed)
        assert state["schedule"].base_lrs != [0.5]
        train(state, ckpt, 2)
    old = limpet.load(f"memory://advice-{'-'.join(changed)}/version_5", keys="model")["model"]
    assert old["0.weight"].shape == (2, 3)


@pytest.mark.parametrize("at", ["latest", "runs/q@100"])
def test_the_error_for_an_address_says_how_to_resume(at):
    message = r'at= must be a step, or the name of a version such as "91\.1", not'
    with (
        training(MemoryStore(), limpet.EverySteps(1)) as (_, ckpt),
        pytest.raises(LimpetError, match=message),
    ):
        ckpt.resume(at)


@pytest.mark.parametrize("start", [3, True, 2.5, ["runs/a"], b"runs/a"])
def test_start_must_be_an_address(start):
    with training(MemoryStore(), limpet.EverySteps(1)) as (_, ckpt):
        with pytest.raises(LimpetError, match=r'start= must be.*"RUN@120".*at=120'):
            ckpt.resume(start=start)
        ckpt.resume()


def test_start_can_be_a_path(tmp_path):
    make_run(str(tmp_path / "a"))
    state = network()
    with Checkpointer(MemoryStore(), state) as ckpt:
        ckpt.resume(start=tmp_path / "a" / "version_5")
        assert ckpt.current_step == 5
