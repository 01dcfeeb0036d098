"""One error lists every value that cannot be saved, with advice for its kind."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import pickle
import random
import threading
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import Unsupported
from tests.states import unused_url


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Color(enum.Enum):
    RED = 1


class OnlySaves:
    def state_dict(self):
        return {}


class WithPaths:
    """An object whose state has two values that cannot be saved."""

    def state_dict(self):
        return {"folder": pathlib.PurePosixPath("x"), "days": [datetime.date(2026, 1, 2)], "n": 1}

    def load_state_dict(self, state):
        raise NotImplementedError


Pair = collections.namedtuple("Pair", "a b")

# the value, and a part of its advice
VALUES: dict[str, tuple[Any, str]] = {
    "path": (pathlib.Path("x"), "Save str(path)"),
    "datetime": (datetime.datetime(2026, 1, 2), "isoformat()"),
    "date": (datetime.date(2026, 1, 2), "isoformat()"),
    "timedelta": (datetime.timedelta(1), "value.seconds"),
    "dataclass": (Settings(), "dataclasses.asdict(value)"),
    "enum": (Color.RED, "member.name"),
    "namedtuple": (Pair(1, 2), "value._asdict()"),
    "decimal": (decimal.Decimal(1), "str(value)"),
    "uuid": (uuid.UUID(int=0), "str(value)"),
    "torch generator": (torch.Generator(), "generator.get_state()"),
    "numpy generator": (np.random.default_rng(0), "generator.bit_generator.state"),
    "random generator": (random.Random(0), "generator.getstate()"),
    "objects": (np.array([1, "a"], object), "array.tolist()"),
    "quantized": (None, "int_repr()"),
    "meta": (torch.empty(2, device="meta"), "Materialize it"),
    "nested": (None, "offsets()"),
    "matrix": (np.ma.array([1]), "numpy.asarray(array.mask)"),
    "function": (functools.reduce, "Code is never saved"),
    "lambda": (lambda: None, "Code is never saved"),
    "partial": (functools.partial(print), "Code is never saved"),
    "class": (Settings, "not the class itself"),
    "set": ({Color.RED}, "member.name"),
    "key": ({pathlib.Path("x"): 1}, "Save str(path)"),
    "defaultdict": (collections.defaultdict(int), "Save dict(value)"),
    "deque": (collections.deque([1]), "Save list(value)"),
    "range": (range(3), "value.start"),
    "lock": (threading.Lock(), "Leave it out of the state"),
    "half": (OnlySaves(), "Give its class load_state_dict(), too"),
    "text": ("\udc80", "os.fsencode(text)"),
    "object": (object(), "state_dict() and load_state_dict()"),
}


@pytest.fixture(autouse=True)
def deprecated_tensors(monkeypatch):
    """PyTorch warns when it makes these tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
        nested = torch.nested.nested_tensor([torch.ones(1)])
    for name, tensor in ("quantized", quantized), ("nested", nested):
        monkeypatch.setitem(VALUES, name, (tensor, VALUES[name][1]))


def rejection(state, **options):
    with pytest.raises(Unsupported) as e:
        limpet.save(unused_url(), state, **options)
    return e.value


def test_every_value_is_listed_with_advice_for_its_kind():
    state = {"fine": torch.ones(2), **{name: value for name, (value, _) in VALUES.items()}}
    error = rejection(state)
    assert error.leaves == tuple(VALUES)
    assert str(error).startswith(f"{len(VALUES)} values of the state cannot be saved faithfully.")
    listing = str(error.found).split("; ")
    for name, (_, advice) in VALUES.items():
        (described,) = [text for text in listing if f"'{name}'" in text]
        assert advice in described


def test_values_at_every_level_are_listed():
    path = pathlib.PurePosixPath("x")
    state = {"a": [1, {"b": (path,)}], "own": limpet.PerRank([path]), "object": WithPaths()}
    state["first"] = limpet.Replicated({"c": path})
    error = rejection(state, step=1)
    assert error.leaves == ("a/1/b/0", "own/0/0", "object/folder", "object/days/0", "first/c")
    assert "in the state_dict() of 'object', a WithPaths" in str(error)
    assert len(set(str(error).split("; "))) == 3, "a kind is described once"


def test_a_note_is_checked_in_the_same_way():
    error = rejection({"a": 1}, note={"x": pathlib.Path("x"), "y": {"z": Color.RED}})
    assert error.leaves == ("metadata/note/x", "metadata/note/y/z")


def test_the_message_for_many_values_is_bounded():
    error = rejection({"paths": {f"{'k' * 500}{i}": pathlib.Path("x") for i in range(5_000)}})
    assert len(error.leaves) == 5_000
    assert "and 4980 more, each a pathlib.PosixPath (Save str(path))" in str(error)
    assert len(str(error)) < 10_000
    assert pickle.loads(pickle.dumps(error)).leaves == error.leaves


def test_many_kinds_are_bounded():
    classes = [type(f"Class{i}", (), {}) for i in range(200)]
    error = rejection({f"{i}": cls() for i, cls in enumerate(classes)})
    assert len(error.leaves) == 200
    assert "Class49" in str(error)
    assert "and 150 more" in str(error)


def test_no_code_of_a_value_runs():
    class Meta(type):
        def __repr__(cls):
            raise AssertionError

    class Named(metaclass=Meta):
        pass

    assert rejection({"a": Named(), "b": Named}).leaves == ("a", "b")


def test_nothing_is_left_of_a_refused_state():
    """A value after a refused PerRank value is not treated as per-rank."""
    state = {"own": limpet.PerRank(object()), "other": limpet.PerRank(limpet.PerRank(1))}
    assert rejection(state).leaves == ("own/0", "other/0")
