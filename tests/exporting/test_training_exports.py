"""Exports from which PyTorch, Accelerate, Transformers, and Lightning continue a training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Unsupported
from tests.interop.test_load_foreign import make, snapshot_of, train

pytestmark = pytest.mark.filterwarnings("ignore")


def save_trained(tmp_path, steps=2, **more):
    """Save a state after some steps. Return the live state."""
    state = make(seed=0)
    train(state, steps)
    holdfast.save(tmp_path / "run" / f"version_{steps}", state | more, step=steps)
    return state


# -- torch ---------------------------------------------------------------------------------------


def test_pytorch_continues(tmp_path):
    original = save_trained(tmp_path)
    holdfast.export(tmp_path / "run" / "version_2", tmp_path / "x.pt", to="torch")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    expected = original["optimizer"].state_dict()
    assert content["optimizer"]["param_groups"] == expected["param_groups"]
    assert content["optimizer"]["state"].keys() == expected["state"].keys()
    restored = make(seed=1)
    for name, value in restored.items():
        value.load_state_dict(content[name])
    assert snapshot_of(restored) == snapshot_of(original)
    assert train(restored) == train(original)


def test_one_optimizer_is_the_root(tmp_path):
    original = save_trained(tmp_path)
    url = tmp_path / "run" / "version_2"
    holdfast.export(url, tmp_path / "o.pt", to="torch", root="optimizer")
    restored = make(seed=0)
    restored["optimizer"].load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    states = (s["optimizer"].state_dict()["param_groups"] for s in (restored, original))
    assert next(states) == next(states)


def test_a_new_optimizer_and_tied_weights(tmp_path):
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    holdfast.save(tmp_path / "v", {"nested": {"o": optimizer}, "model": net})
    holdfast.export(tmp_path / "v", tmp_path / "o.pt", to="torch")
    content = torch.load(tmp_path / "o.pt", weights_only=True)
    assert content["nested"]["o"] == optimizer.state_dict()


def test_state_of_an_unknown_parameter_is_refused(tmp_path):
    forged = {"state": {"a": {"m": 1}, "b": {}}, "groups": [{"lr": 1, "params": ["a"]}]}
    holdfast.save(tmp_path / "v", {"o": forged})
    with pytest.raises(Unsupported, match="state of b, which is not in one group of o"):
        holdfast.export(tmp_path / "v", tmp_path / "o.pt", to="torch")
    assert not (tmp_path / "o.pt").exists()
    double = {"state": {"a": {}}, "groups": [{"params": ["a"]}, {"params": ["a"]}]}
    holdfast.save(tmp_path / "w", {"o": double})
    with pytest.raises(Unsupported, match="not in one group"):
        holdfast.export(tmp_path / "w", tmp_path / "o.pt", to="torch")


def test_an_exported_file_is_imported_again(tmp_path):
    original = save_trained(tmp_path)
    holdfast.export(tmp_path / "run" / "version_2", tmp_path / "x.pt", to="torch")
    restored = make(seed=1)
    holdfast.load(tmp_path / "x.pt", into=restored)
    assert train(restored) == train(original)
