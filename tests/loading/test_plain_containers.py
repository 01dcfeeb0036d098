"""Dicts, counters, and lists of plain values below the top level take the members of the version.
The top level, and dicts with an object, a tensor, or an array in them, are strict."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet.errors import MissingLeaf, PlanError, UnexpectedLeaf
from tests.states import Stateful, assert_same, clone, save_state

ONE = torch.ones(2)


def test_the_options_in_the_state_dict_of_an_optimizer_are_copies():
    """docs/saving.md says to pass the dict on, or the optimizer itself."""
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr) for lr in (0.1, 0.5)]
    url = save_state(optimizers[0].state_dict())
    limpet.load(url, into=(saved := optimizers[1].state_dict()))
    optimizers[1].load_state_dict(saved)
    assert optimizers[1].param_groups[0]["lr"] == 0.1


TAKEN = {  # saved, live
    "an empty dict": ({"a": 1, "b": [1]}, {}),
    "a dict": ({"a": 1, "b": {"c": 2}}, {"b": {}}),
    "fewer members": ({"a": 1}, {"a": 2, "b": {"c": 3}}),
    "no members": ({}, {"a": 2, "b": {"c": 3}}),
    "an OrderedDict": (OrderedDict(b=1, a=2), OrderedDict(a=0)),
    "a Counter": (Counter("aab"), Counter("cc")),
    "names": ({1: 1, "1": 2, (1, None): 3, np.int64(7): 4}, {"1": 0, 7: {}}),
    "deep": ({"a": {"b": {"c": (1, {"d": 2})}}}, {"a": {"b": {}, "x": 1}}),
    "other kinds": ({"a": {"b": 1}, "c": 1, "d": [{}]}, {"a": 1, "c": {"b": 1}, "d": [1]}),
    "tensors": ({"a": ONE, "b": {"c": np.arange(3)}}, {"b": {}}),
    "None": ({"a": [{"b": ONE}]}, {"a": None}),
    "a list of dicts": ([{"a": 1}, {"b": 2}], [{"a": 0}]),
    "fewer dicts": ([{"a": 1}], [{"a": 0, "b": 1}, {}, {}]),
    "a list of kinds": ([{"a": 1}, [2], 3], [1, {}, {}]),
    "a tuple": (({"a": 1}, [2, 3]), ({}, [])),
    "sets": ({"a": {1, 2}, "b": frozenset("a")}, {"a": set()}),
    "blobs": ({"a": b"x" * 5000, "b": 1 << 70}, {"b": 0}),
    "a sparse tensor": ({"a": torch.eye(2).to_sparse()}, {}),
}


@pytest.mark.parametrize("where", ["key", "list", "PerRank", "Replicated", "beside a tensor"])
@pytest.mark.parametrize("kind", TAKEN)
def test_the_members_of_the_version_are_taken(kind, where, tmp_path):
    place = {
        "key": lambda v: {"x": v},
        "list": lambda v: {"x": [v]},
        "PerRank": lambda v: {"x": limpet.PerRank(v)},
        "Replicated": lambda v: {"x": limpet.Replicated(v)},
        "beside a tensor": lambda v: {"x": {"plain": v, "t": torch.ones(1)}},
    }[where]
    saved, live = TAKEN[kind]
    value = clone(live)
    state = place(value)
    limpet.load(save_state(place(saved)), into=state)
    inner = state["x"]
    if where != "key":
        inner = inner[0] if where == "list" else inner
        inner = inner["plain"] if where == "beside a tensor" else getattr(inner, "value", inner)
    assert_same(saved, inner)
    assert inner is value or type(value) is tuple
    if type(saved) is dict and isinstance(saved.get("b"), dict) and "b" in live:
        assert inner["b"] is value["b"]


def test_a_training_goes_on_with_what_its_dicts_have_got(tmp_path):
    def make():
        return {
            "m": nn.Linear(2, 2),
            "best": {},
            "seen": Counter(),
            "log": [],
            "p": limpet.Progress(),
        }

    state = make()
    with limpet.Checkpointer(tmp_path, state, save=limpet.EverySteps(1), quiet=True) as ckpt:
        for i in range(3):
            state["log"].append({"loss": i} if i else {})
            state["best"][f"at {i}"] = {"loss": float(i)}
            state["seen"].update(f"ab{i}")
            ckpt.step()
    for start in (make(), state):
        with limpet.Checkpointer(tmp_path, start, quiet=True) as ckpt:
            assert ckpt.resume(at=2 if start is state else None) is not None
        n = 2 if start is state else 3
        assert start["best"] == {f"at {i}": {"loss": float(i)} for i in range(n)}
        assert start["seen"] == Counter("".join(f"ab{i}" for i in range(n)))
        assert start["log"] == [{}, {"loss": 1}, {"loss": 2}][:n]


STRICT = {
    "the top": lambda v: v,
    "a tensor": lambda v: {"x": {"t": torch.zeros(2), **v}},
    "an array": lambda v: {"x": {"t": np.zeros(2), **v}},
    "a parameter": lambda v: {"x": [{"t": nn.Parameter(torch.zeros(2)), **v}]},
    "a module": lambda v: {"x": {"t": nn.Linear(1, 1), **v}},
    "an optimizer": lambda v: {"x": {"t": torch.optim.SGD([torch.zeros(1)], 0.1), **v}},
    "an object": lambda v: {"x": {"t": Stateful(a=1), **v}},
    "a tensor below": lambda v: {"x": {"t": [{"u": torch.zeros(2)}], **v}},
    "a value of a rank": lambda v: {"x": {"t": limpet.PerRank(1), **v}},
    "a sparse tensor": lambda v: {"x": {"t": torch.eye(2).to_sparse(), **v}},
}


@pytest.mark.parametrize("kind", STRICT)
def test_other_dicts_are_strict(kind):
    make = STRICT[kind]
    for saved, live, error in (
        ({"a": 1, "b": 2}, {"a": 1}, UnexpectedLeaf),
        ({"a": 1}, {"a": 1, "b": 2}, MissingLeaf),
    ):
        url, state = save_state(make(saved)), make(live)
        with pytest.raises(error, match="b"):
            limpet.load(url, into=state)
    limpet.load(url, into=make({"a": 1, "b": 2}), missing="keep")


def test_options_of_a_load():
    url = save_state({"d": {"a": 1, "b": {"c": 2}}, "e": {"x": 5}})
    live = {"d": {"new": 3, "b": {"old": 4}}, "e": {}}
    report = limpet.load(url, into=clone(live), missing="keep")
    assert sorted(report.kept) == ["d/b/old", "d/new"]
    state = clone(live)
    limpet.load(url, into=state, missing="keep", keys="d/**")
    assert state == {"d": {"a": 1, "b": {"c": 2, "old": 4}, "new": 3}, "e": {}}
    state = clone(live)
    limpet.load(url, into=state, keys="d/b/c")
    assert state == {"d": {"new": 3, "b": {"old": 4, "c": 2}}, "e": {}}
    state = clone(live)
    limpet.load(url, into=state, keys="d/a", unexpected="ignore")
    assert state == {"d": {"new": 3, "b": {"old": 4}, "a": 1}, "e": {}}
    state = {"d": {}, "f": {}}
    limpet.load(url, into=state, rename={"e": "f"})
    assert state == {"d": {"a": 1, "b": {"c": 2}}, "f": {"x": 5}}
    assert limpet.load(url, into=clone(live)).is_exact


def test_nothing_changes_if_another_member_does_not_fit():
    url = save_state({"d": {"a": 1}, "t": torch.ones(3)})
    live = {"d": {"b": 2}, "t": torch.zeros(2)}
    with pytest.raises(PlanError):
        limpet.load(url, into=live)
    assert live["d"] == {"b": 2}
