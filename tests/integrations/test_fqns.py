"""Compare the names that DCP's planner gives to a state with those of Limpet's tree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from limpet.errors import PlanError
from limpet.format.tree import check_tree
from limpet.integrations import dcp_names as fqns
from limpet.state.flatten import flatten

LEAVES = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(torch.zeros(2)), st.tuples(st.integers())
)
NAMES = st.text("ab./~0é", min_size=0, max_size=3)
STATES = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def dcp_mapping(state):
    """Return the mapping that DCP's planner makes for a state; None if it refuses the state."""
    try:
        return flatten_state_dict(state)[1]
    except ValueError:
        return None


def blob(n):
    return {"blob": ["bytes", n]}


@pytest.mark.slow
@settings(max_examples=60)
@given(STATES)
def test_native_tree_has_the_names_that_dcp_gives_to_the_state(state):
    mapping = dcp_mapping(state)
    root = flatten({k: clone_tensors(v) for k, v in state.items()}).tree
    if mapping is None:
        with pytest.raises(PlanError, match="for two leaves of this snapshot"):
            fqns.collect_entries(root, flattened=False)
    else:
        entries = fqns.collect_entries(root, flattened=False)
        assert fqns.mapping_of(entries) == mapping
        tensors = {n for n, v in flatten_state_dict(state)[0].items() if torch.is_tensor(v)}
        assert {n for n, e in entries.items() if e.is_tensor} == tensors


def clone_tensors(value):
    """Return a copy of a state in which no tensors are tied."""
    if isinstance(value, dict):
        return {k: clone_tensors(v) for k, v in value.items()}
    if isinstance(value, list):
        return [clone_tensors(v) for v in value]
    return value.clone() if torch.is_tensor(value) else value


@pytest.mark.slow
@settings(max_examples=60)
@given(STATES)
def test_tree_built_from_a_flattened_state_gives_back_its_mapping(state):
    mapping = dcp_mapping(state) or {}
    paths = {n: fqns.path_of(n, mapping) for n in mapping}
    assert paths == mapping
    root = fqns.build_tree({path: blob(1) for path in paths.values()})
    entries = fqns.collect_entries(root, flattened=True)
    assert fqns.mapping_of(entries) == mapping
    assert {e.key for e in entries.values()} == set(map(fqns.key_of, paths.values()))
    assert check_tree(root, "m").keys() == set(map(fqns.key_of, paths.values()))


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
def test_contradicting_paths_are_refused_with_their_name(paths):
    with pytest.raises(PlanError, match=r"DCP uses the name 'a(\.0)?' for two different values"):
        fqns.build_tree({path: blob(1) for path in paths})


def test_gaps_of_a_partially_saved_list_are_not_leaves():
    root = fqns.build_tree({("a", 2): blob(1), ("a", 0): blob(2)})
    assert root == {"dict": {"a": {"list": [blob(2), None, blob(1)]}}}
    assert list(fqns.collect_entries(root, flattened=True)) == ["a.0", "a.2"]
