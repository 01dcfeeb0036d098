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
from limpet.loading.snapshot import reader_of
from limpet.storage.memory import MemoryStore
from tests.forging import files_of, plain_values, small_state, values_equal
from tests.states import DTYPE_NAMES

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
keys = st.recursive(
    scalars.filter(lambda k: "nan" not in repr(k)),
    lambda k: st.tuples(k) | st.frozensets(k, max_size=3),
    max_leaves=4,
)
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
    *("..", ".", "a/b", "a", "b", "~", "~0", "~1", "~2", "nul\0", "🪸", "x" * 4096, "", " ", "é"),
    *("__metadata__", "__metadata__~", "a@0", "%00", "C:\\x", "-", "\n", '"', "\u202e"),
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
    state |= {d: torch.zeros(4, dtype=getattr(torch, d)) for d in DTYPE_NAMES}
    limpet.save(str(tmp_path / "version_1"), state)
    shard = next((tmp_path / "version_1").glob("*.safetensors"))
    with safe_open(shard, "pt") as f:
        names = set(f.keys())
        assert names == set(limpet.open(str(tmp_path / "version_1")).keys())
        assert f.get_tensor("float32").dtype == torch.float32
        assert f.get_tensor("🪸").tolist() == [NAMES.index("🪸")]
        assert f.get_tensor("a~1b").tolist() == [NAMES.index("a/b")]
