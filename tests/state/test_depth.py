"""States that are nested too deeply, or that contain themselves, are refused by their key."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import limpet
from limpet.errors import ManifestInvalid, PlanError, Unsupported
from limpet.format.tree import MAX_DEPTH
from tests.fakegroup import FakeGroup
from tests.forging import manifest_key, save_to_files, seal_body, store_of
from tests.states import unused_url

LEVELS = 100_000


class Stateful:
    """An object whose state is ``value``. ``keeps_per_rank``: as ``RNG``."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


class Own(Stateful):
    keeps_per_rank = True


class Endless:
    """The state of each object is another new object."""

    def state_dict(self):
        return Endless()

    def load_state_dict(self, state): ...


class EndlessDict(Endless):
    def state_dict(self):
        return {"next": EndlessDict()}


def nest(wrap, levels=LEVELS):
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


def containing_itself():
    members: dict[str, Any] = {}
    members["up"] = {"a": members, "b": members}
    yield "dict", members
    elements: list[Any] = []
    elements += [elements, elements]
    yield "list", elements
    pair: tuple[Any, ...] = ([], 1)
    pair[0].append((pair, pair))
    yield "tuple", pair


STATES: dict[str, Any] = {
    "dicts": lambda: nest(lambda v: {"a": v}),
    "lists": lambda: nest(lambda v: [v]),
    "tuples": lambda: nest(lambda v: (v,)),
    "mixed": lambda: nest(lambda v: [{"x": (v,)}]),
    "itself in a dict": lambda: dict(containing_itself())["dict"],
    "itself in a list": lambda: dict(containing_itself())["list"],
    "itself in a tuple": lambda: dict(containing_itself())["tuple"],
    "object": lambda: Stateful(nest(lambda v: [v])),
    "objects": lambda: nest(lambda v: Stateful({"a": v}), 300),
    "endless objects": Endless,
    "endless dicts": EndlessDict,
    "per rank": lambda: limpet.PerRank(nest(lambda v: [v])),
    "replicated": lambda: limpet.Replicated(dict(containing_itself())["list"]),
    "key": lambda: {nest(lambda v: (v,), 2_000): 1},
}
states = pytest.mark.parametrize("name", STATES)


def assert_refused(error):
    assert isinstance(error, Unsupported)
    assert "'x" in str(error)
    assert len(str(error)) < 2_000


@states
def test_a_save_refuses_it(name):
    state = {"fine": np.ones(2), "x": STATES[name]()}
    with pytest.raises(Unsupported) as e:
        limpet.save(unused_url(), state)
    assert_refused(e.value)
    with pytest.raises(Unsupported) as e:
        limpet.save_async(unused_url(), state).wait()
    assert_refused(e.value)


@states
def test_a_checkpointer_refuses_it(name, tmp_path):
    state = {"progress": limpet.Progress(), "x": STATES[name]()}
    every = limpet.EverySteps(1)
    with (
        pytest.raises(Unsupported) as e,
        limpet.Checkpointer(str(tmp_path), state, save=every) as ckpt,
    ):
        ckpt.resume()
        ckpt.step()
        ckpt.wait()
    assert_refused(e.value)


@pytest.mark.parametrize("name", ["dicts", "itself in a list", "endless objects", "per rank"])
def test_all_ranks_of_a_save_refuse_it(name):
    url = unused_url()
    with FakeGroup(2) as group:
        for error in group.outcomes(lambda r: limpet.save(url, {"x": STATES[name]()})):
            assert_refused(error)


@states
@pytest.mark.parametrize("levels", [1, MAX_DEPTH - 2])
def test_a_load_into_it_changes_nothing(name, levels):
    url = unused_url()
    deep = nest(lambda v: {"a": v}, levels)
    limpet.save(url, {"w": np.ones(2), "x": deep})
    live = {"w": np.zeros(2), "x": STATES[name]()}
    if name.startswith(("object", "endless")):
        return  # the object's own code decides
    with pytest.raises(PlanError):
        limpet.load(url, into=live)
    assert live["w"].tolist() == [0, 0]


def test_a_live_dict_that_contains_itself_is_named():
    url = unused_url()
    limpet.save(url, {"x": {"other": 1}})
    with pytest.raises(Unsupported, match="contains itself") as e:
        limpet.load(url, into={"x": STATES["itself in a dict"]()}, missing="keep")
    assert_refused(e.value)


@pytest.mark.parametrize("wrap", [list, tuple, "dict", "own", "replicated", "object"])
def test_whatever_is_saved_can_be_loaded(wrap):
    """The limits of a save are not above those of a load."""
    make: dict[Any, Callable[[Any], Any]] = {
        list: lambda v: [v],
        tuple: lambda v: (v,),
        "dict": lambda v: {"a": v},
    }
    outer: dict[Any, Callable[[Any], Any]] = {
        "own": Own, "replicated": limpet.Replicated, "object": Stateful,
    }  # fmt: skip
    saved = 0
    for levels in range(MAX_DEPTH - 5, MAX_DEPTH + 3):
        value = nest(make.get(wrap, lambda v: {"a": v}), levels)
        url, finish = unused_url(), outer.get(wrap, lambda v: v)
        try:
            limpet.save(url, {"x": finish(value)})
        except Unsupported:
            continue
        saved += 1
        assert limpet.load(url)
        live = {"x": finish(nest(make.get(wrap, lambda v: {"a": v}), levels))}
        limpet.load(url, into=live)
    assert saved


@pytest.mark.parametrize(
    ("start", "end"), [('{"list":[', "]}"), ('{"dict":{"a":', "}}"), ("[", "]")]
)
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 1_000, LEVELS])
def test_a_manifest_that_is_nested_too_deeply_is_invalid(start, end, levels):
    files = save_to_files({"x": {"hole": 1}})
    key = manifest_key(files)
    body = files[key].split(b",", 2)[2]
    node = b'{"dict":{"hole":1}}'
    assert node in body
    deep = f"{start * levels}1{end * levels}".encode()
    files[key] = seal_body(body.replace(node, deep))
    location = store_of(files).at(key.partition("/")[0])
    with pytest.raises(ManifestInvalid):
        limpet.open(location)
