"""A load returns plain values and leaves with their value and type, under any name."""

from collections import Counter, OrderedDict
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import limpet
from limpet.errors import Unsupported
from limpet.format import tree
from limpet.format.tree import MAX_DEPTH, MAX_DIMENSIONS, check_tree
from limpet.snapshot.snapshot import reader_of
from limpet.storage.memory import MemoryStore
from tests.forging import TORCH_DTYPES, files_of, plain_values, small_state, values_equal

scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(max_size=20),
    st.sampled_from([-0.0, nan, 1 << 63, -(1 << 63), (1 << 63) - 1, "__metadata__", "..", "~2"]),
    st.sampled_from([np.float32(0.1), np.int8(-1), np.bool_(True), np.str_("x"), np.bytes_(b"")]),
)
keys = st.recursive(scalars, lambda k: st.tuples(k) | st.frozensets(k, max_size=3), max_leaves=4)
values = st.recursive(
    scalars | st.sets(keys, max_size=3) | st.binary(max_size=5).map(bytearray),
    lambda v: st.one_of(
        st.lists(v, max_size=4),
        st.lists(v, max_size=4).map(tuple),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), v, max_size=4),
        st.dictionaries(keys, v, max_size=4),
        st.dictionaries(keys, v, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:ComplexHalf", "ignore:Sparse invariant"
)


def save_and_load(state):
    store = MemoryStore()
    limpet.save(store, state)
    return limpet.load(store)


@pytest.mark.slow
@settings(derandomize=True, max_examples=150)
@given(values)
def test_plain_values_keep_their_types(value):
    state = {"x": value}
    assert values_equal(save_and_load(state), state)


def test_every_kind_of_node_is_restored():
    assert values_equal(save_and_load(small_state()), small_state())
    assert values_equal(save_and_load(plain_values()), plain_values())


NAMES = [
    "..",
    ".",
    "a/b",
    "a",
    "b",
    "~",
    "~0",
    "~1",
    "~2",
    "nul\0",
    "🪸",
    "x" * 4096,
    "",
    " ",
    "é",
    "__metadata__",
    "__metadata__~",
    "a@0",
    "%00",
    "C:\\x",
    "-",
    "\n",
    '"',
    "\u202e",
]


def test_any_name_is_valid():
    state: dict[Any, Any] = {n: torch.tensor([i]) for i, n in enumerate(NAMES)}
    state["deep"] = {n: {n: torch.tensor([i, i])} for i, n in enumerate(NAMES)}
    state["keys"] = {1: torch.tensor([1.0]), "1": torch.tensor([2.0]), "1~2": torch.tensor([3.0])}
    store = MemoryStore()
    snapshot = limpet.save(store, state)
    assert values_equal(limpet.load(store), state)
    assert snapshot.verify().ok
    assert len(set(snapshot.keys())) == len(reader_of(snapshot).leaves) == 2 * len(NAMES) + 3
    files = {key.partition("-")[0].partition(".")[0] for key in files_of(store)}
    assert files == {"manifest", "shard"}, "no file is named after a leaf"


def test_an_empty_name_is_distinct_from_other_names():
    one, two = torch.tensor([1]), torch.tensor([2])
    state = {"": {"a": one, "": {"a": two}}, "a": two + 1, "~": {"a": two + 2}}
    assert values_equal(save_and_load(state), state)


def test_keys_with_equal_text_are_distinguished_in_a_partial_load():
    state = {"d": {1: torch.tensor([1.0]), "1": torch.tensor([2.0]), (1,): [torch.tensor([3.0])]}}
    store = MemoryStore()
    keys = limpet.save(store, state).keys()
    for key, name, value in zip(keys, (1, "1"), (1.0, 2.0), strict=False):
        part = limpet.load(store, keys=key)
        assert values_equal(part, {"d": {name: torch.tensor([value])}})


def test_safetensors_can_open_the_shard(tmp_path):
    state = {n: torch.tensor([i]) for i, n in enumerate(NAMES) if n != "__metadata__"}
    state |= {d: torch.zeros(4, dtype=getattr(torch, d)) for d in TORCH_DTYPES}
    limpet.save(str(tmp_path / "version_1"), state)
    shard = next((tmp_path / "version_1").glob("*.safetensors"))
    with safe_open(shard, "pt") as f:
        names = set(f.keys())
        assert names == set(limpet.open(str(tmp_path / "version_1")).keys())
        assert f.get_tensor("float32").dtype == torch.float32
        assert f.get_tensor("🪸").tolist() == [NAMES.index("🪸")]
        assert f.get_tensor("a~1b").tolist() == [NAMES.index("a/b")]


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 2)])
def test_every_dtype_is_restored_bit_for_bit(name, shape):
    dtype = getattr(torch, name)
    size = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape)) * size
    raw = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count, np.uint8)
    t = torch.from_numpy(raw).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert values_equal(save_and_load({"t": t})["t"], t)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 2], ">i4"),
        np.array(["a", "bcd"]),
        np.array([b"", b"x"]),
        np.array(["2026-01-01"], "M8[ns]"),
        np.array([3], "m8[25s]"),
        np.zeros(3, "U0"),
        np.zeros((2, 0), "S3"),
        np.zeros(2, "V5"),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "i4")], align=True)),
        np.zeros(2, [("a", "<i4", (2, 3)), (("title", "b"), [("c", "S2"), ("ä", ">f8")])]),
        np.longdouble([1.25, -2]),
        np.clongdouble([1.25j]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10, dtype=">i8")[::3],
    ],
    ids=lambda a: str(a.dtype)[:30],
)
def test_arrays_of_other_dtypes_are_restored(array):
    assert values_equal(save_and_load({"a": array})["a"], array)
    if array.size:
        one = array.flat[0]
        found = save_and_load({"a": one})["a"]
        assert type(found) is type(one)
        assert found.dtype == one.dtype
        assert found == one


@pytest.mark.parametrize(
    "value",
    [np.str_(""), np.bytes_(b""), np.void(b""), np.void(b"abc"), 1 << 20000, -(1 << 20000)],
    ids=range(6),
)
def test_values_that_are_difficult_to_encode_as_text(value):
    state = {"x": value, "in": [value], "as": {1: (value,)}}
    assert values_equal(save_and_load(state), state)


def check_rejected(value):
    store = MemoryStore()
    with pytest.raises(Unsupported) as e:
        limpet.save(store, {"here": value})
    assert e.value.leaf.startswith("here")
    assert not list(store.list(""))


def test_values_that_could_not_be_restored_exactly_are_rejected():
    record = np.zeros(2, np.dtype((np.record, [("a", "<i4")])))
    check_rejected(record)
    check_rejected(record[0])
    check_rejected(np.array([None]))
    check_rejected(np.zeros(2, np.dtype("<i4", metadata={"unit": "m"})))
    check_rejected(torch.zeros([1] * (MAX_DIMENSIONS + 1)))
    check_rejected(np.zeros([1] * MAX_DIMENSIONS, ">i4"))
    check_rejected("\ud800")
    check_rejected({"\ud800": 1})
    check_rejected({1 << 20000: {}})


def nested(depth, inner):
    for _ in range(depth):
        inner = [inner]
    return inner


class Stateful:
    def __init__(self, inner):
        self.inner = inner

    def state_dict(self):
        return {"inner": self.inner}

    def load_state_dict(self, state):
        self.inner = state["inner"]


@pytest.mark.parametrize("inner", [1, 1 << 80, "x", nan, torch.ones(1), [1, 2], {"a": None}, {1}])
def test_deeply_nested_values_are_rejected_or_restored(inner):
    restored = 0
    for depth in (1, *range(MAX_DEPTH - 4, MAX_DEPTH + 3)):
        state = {"x": nested(depth, inner)}
        store = MemoryStore()
        try:
            limpet.save(store, state)
        except Unsupported:
            continue
        assert values_equal(limpet.load(store), state)
        restored += 1
    assert 2 <= restored < 8
    check_rejected(nested(60, Stateful(nested(60, inner))))


def test_the_validator_accepts_encoded_trees():
    def refuse(value, key, depth):
        raise AssertionError(key)

    check_tree(tree.encode(plain_values(), "", refuse), "f")
