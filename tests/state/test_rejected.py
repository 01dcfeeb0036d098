"""One error lists every value that cannot be saved, with advice for its kind."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import pathlib
import pickle
import random
import threading
import types
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import NoProgress, Preempted, Unsupported
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
    "datetime": (datetime.datetime(2026, 1, 2), "isoformat()"),
    "torch generator": (torch.Generator(), "generator.get_state()"),
    "numpy generator": (np.random.default_rng(0), "generator.bit_generator.state"),
    "random generator": (random.Random(0), "generator.getstate()"),
    "quantized": (None, "int_repr()"),
    "meta": (torch.empty(2, device="meta"), "on another device"),
    "nested": (None, "tensor.unbind()"),
    "matrix": (np.ma.array([1]), "numpy.asarray(array.mask)"),
    "function": (functools.reduce, "Code is never saved"),
    "lambda": (lambda: None, "Code is never saved"),
    "partial": (functools.partial(print), "Code is never saved"),
    "class": (Settings, "not the class itself"),
    "set": ({Color.RED}, "member.name"),
    "key": ({pathlib.Path("x"): 1}, "Save str(path)"),
    "lock": (threading.Lock(), "Leave it out of the state"),
    "half": (OnlySaves(), "Give its class load_state_dict(), too"),
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
    assert "and 4,980 more, each a pathlib.PosixPath (Save str(path))" in str(error)
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


class Mode(enum.Flag):
    READ, WRITE = 1, 2


class Own(torch.Tensor):
    pass


def opened(kind, content):
    file = kind()
    file.write(content)
    return file


# what the advice saves, with a name for the value, and how to get the value back from it
FOLLOWED: dict[str, tuple[Any, str, str]] = {
    "flag": (Mode.READ | Mode.WRITE, "member.value", "Mode(x)"),
    "enum": (Color.RED, "member.name", "Color[x]"),
    "path": (pathlib.PurePosixPath("a/b"), "str(path)", "pathlib.PurePosixPath(x)"),
    "date": (datetime.date(2026, 1, 2), "value.isoformat()", "datetime.date.fromisoformat(x)"),
    "time": (datetime.time(1, 2), "value.isoformat()", "datetime.time.fromisoformat(x)"),
    "timedelta": (datetime.timedelta(-1, 2, 3), "(value.days, value.seconds, value.microseconds)",
                  "datetime.timedelta(*x)"),
    "decimal": (decimal.Decimal("1.10"), "str(value)", "decimal.Decimal(x)"),
    "uuid": (uuid.UUID(int=7), "str(value)", "uuid.UUID(x)"),
    "dataclass": (Settings(), "dataclasses.asdict(value)", "Settings(**x)"),
    "namedtuple": (Pair(1, 2), "value._asdict()", "Pair(**x)"),
    "namespace": (types.SimpleNamespace(a=1), "vars(value)", "types.SimpleNamespace(**x)"),
    "deque": (collections.deque([1, 2]), "list(value)", "collections.deque(x)"),
    "defaultdict": (collections.defaultdict(int, a=1), "dict(value)",
                    "collections.defaultdict(int, x)"),
    "array": (array.array("u", "ab"), "numpy.asarray(value)", "array.array('u', ''.join(x))"),
    "range": (range(1, 9, 3), "(value.start, value.stop, value.step)", "range(*x)"),
    "bytes file": (opened(io.BytesIO, b"ab"), "file.getvalue()", "io.BytesIO(x)"),
    "text file": (opened(io.StringIO, "ab"), "file.getvalue()", "io.StringIO(x)"),
    "text": ("a\ud800\udc80", 'text.encode("utf-8", "surrogatepass")',
             'x.decode("utf-8", "surrogatepass")'),
    "objects": (np.array([1, "a"], object), "array.tolist()", "numpy.array(x, object)"),
    "matrix": (np.ones(2).view(np.recarray), "numpy.asarray(array)", "x.view(np.recarray)"),
    "subclass": (torch.ones(2).as_subclass(Own), "tensor.as_subclass(torch.Tensor)",
                 "x.as_subclass(Own)"),
    "nested": (None, "list(tensor.unbind())", "torch.nested.nested_tensor(x)"),
    "jagged": (None, "list(tensor.unbind())",
               "torch.nested.nested_tensor(x, layout=torch.jagged)"),
    "opaque": (torch.ones(2).to_mkldnn(), "to_dense()", "x.to_mkldnn()"),
    "key": ({torch.ones(2, 1)}, "tuple(value.flatten().tolist())", ""),
}  # fmt: skip


def comparable(value):
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [part.tolist() for part in value.unbind()]
        return type(value), value.layout, value.to_dense().tolist()
    if isinstance(value, np.ndarray):
        return type(value), value.tolist()
    return value.getvalue() if hasattr(value, "getvalue") else value


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advice_can_be_followed(name):
    value, code, back = FOLLOWED[name]
    if name in ("nested", "jagged"):
        layout = torch.jagged if name == "jagged" else torch.strided
        value = torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)], layout=layout)
    advice = rejection({"x": value}).todo
    assert f"Save {code}" in advice, advice
    (value,) = value if isinstance(value, set) else (value,)
    names = ("member", "path", "value", "file", "text", "storage", "array", "tensor")
    code = f"tensor.{code}" if code.startswith("to_") else code
    scope = {**globals(), "numpy": np}
    saved = eval(code, {**scope, **dict.fromkeys(names, value)})
    url = unused_url()
    limpet.save(url, {"x": saved})
    loaded = limpet.load(url)["x"]
    if back:
        assert comparable(eval(back, {**scope, "x": loaded})) == comparable(value)
    else:
        limpet.save(unused_url(), {"x": {loaded}})


def test_a_lazy_module_is_saved_after_its_first_call():
    m = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d())
    error = rejection({"m": m})
    assert "has no shape before the first forward pass. Call the module once" in error.args[0]
    m(torch.ones(2, 3))
    url, live = unused_url(), torch.nn.Sequential(torch.nn.LazyLinear(2),
                                                  torch.nn.LazyBatchNorm1d())  # fmt: skip
    limpet.save(url, {"m": m})
    limpet.load(url, into={"m": live})
    assert torch.equal(live[0].weight, m[0].weight)


def test_a_module_on_the_meta_device_is_loaded_as_the_advice_says():
    class Rotary(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("angles", torch.arange(2.0), persistent=False)

    url = unused_url()
    limpet.save(url, {"m": Rotary()})
    with torch.device("meta"):
        live = Rotary()
    with pytest.raises(limpet.errors.PlanError, match="on a device with memory") as e:
        limpet.load(url, into={"m": live})
    assert "to_empty(device=...), and then set the buffers that are not saved" in str(e.value)
    live.to_empty(device="cpu")
    live.angles = torch.arange(2.0)
    limpet.load(url, into={"m": live})
    assert live.w.tolist() == [1, 1]
    rejected = rejection({"m": torch.nn.Linear(1, 1, device="meta")})
    assert "on another device before the save" in str(rejected)


@pytest.mark.parametrize(
    "error", [Preempted(75, 7, 6, "SIGTERM"), NoProgress(93, "three restarts")]
)
def test_exits_are_pickled(error):
    """Ray sends the exception of a worker to the driver."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert copy.code == error.code
