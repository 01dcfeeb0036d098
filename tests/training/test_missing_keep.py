"""``resume(missing="keep")``: new members in the state of an existing run."""

from typing import Any

import pytest
import torch

import limpet
from limpet.errors import LimpetError, MissingLeaf, UnexpectedLeaf


def train(folder, state, steps=1, **options):
    """Resume, make some steps, and return the newest version."""
    with limpet.Checkpointer(folder, state) as ckpt:
        ckpt.resume(**options)
        for _ in range(steps):
            ckpt.step()
    return limpet.Run(folder).latest()


def test_new_members_are_kept_and_named(tmp_path):
    run = tmp_path / "run"
    train(run, {"weights": torch.ones(3)}, steps=3)
    state = {"weights": torch.zeros(3), "rng": limpet.RNG(), "ema": torch.full((3,), 7.0)}
    with pytest.raises(MissingLeaf, match=r'resume\(missing="keep"\)'):
        train(run, state)
    assert state["weights"].tolist() == [0, 0, 0]
    found: list[str] = []
    with limpet.attach(lambda name, fields: name == "loaded" and found.append(fields["summary"])):
        version = train(run, state, missing="keep")
    assert len(found) == 1
    assert "kept 2 missing in the snapshot: rng, ema" in found[0]
    assert state["weights"].tolist() == [1, 1, 1]
    assert state["ema"].tolist() == [7, 7, 7]
    assert version.step == 4


def test_a_new_layer_of_a_model_is_kept_with_its_slots(tmp_path):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        return model, {"model": model, "progress": limpet.Progress()}

    model, state = make()
    train(tmp_path / "run", state, steps=2)
    larger, state = make()
    larger.append(torch.nn.Linear(2, 1))
    train(tmp_path / "run", state, missing="keep")
    assert torch.equal(larger[0].weight, model[0].weight)
    assert state["progress"].step == 3


def test_nothing_else_is_tolerated_in_the_own_versions(tmp_path):
    run = tmp_path / "run"
    train(run, {"a": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(UnexpectedLeaf):
        train(run, {"a": torch.zeros(3)}, missing="keep")
    options: list[dict[str, Any]] = [
        {"unexpected": "ignore"}, {"keys": "a"}, {"rename": {"a": "b"}},
        {"missing": "keep", "unexpected": "ignore"}, {"mismatched": "cast"},
    ]  # fmt: skip
    for option in options:
        with pytest.raises(LimpetError, match=r"all of its own.*only together with start="):
            train(run, {"a": torch.zeros(3)}, **option)
