"""Loads into live state: matching states, differences, and that nothing is changed before all
differences are known."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import limpet
from limpet.errors import DTypeMismatch, MissingLeaf, PlanError, ShapeMismatch, UnexpectedLeaf
from tests.states import TORCH_DTYPES, assert_same, clone, random_tensor, save_state


def assert_load_fails(snapshot, live, kind, *parts, **options):
    """Assert that the load raises exactly ``kind`` with a message that contains all ``parts``, and
    that ``live`` is unchanged."""
    before = clone(live)
    with pytest.raises(PlanError) as e:
        limpet.load(save_state(snapshot), into=live, **options)
    assert type(e.value) is kind
    for part in parts:
        assert part in str(e.value)
    assert_same(before, live)
    return e.value


def assert_loads(snapshot, live, expected, **options):
    """Assert that the load gives ``live`` the values of ``expected``. Return its report."""
    report = limpet.load(save_state(snapshot), into=live, **options)
    assert isinstance(report, limpet.LoadReport)
    assert_same(expected, live)
    return report


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def test_one_error_names_all_differences():
    e = assert_load_fails(
        {"a": ONE, "b": {"c": ONE, "d": 1}, "shape": ONE, "dtype": ONE, "same": TWO},
        {"x": ONE, "b": {"e": ONE}, "shape": torch.zeros(3), "dtype": ONE.int(), "same": ONE},
        PlanError,
        "2 missing in the snapshot: x, b/e",
        "3 unexpected in the snapshot: b/c, b/d, a",
        "1 with a different shape: shape [2], live [3]",
        "1 with a different dtype or kind: dtype float32, live int32",
        "nothing was changed",
        'missing="keep"',
    )
    assert e.missing == ("x", "b/e")
    assert e.unexpected == ("b/c", "b/d", "a")


def test_the_most_specific_error_class_is_raised():
    assert_load_fails({"a": 1}, {"a": 1, "b": 2}, MissingLeaf, "missing in the snapshot: b")
    assert_load_fails({"a": 1, "b": 2}, {"a": 1}, UnexpectedLeaf, "unexpected in the snapshot: b")
    assert_load_fails({"a": ONE}, {"a": torch.zeros(1, 2)}, ShapeMismatch, "a [2], live [1, 2]")
    assert_load_fails({"a": ONE}, {"a": ONE.double()}, DTypeMismatch, "a float32, live float64")
    assert_load_fails({"a": np.ones(2)}, {"a": np.ones(3)}, ShapeMismatch, "a [2], live [3]")
    assert_load_fails(
        {"a": np.ones(2)}, {"a": np.ones(2, int)}, DTypeMismatch, "a float64, live int64"
    )


def test_a_long_list_of_keys_is_shortened():
    state = {f"k{i}": i for i in range(50)}
    e = assert_load_fails(state, {}, UnexpectedLeaf, "50 unexpected", "k19, and 30 more")
    assert len(e.unexpected) == 50
    state = {f"k{i}": [i, i, ONE] for i in range(50)}
    assert_load_fails(state, {}, UnexpectedLeaf, "150 unexpected", "k19 (3 leaves), and 90 more")


def test_the_advice_names_the_options_that_apply_and_are_not_set():
    a, b, both = {"a": 1}, {"b": 1}, {"a": 1, "b": 2}
    keys = "keys=[...] without what does not fit"
    assert_load_fails(a, both, MissingLeaf, 'as needed: missing="keep".')
    assert_load_fails(both, a, UnexpectedLeaf, f'as needed: {keys}, unexpected="ignore".')
    rest = f'rename={{OLD: NEW}}, {keys}, unexpected="ignore".'
    assert_load_fails(a, b, UnexpectedLeaf, f"as needed: {rest}", missing="keep")
    assert_load_fails({"a": ONE}, {"a": torch.ones(9)}, ShapeMismatch, ': mismatched="keep".')
    assert_load_fails({"a": ONE}, {"a": ONE.double()}, DTypeMismatch, "as needed: cast=True (in")
    assert_load_fails({"a": 1}, {"a": ONE}, DTypeMismatch, f"as needed: {keys}.")


def test_a_subtree_that_is_missing_completely_is_named_by_its_top_key():
    rng = {"python": (3, tuple(range(600)), None), "numpy": [1, 2]}
    e = assert_load_fails(
        {"rng": rng, "a": {"x": 1, "y": {"u": 1, "v": 2}}},
        {
            "a": {"z": {"u": ONE, "v": 2}, "x": 0},
            "net": {"weight": ONE, "b": 1},
            "one": {"leaf": 1},
        },
        PlanError,
        "5 missing in the snapshot: a/z (2 leaves), net (2 leaves), one/leaf.",
        "606 unexpected in the snapshot: a/y (2 leaves), rng (604 leaves).",
    )
    assert len(e.unexpected) == 606
    assert e.missing[:3] == ("a/z/u", "a/z/v", "net/weight")


def test_one_error_names_all_differences_of_a_module():
    m, live = nn.Linear(2, 3), nn.Linear(2, 4)
    with pytest.raises(ShapeMismatch, match=r"2 with a different shape: m/weight .*, m/bias") as e:
        limpet.load(save_state({"m": m}), into={"m": live})
    assert "m/weight [3, 2], live [4, 2]" in str(e.value)
    bare = nn.Linear(2, 3, bias=False)
    with pytest.raises(UnexpectedLeaf, match="m/bias"):
        limpet.load(save_state({"m": m}), into={"m": bare})
    with pytest.raises(MissingLeaf, match="m/bias"):
        limpet.load(save_state({"m": bare}), into={"m": m})


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (ONE, np.ones(2, np.float32)),
        (np.ones(2, np.float32), ONE),
        (ONE, 1.0),
        (1.0, ONE),
        (1.0, np.ones(2)),
        ([1, 2], 1),
        ({"a": 1}, 1),
        ((1,), "text"),
        (ONE, {"a": ONE}),
        ([ONE], {"a": ONE}),
        ({"a": ONE}, [ONE]),
        (1, [1]),
        (1, (1,)),
        (1, {"a": 1}),
        (b"x" * 5000, ONE),
        (b"x", ONE),
        (None, ONE),
        ({1, 2}, [1, 2]),
        (np.float64(1), np.ones(())),
        (np.ones(2), np.ones(2, ">f8")),
        (np.ones(2, ">f8"), np.ones(2)),
        (np.array(["abc"]), np.array(["ab"])),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[ms]")),
        (np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")])),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_value_of_another_kind_is_refused(stored, live):
    assert_load_fails({"x": stored}, {"x": live}, DTypeMismatch, "x ")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_loaded_only_into_one_with_the_same_layout():
    coo = torch.eye(3).to_sparse()
    assert_load_fails({"x": coo}, {"x": torch.eye(3)}, DTypeMismatch, "x sparse")
    assert_load_fails(
        {"x": torch.eye(3)}, {"x": coo}, DTypeMismatch, "x tensor, live tensor sparse_coo"
    )
    assert_load_fails({"x": torch.eye(3).to_sparse_csr()}, {"x": coo}, DTypeMismatch, "x sparse")
    assert_load_fails(
        {"x": torch.eye(4).to_sparse()}, {"x": coo}, ShapeMismatch, "x [4, 4], live [3, 3]"
    )
    assert_load_fails({"x": coo.double()}, {"x": coo}, DTypeMismatch, "x float64, live float32")


def test_plain_values_are_replaced_by_values_of_any_type():
    state = {"a": 1, "b": "x", "c": None, "d": 2.5, "e": {1}, "f": b"x" * 5000, "g": np.int8(3)}
    assert_loads(state, {"a": "y", "b": 1, "c": 5, "d": None, "e": set(), "f": b"", "g": 0}, state)


def test_a_live_none_accepts_any_value():
    state = {"a": ONE, "b": [1, {"c": TWO}], "c": np.ones(2), "d": {"x": (1,)}}
    assert_loads(state, dict.fromkeys("abcd"), state)


def test_containers_are_filled_in_place():
    inner, items, ordered = {"t": TWO.clone()}, [0, TWO.clone()], OrderedDict(a=1)
    live = {"d": inner, "l": items, "t": (1, TWO.clone()), "o": ordered}
    t = live["t"][1]
    state = {"d": {"t": ONE}, "l": [5, ONE], "t": (7, ONE), "o": OrderedDict(a=2)}
    assert_loads(state, live, state)
    assert live["d"] is inner
    assert live["l"] is items
    assert live["o"] is ordered
    assert live["t"][1] is t


def test_a_live_list_of_plain_values_gets_the_saved_length():
    losses, empty = [1.0], []
    live = {"losses": losses, "empty": empty, "tuple": (1,)}
    state = {"losses": [3.0, 2.0, 1.0], "empty": [ONE, {"a": 1}], "tuple": (1, 2)}
    assert_loads(state, live, state)
    assert live["losses"] is losses
    assert live["empty"] is empty
    assert_loads({**state, "losses": []}, live, {**state, "losses": []})
    assert losses == []


def test_a_live_list_of_tensors_must_have_the_saved_length():
    assert_load_fails({"x": [ONE]}, {"x": [ONE.clone(), ONE.clone()]}, MissingLeaf, "x/1")
    assert_load_fails(
        {"x": [ONE, ONE, {"a": 1}]}, {"x": [TWO.clone(), TWO.clone()]}, UnexpectedLeaf, "x/2/a"
    )


def test_a_saved_list_is_loaded_into_a_live_tuple_and_the_reverse():
    assert_loads({"x": [1, ONE]}, {"x": (0, TWO.clone())}, {"x": (1, ONE)})
    assert_loads({"x": (1, ONE)}, {"x": [0, TWO.clone()]}, {"x": [1, ONE]})


def test_a_live_dict_keeps_its_order():
    assert_loads({"a": 1, "b": ONE}, {"b": TWO.clone(), "a": 0}, {"b": ONE, "a": 1})


def test_an_expanded_live_tensor_is_refused():
    with pytest.raises(PlanError, match="'x' is expanded"):
        limpet.load(save_state({"x": torch.ones(3, 2)}), into={"x": torch.zeros(2).expand(3, 2)})
    with pytest.raises(PlanError, match="'x' is expanded"):
        limpet.load(save_state({"x": torch.ones(3, 2)}), into={"x": torch.zeros(1).expand(3, 2)})
    live = {"x": torch.zeros(2, 1).expand(2, 1)}
    limpet.load(save_state({"x": torch.ones(2, 1)}), into=live)


def test_tied_live_tensors_are_refused_if_the_snapshot_has_two_leaves():
    t = torch.zeros(2)
    with pytest.raises(PlanError, match="'a' and 'b' share memory, but would get different") as e:
        limpet.load(save_state({"a": ONE, "b": TWO}), into={"a": t, "b": t})
    assert e.value.leaf == "b"
    assert t.tolist() == [0, 0]
    limpet.load(save_state({"a": ONE, "b": TWO}), into={"a": t, "b": t}, keys="a")
    assert t.tolist() == [1, 1]


def test_live_tensors_without_memory_are_refused():
    url = save_state({"x": ONE})
    freed = torch.zeros(2)
    freed.untyped_storage().resize_(0)
    for live in (freed, torch.empty(2, device="meta")):
        with pytest.raises(PlanError, match="'x' has no memory"):
            limpet.load(url, into={"x": live})


def test_inference_tensors_are_filled():
    with torch.inference_mode():
        live = {"a": torch.zeros(4, 3), "b": torch.zeros(3, 4).T}
    t = torch.randn(4, 3)
    with torch.inference_mode():
        limpet.load(save_state({"a": t, "b": t}), into=live)
    assert_same({"a": t, "b": t}, live)


def test_arrays_with_any_strides_are_filled_in_place():
    a = np.arange(24.0).reshape(4, 6)
    base = np.zeros((8, 12))
    live = {
        "fortran": np.zeros((4, 6), order="F"),
        "part": base[::2, ::-2],
        "contiguous": np.zeros((4, 6)),
        "record": np.zeros((8, 12), [("x", "f8"), ("y", "i2")])["x"][::2, 1::2],
    }
    addresses = {k: v.__array_interface__["data"] for k, v in live.items()}
    assert_loads(dict.fromkeys(live, a), live, dict.fromkeys(live, a))
    assert {k: v.__array_interface__["data"] for k, v in live.items()} == addresses
    assert not base[1::2].any()


@pytest.mark.parametrize("dtype", ["f4", "M8[s]", "U3"])
def test_a_read_only_array_is_replaced(dtype):
    a, frozen = np.arange(3).astype(dtype), np.zeros(3, dtype)
    frozen.flags.writeable = False
    live = {"x": frozen}
    limpet.load(save_state({"x": a}), into=live)
    assert_same(a, live["x"])
    assert live["x"] is not frozen
    assert_load_fails({"x": a[:2]}, {"x": frozen}, ShapeMismatch, "x [2], live [3]")


def test_a_live_memmap_is_filled_in_place(tmp_path):
    live = np.memmap(tmp_path / "x", np.int64, "w+", shape=(4,))
    limpet.load(save_state({"x": np.arange(4)}), into={"x": live})
    assert live.tolist() == [0, 1, 2, 3]


def test_missing_keep_leaves_missing_values_unchanged():
    live = {"a": TWO.clone(), "b": {"c": TWO.clone(), "d": 5}, "e": [7]}
    assert_loads({"a": ONE, "b": {}}, live, {**live, "a": ONE}, missing="keep")
    assert_load_fails({"z": 1}, {"a": 1}, UnexpectedLeaf, "z", missing="keep")


def test_unexpected_ignore_skips_unexpected_values():
    assert_loads({"a": ONE, "z": {"y": ONE}}, {"a": TWO.clone()}, {"a": ONE}, unexpected="ignore")
    assert_load_fails({"z": 1}, {"a": 1}, MissingLeaf, "a", unexpected="ignore")


def test_an_invalid_value_of_a_lenient_option_is_refused():
    for name in ("missing", "unexpected", "mismatched", "cast"):
        with pytest.raises(limpet.errors.LimpetError, match=f"{name}= must be .*, not 'both'"):
            limpet.load(save_state({"a": 1}), into={"a": 1}, **{name: "both"})


FLOATS = [d for d in TORCH_DTYPES if d.is_floating_point and d is not torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("to", FLOATS, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_cast_converts_between_floating_point_dtypes(to, strided):
    t = torch.randn(300, 40)
    memory = torch.zeros(40, 300, dtype=to).T if strided else torch.zeros(300, 40, dtype=to)
    assert_loads({"t": t}, {"t": memory}, {"t": t.to(to)}, cast=True)
    low = t.to(to)
    assert_loads({"t": low}, {"t": torch.zeros(300, 40)}, {"t": low.float()}, cast=True)


def test_cast_does_not_convert_complex_to_real_or_float_to_integer():
    t = torch.tensor([1.5, -2.0])
    assert_loads({"t": t.int()}, {"t": torch.zeros(2)}, {"t": t.int().float()}, cast=True)
    assert_loads(
        {"t": t.long()}, {"t": torch.zeros(2, dtype=torch.int8)}, {"t": t.to(torch.int8)}, cast=True
    )
    assert_loads({"t": t}, {"t": torch.zeros(2, dtype=torch.complex64)}, {"t": t + 0j}, cast=True)
    assert_load_fails(
        {"t": t + 1j}, {"t": t.clone()}, DTypeMismatch, "complex64, live float32", cast=True
    )
    assert_load_fails({"t": t}, {"t": t.int()}, DTypeMismatch, "float32, live int32", cast=True)
    assert_load_fails({"t": t}, {"t": t.bool()}, DTypeMismatch, "float32, live bool", cast=True)
    packed = random_tensor(torch.float4_e2m1fn_x2, (2,))
    assert_load_fails({"t": t}, {"t": packed}, DTypeMismatch, "float32, live float4", cast=True)
    assert_load_fails(
        {"t": packed}, {"t": t}, DTypeMismatch, "float4_e2m1fn_x2, live float32", cast=True
    )
    assert_load_fails({"t": t}, {"t": t.numpy()}, DTypeMismatch, "t tensor, live array", cast=True)
    assert_load_fails(
        {"t": t}, {"t": torch.zeros(3, dtype=torch.float64)}, ShapeMismatch, "t [2]", cast=True
    )


@pytest.mark.parametrize("order", ["C", "F"])
def test_cast_converts_arrays(order):
    a = np.random.default_rng(0).normal(size=(30, 20))
    for to in ("f4", "f2", ">f8", ">f4", "c8"):
        live = {"a": np.zeros((30, 20), to, order=order)}
        assert_loads({"a": a}, live, {"a": a.astype(to)}, cast=True)
    assert_loads(
        {"a": a.astype(">f4")},
        {"a": np.zeros((30, 20))},
        {"a": a.astype("f4").astype("f8")},
        cast=True,
    )
    assert_loads(
        {"a": np.arange(3)}, {"a": np.zeros(3, "f4")}, {"a": np.arange(3, dtype="f4")}, cast=True
    )
    assert_load_fails(
        {"a": a}, {"a": np.zeros((30, 20), int)}, DTypeMismatch, "a float64, live int64", cast=True
    )
    assert_load_fails({"a": a + 0j}, {"a": a.copy()}, DTypeMismatch, "a complex128", cast=True)
    assert_load_fails({"a": np.array(["1"])}, {"a": np.zeros(1)}, DTypeMismatch, "a <U1", cast=True)


class CheckedState:
    """An object that accepts only a state whose ``of`` is equal to its own."""

    def __init__(self, of, more=None):
        self.of, self.more, self.checked = of, more, []

    def state_dict(self):
        return {"of": self.of, "more": self.more}

    def check_state_dict(self, state):
        self.checked.append(state)
        if state["of"] != self.of:
            raise PlanError(f"not {self.of}")

    def load_state_dict(self, state):
        self.check_state_dict(state)
        self.more = state["more"]


def test_an_object_can_refuse_a_state_before_anything_is_changed():
    url = save_state(
        {"t": ONE, "first": CheckedState(1, 5), "second": CheckedState({"x": (2, None)}, [6])}
    )
    live = {"t": TWO.clone(), "first": CheckedState(1), "second": CheckedState(3)}
    with pytest.raises(PlanError, match="not 3") as e:
        limpet.load(url, into=live)
    assert "overwritten" not in str(e.value)
    assert live["t"].tolist() == [2, 2]
    assert (live["first"].more, live["second"].more) == (None, None)
    live["second"] = CheckedState({"x": (2, None)})
    limpet.load(url, into=live)
    assert live["t"].tolist() == [1, 1]
    assert (live["first"].more, live["second"].more) == (5, [6])
    skipped = CheckedState(3)
    limpet.load(url, into=live | {"second": skipped}, keys=["t", "first"])
    assert skipped.checked == []


@pytest.mark.parametrize("more", [ONE, [np.ones(2)], {"a": b"x" * 5000}])
def test_a_state_with_leaves_is_checked_only_by_load_state_dict(more):
    live = {"o": CheckedState(2, more)}
    with pytest.raises(PlanError, match="not 2") as e:
        limpet.load(save_state({"o": CheckedState(1, more)}), into=live)
    assert len(live["o"].checked) == 1
    assert e.value.live_state == "not valid"
