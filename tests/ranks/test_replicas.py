"""Values that several ranks have: bitwise equal ones are stored once, different ones raise."""

from collections import Counter, OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.errors import DTypeMismatch, PlanError, ShapeMismatch
from limpet.state.replication import PerRank, Replicated
from limpet.state.sharding import Boxed
from limpet.types import BLOCK_SIZE
from tests.ranks.rank_threads import floats, for_each_rank, load_on_ranks, save_error, save_on_ranks
from tests.states import TORCH_DTYPES, assert_same, clone, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

NAN = float("nan")


def bits(*words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def flipped(tensor, byte=-1):
    """Return a copy of the tensor with one bit flipped."""
    other = tensor.clone(memory_format=torch.contiguous_format)
    other.view(-1).view(torch.uint8)[byte] ^= 1
    return other


@settings(max_examples=60)
@given(
    st.integers(2, 6),
    st.sampled_from(TORCH_DTYPES),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.data(),
)
def test_a_flipped_bit_on_one_rank_raises_on_all_ranks(size, dtype, shape, data):
    whole = random_tensor(dtype, shape, 1)
    different_rank = data.draw(st.integers(0, size - 1))
    byte = data.draw(st.integers(0, whole.nbytes - 1))
    states = for_each_rank(size, lambda r: {"other": floats(1), "m": {"w": whole.clone()}})
    states[different_rank]["m"]["w"] = flipped(whole, byte)
    e = save_error(PlanError, *states)
    assert e.leaves == ("m/w",)
    others = [r for r in range(size) if r != different_rank]
    assert f"rank {different_rank}" in str(e)
    if size > 2:
        assert f"ranks {', '.join(map(str, others))}" in str(e)
    assert "other" not in e.found.replace("other than", "")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (floats(0.0), floats(-0.0)),
        (bits(0x7FC00000), bits(0x7FC00001)),  # NaNs
        (bits(0x7FC00000), bits(-0x400000)),
        (np.zeros(3), -np.zeros(3)),
        (np.array([("a", 1)], dtype="U3,i4"), np.array([("b", 1)], dtype="U3,i4")),
        (b"x" * 5000, b"x" * 4999 + b"y"),
        (
            torch.zeros(BLOCK_SIZE + 1, dtype=torch.uint8),
            flipped(torch.zeros(BLOCK_SIZE + 1).byte()),
        ),
        (
            torch.zeros(3, BLOCK_SIZE, dtype=torch.uint8),
            flipped(torch.zeros(3, BLOCK_SIZE).byte(), BLOCK_SIZE),
        ),
        (torch.eye(300).t()[1:], flipped(torch.eye(300).t()[1:])),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    ],
    ids=lambda v: str(v)[:30],
)
def test_values_that_differ_in_one_bit_raise(one, other):
    e = save_error(PlanError, {"a": {"b": one}}, {"a": {"b": one}}, {"a": {"b": other}})
    assert e.leaves[0].startswith("a/b")
    assert "ranks 0, 1" in str(e)
    assert "rank 2" in str(e)


@pytest.mark.parametrize(
    "value",
    [
        floats(NAN, float("inf"), -0.0),
        bits(0x7FC00001, -0x400001),
        np.array([NAN, -0.0]),
        torch.empty(0, 3),
        floats(1)[0],
        torch.eye(3).to_sparse(),
        torch.zeros(2 * BLOCK_SIZE + 3, dtype=torch.uint8),
        b"x" * 5000,
        bytearray(b""),
    ],
    ids=lambda v: str(v)[:30],
)
def test_equal_values_are_written_once(value):
    store = save_on_ranks(*for_each_rank(3, lambda r: {"a": clone(value), "b": [clone(value)]}))
    assert_same({"a": value, "b": [value]}, limpet.load(store))


def test_strides_are_not_compared():
    whole = torch.arange(70_000.0).reshape(700, 100)
    column_major = whole.t().contiguous().t()
    spaced = torch.zeros(700, 200)[:, ::2].copy_(whole)
    assert torch.equal(
        limpet.load(save_on_ranks(*[{"w": w} for w in (whole, column_major, spaced)]))["w"], whole
    )
    e = save_error(PlanError, {"w": whole}, {"w": whole + 1}, {"w": flipped(column_major)})
    assert "w (different on every rank)" in str(e)


def test_a_tensor_is_compared_only_between_ranks_that_have_it():
    """The ranks are stages: the ranks without a tensor do not hide a difference between others."""
    same_on_two = floats(1, 2)
    states = [{}, {"a": same_on_two}, {"a": same_on_two.clone(), "b": floats(3)}, {"b": floats(4)}]
    e = save_error(PlanError, *states)
    assert e.leaves == ("b",)
    assert "A tensor of the state is not the same" in str(e)
    assert "b (rank 2 vs. rank 3)" in str(e)


def test_the_error_names_a_limited_number_of_different_tensors():
    states = for_each_rank(3, lambda r: {f"k{i:02}": floats(r * (i % 2)) for i in range(90)})
    e = save_error(PlanError, *states)
    assert len(e.leaves) == 45
    assert "45 tensors of the state are not the same" in str(e)
    assert "k09 (different on every rank); and 40 more" in str(e)
    assert "k11" not in str(e)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (ShapeMismatch, floats(1, 2), floats(1)),
        (DTypeMismatch, floats(1, 2), floats(1, 2).int()),
        (ShapeMismatch, floats(1, 2), floats(1, 2)[None]),
        (PlanError, np.ones(2, "f4"), torch.ones(2)),
        (ShapeMismatch, Boxed(floats(1), (0,), (2,)), Boxed(floats(1), (1,), (3,))),
        (PlanError, Boxed(floats(1), (0,), (2,)), Boxed(floats(1), (0,), (2,))),  # a gap
        (PlanError, Boxed(floats(1, 2), (0,), (3,)), Boxed(floats(2, 3), (1,), (3,))),  # an overlap
    ],
    ids=lambda v: str(v)[:30],
)
def test_mismatched_tensors_raise(kind, one, other):
    with pytest.raises(PlanError) as e:
        save_on_ranks({"a": one}, {"a": other})
    assert isinstance(e.value, kind)
    assert "a" in e.value.leaves
    if "boxes" not in str(e.value).split("found")[1]:
        assert "on rank 0" in str(e.value)
        assert "on rank 1" in str(e.value)


def test_equal_boxes_are_stored_once_without_a_comparison():
    states = for_each_rank(4, lambda r: {"w": Boxed(floats(r % 2, r)[None], (r % 2, 0), (2, 2))})
    loaded = limpet.load(save_on_ranks(*states))["w"]
    assert loaded[:, 0].tolist() == [0, 1]
    assert loaded[0, 1] in (0, 2)
    assert loaded[1, 1] in (1, 3)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (1, 2, "1 on ranks 0, 1, 2 on rank 2"),
        (1, True, "1 on ranks 0, 1, True on rank 2"),
        (0.0, -0.0, "0.0 on ranks 0, 1, -0.0 on rank 2"),
        ("a", b"a", """'a' on ranks 0, 1, bytes "YQ==" on rank 2"""),
        (NAN, 1.0, 'float "nan" on ranks 0, 1, 1.0 on rank 2'),
        ([1], [1, 2], "list [1] on ranks 0, 1, list [1,2] on rank 2"),
        ({"x": 1}, [1], 'dict {"x":1} on ranks 0, 1, list [1] on rank 2'),
        ({"x": 1}, OrderedDict(x=1), 'dict {"x":1} on ranks 0, 1, ordered {"x":1} on rank 2'),
        ({1: 2}, Counter({1: 2}), "items [[1,2]] on ranks 0, 1, items [[1,2]] on rank 2"),
        (np.float32(1), np.float64(1), 'scalar ["<f4","AACAPw=="] on ranks 0, 1, scalar ["<f8"'),
        (1, floats(1), '1 on ranks 0, 1, tensor ["float32",[1]] on rank 2'),
        (np.ones(2, "f4"), floats(1, 1), 'array ["float32",[2]] on ranks 0, 1, tensor ["float32"'),
        (1, PerRank(1), "1 on ranks 0, 1, a PerRank on rank 2"),
        (1, Replicated(1), "1 on ranks 0, 1, a Replicated on rank 2"),
        ([0] * 98, [0] * 99, "list [0,0,0,"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_the_error_shows_all_variants_of_a_different_value(one, other, words):
    e = save_error(PlanError, *[{"a": {"b": clone(v)}, "c": 1} for v in (one, one, other)])
    assert f"a/b: {words}" in str(e)
    assert e.leaves == ("a/b",)


def test_one_error_names_all_different_values():
    states = for_each_rank(
        4, lambda r: {"a": r, "b": [0, {"c": r // 2}], "d": (1, r % 2 == 3), "e": 5}
    )
    e = save_error(PlanError, *states)
    assert e.leaves == ("a", "b/1/c")
    assert "a: 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3; " in str(e)
    assert "b/1/c: 0 on ranks 0, 1, 1 on ranks 2, 3" in str(e)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5) | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(-2, 2) | st.booleans(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), plain, max_size=4), st.integers(2, 4))
def test_equal_values_of_any_kind_are_stored_once(state, size):
    assert_same(state, limpet.load(save_on_ranks(*for_each_rank(size, lambda r: clone(state)))))


@settings(max_examples=60)
@given(st.lists(plain, min_size=2, max_size=3))
def test_different_values_merge_completely_or_raise(values):
    """Dicts may have different names on different ranks. Then the loaded dict has all of them."""
    error = None
    try:
        loaded = limpet.load(save_on_ranks(*[{"x": clone(v)} for v in values]))["x"]
    except PlanError as e:
        error = e
    if error is None:
        for v in values:
            assert_contained(v, loaded)
    elif not any(isinstance(v, dict | list | tuple) for v in values):
        assert len({repr(v) for v in values}) > 1


def assert_contained(part, whole):
    """Check that every value of a rank is in the merged value under its name."""
    assert type(part) is type(whole)
    if isinstance(part, dict):
        for name, value in part.items():
            (found,) = (k for k in whole if (type(k), k) == (type(name), name))
            assert_contained(value, whole[found])
    elif isinstance(part, list | tuple):
        assert len(part) == len(whole)
        for a, b in zip(part, whole, strict=True):
            assert_contained(a, b)
    else:
        assert_same(part, whole)


def test_names_that_are_equal_as_text_must_have_the_same_order_on_all_ranks():
    """Their keys depend on their order. In another order, one name would get the other's boxes."""
    states = [
        {"d": {1: Boxed(floats(1), (0,), (2,)), "1": Boxed(floats(10), (0,), (2,))}},
        {"d": {"1": Boxed(floats(20), (1,), (2,)), 1: Boxed(floats(2), (1,), (2,))}},
    ]
    assert "d: items [[1," in str(save_error(PlanError, *states))
    states[1]["d"] = dict(reversed(states[1]["d"].items()))
    assert_same({"d": {1: floats(1, 2), "1": floats(10, 20)}}, limpet.load(save_on_ranks(*states)))
    e = save_error(PlanError, {"d": {1: floats(1), "x": 0}}, {"d": {"1": floats(1), 2: 0}})
    assert e.leaves == ("d",)


def tied(value, *names):
    return dict.fromkeys(names, value)


def test_tensors_tied_on_some_ranks_only_raise():
    x = floats(5, 6)
    store = save_on_ranks(*for_each_rank(2, lambda r: tied(x.clone(), "a", "b")))
    loaded = limpet.load(store)
    assert loaded["a"] is loaded["b"]
    e = save_error(PlanError, tied(x, "a", "b"), {"a": x.clone(), "b": x.clone()})
    assert 'b: tied "a" on rank 0, tensor ["float32",[2]] on rank 1' in str(e)
    e = save_error(PlanError, {"b": x.clone()}, tied(x, "a", "b"))
    assert 'b: tensor ["float32",[2]] on rank 0, tied "a" on rank 1' in str(e)


def test_a_stage_may_tie_tensors_that_others_have_once():
    x = floats(5, 6)
    loaded = limpet.load(save_on_ranks({"a": x.clone()}, tied(x, "a", "b"), {"c": 1}))
    assert loaded["a"] is loaded["b"]
    part = [Boxed(floats(r), (r,), (2,)) for r in range(2)]
    loaded = limpet.load(save_on_ranks(tied(part[0], "a", "b"), tied(part[1], "a", "b")))
    assert loaded["a"] is loaded["b"]
    assert loaded["a"].tolist() == [0, 1]


def test_a_replicated_value_is_saved_from_rank_0():
    states = for_each_rank(
        3,
        lambda r: {
            "a": Replicated({"n": r + 1, "t": floats(r, NAN), "l": list(range(r))}),
            "b": Replicated(np.full(3, r)),
        },
    )
    store = save_on_ranks(*states)
    assert_same(
        {"a": {"n": 1, "t": floats(0, NAN), "l": []}, "b": np.zeros(3, int)}, limpet.load(store)
    )
    load_on_ranks(store, *states)
    for state in states:
        assert_same({"n": 1, "t": floats(0, NAN), "l": []}, state["a"].value)
        assert_same(np.zeros(3, int), state["b"].value)


def test_a_replicated_value_is_saved_from_the_first_rank_that_has_it():
    store = save_on_ranks({"x": 1}, *for_each_rank(2, lambda r: {"a": Replicated([r, floats(r)])}))
    assert_same({"x": 1, "a": [0, floats(0)]}, limpet.load(store))


def test_replicated_tensors_of_different_shapes_raise():
    make_states = partial(map, lambda n: {"a": Replicated(torch.zeros(n))})
    assert "a: float32 [1] on rank 0" in str(save_error(ShapeMismatch, *make_states([1, 2])))


def test_replicas_with_other_orders_of_dimensions_are_equal():
    """The saved order is that of the first rank."""
    t = torch.arange(12.0).view(3, 4)
    store = save_on_ranks({"w": t.t()}, {"w": t.t().contiguous()})
    loaded = limpet.load(store)["w"]
    assert_same(t.t(), loaded)
    assert loaded.stride() == (1, 4)
