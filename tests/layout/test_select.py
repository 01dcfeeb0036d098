"""Patterns over keys, and renames, which match the same keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.layout.select import find_renames, make_key_filter, number_renames


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("model", "model model/conv model/a/b model.ema", "models my/model"),
        ("model/conv", "model/conv model/conv.weight model/conv/x", "model/conv1.weight model/con"),
        ("model/b.1", "model/b.1 model/b.1.weight", "model/b.10.weight model/b"),
        ("o/state/m.0", "o/state/m.0.weight/exp_avg o/state/m.0.bias/step", "o/state/m.01.weight"),
        ("model/*", "model/conv.weight model/fc", "model model/a/b"),
        ("model/c*.weight", "model/c.weight model/conv.a.weight", "model/c.weight.x"),
    ],
)
def test_a_pattern_matches_keys(pattern, matching, others):
    for patterns in (pattern, ["unused", pattern]):
        selected = make_key_filter(patterns)
        assert [k for k in f"{matching} {others}".split() if selected(k)] == matching.split()


NAMES = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=4).map(".".join)


@given(NAMES, NAMES)
def test_keys_and_renames_match_the_same_names(pattern, name):
    is_renamed = bool(find_renames(name, number_renames({pattern: "new"})))
    assert make_key_filter(pattern)(name) == is_renamed
