"""Names of DCP against the tree: as DCP's own planner flattens the same state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast.engine.state.flatten import flatten
from holdfast.errors import PlanError
from holdfast.format.validate import check_tree
from holdfast.integrations.dcp import fqns

LEAF = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(torch.zeros(2)), st.tuples(st.integers())
)
NAME = st.text("ab./~0é", min_size=0, max_size=3)
STATES = st.dictionaries(
    NAME,
    st.recursive(
        LEAF,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def dcp_mapping(state):
    """What DCP's planner makes of a state; None where it refuses it."""
    try:
        return flatten_state_dict(state)[1]
    except ValueError:
        return None


def blob(n):
    return {"blob": ["bytes", n]}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(STATES)
def test_a_native_tree_has_the_names_that_dcp_gives_its_state(state):
    mapping = dcp_mapping(state)
    root = flatten({k: fresh(v) for k, v in state.items()}).tree
    if mapping is None:
        with pytest.raises(PlanError, match="for two leaves of this snapshot"):
            fqns.collect_entries(root, flattened=False)
    else:
        found = fqns.collect_entries(root, flattened=False)
        assert fqns.mapping_of(found) == mapping
        tensors = {n for n, v in flatten_state_dict(state)[0].items() if torch.is_tensor(v)}
        assert {n for n, e in found.items() if e.is_tensor} == tensors


def fresh(value):
    """The same with tensors of their own, so that none is tied."""
    if isinstance(value, dict):
        return {k: fresh(v) for k, v in value.items()}
    if isinstance(value, list):
        return [fresh(v) for v in value]
    return value.clone() if torch.is_tensor(value) else value


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(STATES)
def test_a_tree_built_of_what_dcp_flattens_comes_back_as_its_mapping(state):
    mapping = dcp_mapping(state) or {}
    paths = {n: fqns.path_of(n, mapping) for n in mapping}
    assert paths == mapping
    root = fqns.build_tree({path: blob(1) for path in paths.values()})
    found = fqns.collect_entries(root, flattened=True)
    assert fqns.mapping_of(found) == mapping
    assert {e.key for e in found.values()} == set(map(fqns.key_of, paths.values()))
    assert check_tree(root, "m").keys() == set(map(fqns.key_of, paths.values()))


@pytest.mark.parametrize(
    "mapping",
    [
        None,
        {},
        {"a.b": ("a",)},
        {"a.b": ["a", "b"]},
        {"a.b": ()},
        {"a.b": ("a", -1)},
        {"a.b": ("a", b"b")},
        {"a.b": ("a", True)},
        {"a.True": ("a", True)},
        7,
    ],
)
def test_a_mapping_that_is_not_dcps_own_leaves_the_name_one_level(mapping):
    assert fqns.path_of("a.b", mapping) == ("a.b",)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", 0), ("a", "x")],
        [("a", 0), ("a", "0")],
        [("a", 0, "b"), ("a", 0)],
    ],
)
def test_contradicting_paths_are_refused_by_name(paths):
    with pytest.raises(PlanError, match=r"DCP uses the name 'a(\.0)?' for two different values"):
        fqns.build_tree({path: blob(1) for path in paths})


def test_a_list_of_which_a_part_was_saved_has_holes_that_are_no_leaves():
    root = fqns.build_tree({("a", 2): blob(1), ("a", 0): blob(2)})
    assert root == {"dict": {"a": {"list": [blob(2), None, blob(1)]}}}
    assert list(fqns.collect_entries(root, flattened=True)) == ["a.0", "a.2"]


def test_nothing_makes_an_empty_state():
    assert fqns.build_tree({}) == {"dict": {}}
    assert fqns.collect_entries({"dict": {}}, flattened=True) == {}
