"""Tensors, arrays, and plain values are saved and restored exactly, or refused by their key."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import limpet
from limpet.errors import NotFound, Unsupported
from limpet.loading.snapshot import reader_of
from limpet.state.flatten import flatten
from tests.states import (
    TORCH_DTYPES,
    assert_same,
    assert_same_tensor,
    random_tensor,
    round_trip,
    save_state,
    unused_url,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def assert_refused(value, message=None):
    """Assert that the error names the key and contains ``message``, and that nothing is written.
    Return the message of the error."""
    url = unused_url()
    with pytest.raises(Unsupported, match=message) as e:
        limpet.save(url, {"fine": torch.ones(2), "a": {"b": value}})
    assert "'a/b" in str(e.value)
    assert e.value.leaf.startswith("a/b")
    store = limpet.open_store(url.rpartition("/")[0])
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        limpet.load(url)
    return str(e.value)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("local", [False, True], ids=["memory", "local"])
def test_tensors_of_every_dtype_are_restored_bit_for_bit(dtype, local, tmp_path):
    state = {
        "vector": random_tensor(dtype, (257,)),
        "matrix": random_tensor(dtype, (5, 7), 1),
        "scalar": random_tensor(dtype, (), 2),
        "none": random_tensor(dtype, (0, 5), 3),
        "strided": random_tensor(dtype, (8, 6), 4)[::2, 1::2],
        "transposed": random_tensor(dtype, (3, 4, 5), 5).permute(2, 0, 1),
    }
    assert_same(state, round_trip(state, tmp_path / "version_1" if local else None))


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_is_loaded_into_live_tensors_with_any_strides(dtype):
    t = random_tensor(dtype, (4, 6, 10))
    url = save_state({"a": t, "b": t, "c": t[:, :, 0]})
    base_a = torch.zeros(t.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype)
    base_b = torch.zeros(t.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype)
    base_c = torch.zeros(24 * 3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    live = {
        "a": base_a.view(4, 6, 10),
        "b": base_b.view(10, 4, 6).permute(1, 2, 0),
        "c": base_c.view(4, 6, 3)[:, :, 1],
    }
    addresses = [v.data_ptr() for v in live.values()]
    limpet.load(url, into=live)
    assert_same({"a": t, "b": t, "c": t[:, :, 0]}, live)
    assert [v.data_ptr() for v in live.values()] == addresses
    # The memory between the elements of "c" is unchanged.
    assert not base_c.view(torch.uint8).view(24, 3, -1)[:, 0::2].any()


def test_views_are_saved_by_their_values():
    base = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).reshape(2, 3, 4, 4)
    z = torch.randn(3, 4, dtype=torch.complex64)
    state = {
        "expanded": torch.arange(3.0).expand(4, 3),
        "all of one": torch.tensor(7.0).expand(2, 2, 2),
        "channels_last": base.to(memory_format=torch.channels_last),
        "channels_last_3d": base[None].to(memory_format=torch.channels_last_3d),
        "windows": torch.arange(10).unfold(0, 4, 2),
        "flipped": base.flip(0),
        "conj": z.conj(),
        "conj of a part": z.T.conj()[1:],
        "negative imaginary": z.conj().imag,
        "negative": torch._neg_view(base),
        "real": z.real,
        "diagonal": base[0, 0].diagonal(),
        "offset": base.reshape(-1)[5:11],
    }
    assert_same(state, round_trip(state))
    live = {k: torch.zeros_like(v, memory_format=torch.contiguous_format) for k, v in state.items()}
    limpet.load(save_state(state), into=live)
    assert_same(state, live)


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_loads_into_live_conjugate_and_negative_views_change_their_base(view):
    z = torch.randn(4, 5, dtype=torch.complex64)
    url = save_state({"z": z})
    memory = torch.zeros(4, 5, dtype=torch.complex64)
    live = memory.conj() if view == "conj" else torch._neg_view(memory)
    limpet.load(url, into={"z": live})
    assert_same_tensor(z, live)
    assert_same_tensor(z.conj() if view == "conj" else -z, memory)


def test_requires_grad_and_the_parameter_type_are_not_saved():
    state = {"p": nn.Parameter(torch.ones(3)), "t": torch.ones(3, requires_grad=True)}
    made = round_trip(state)
    assert [type(v) for v in made.values()] == [torch.Tensor] * 2
    assert not any(v.requires_grad for v in made.values())
    live = {"p": nn.Parameter(torch.zeros(3)), "t": torch.zeros(3, requires_grad=True)}
    p, t = live["p"], live["t"]
    limpet.load(save_state(state), into=live)
    assert live["p"] is p
    assert live["t"] is t
    assert p.requires_grad
    assert p.is_leaf
    assert t.requires_grad
    assert_same(state["p"].detach(), p.detach())


def test_a_tied_tensor_is_written_once_and_loaded_as_one_tensor():
    t = torch.randn(100, 10)
    url = save_state({"a": t, "b": t, "c": [t.view(100, 10)], "other": t[:50], "flat": t.view(-1)})
    snapshot = limpet.open(url)
    assert set(reader_of(snapshot).leaves) == {"a", "other", "flat"}
    made = limpet.load(url)
    assert made["a"] is made["b"] is made["c"][0]
    assert made["flat"].data_ptr() != made["a"].data_ptr()
    assert_same_tensor(t[:50], made["other"])


@given(st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_exactly_the_tensors_with_the_same_memory_and_layout_are_tied(random):
    bases = [torch.zeros(4, 4), torch.zeros(4, 4)]
    views = (
        lambda t: t,
        lambda t: t.view(4, 4),
        lambda t: t.view(2, 8),
        lambda t: t.T,
        lambda t: t[:2],
        lambda t: t[1:],
        lambda t: t[:, 0],
        lambda t: t.view(torch.int32),
        lambda t: t.view(torch.int32).view(torch.float32),
        nn.Parameter,
    )
    state = {f"t{i}": random.choice(views)(random.choice(bases)) for i in range(12)}
    first: dict = {}
    for key, t in state.items():
        first.setdefault((t.data_ptr(), t.dtype, t.shape, t.stride()), key)
    expected = {
        key: {"tied": tied} if (tied := first[t.data_ptr(), t.dtype, t.shape, t.stride()]) != key
        else {"tensor": [str(t.dtype).removeprefix("torch."), list(t.shape),
                         *([] if t.is_contiguous() or t.ndim == 1 else [[1, 0]])]}
        for key, t in state.items()
    }  # fmt: skip
    flat = flatten(state)
    assert flat.tree == {"dict": expected}
    assert [leaf.key for leaf in flat.leaves] == [k for k, n in expected.items() if "tensor" in n]


def test_overlapping_views_are_loaded_into_overlapping_views():
    t = torch.arange(20.0)
    make = lambda t: {"all": t, "first": t[:15], "last": t[5:], "bits": t.view(torch.int32)}  # noqa: E731
    url = save_state(make(t))
    live = make(torch.zeros(20))
    limpet.load(url, into=live)
    assert_same(make(t), live)


def test_empty_tensors_are_never_tied():
    state = {"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(3, 0, 2)}
    made = round_trip(state)
    assert made["a"] is not made["b"]
    assert_same(state, made)
    live = {k: torch.empty_like(v) for k, v in state.items()}
    limpet.load(save_state(state), into=live)


def test_a_tensor_whose_memory_was_freed_is_refused():
    t = torch.ones(1000)
    t.untyped_storage().resize_(0)
    assert_refused(t, "memory")
    assert_refused(torch._efficientzerotensor(3), "memory")


def test_int4_values_that_are_packed_in_bytes_are_restored():
    packed = torch.randint(0, 256, (64, 32), dtype=torch.uint8)
    assert_same({"packed": packed}, round_trip({"packed": packed}))


def test_a_memmap_is_refused(tmp_path):
    assert_refused(np.memmap(tmp_path / "x", np.uint8, "w+", shape=(3,)), "memmap")


def test_a_loaded_record_scalar_is_writable():
    made = round_trip({"a": np.zeros(2, [("id", ">u4")])[1]})["a"]
    made["id"] = 77
    assert made["id"] == 77


def test_the_text_of_a_key_does_not_depend_on_the_order_of_a_set():
    key = frozenset(f"name{i}" for i in range(50))
    shuffled = frozenset(sorted(key, reverse=True))
    (one,) = saved_keys({key: torch.ones(1)})
    (two,) = saved_keys({shuffled: torch.ones(1)})
    assert one == two
    assert one.index("name10") < one.index("name11") < one.index("name12")


def saved_keys(state):
    return limpet.open(save_state(state)).keys()


def test_a_name_of_many_digits_is_refused(tmp_path):
    name = 1 << 20000
    assert_refused({name: {}})
    for state in ({"x": {name: {"y": 1}}}, {name: {"y": 1}}):
        with (
            limpet.Checkpointer(tmp_path, state, save=limpet.Never()) as ckpt,
            pytest.raises(Unsupported, match="cannot be converted to text"),
        ):
            ckpt.save()


def test_dicts_with_extra_attributes_are_refused():
    made = OrderedDict(a=1)
    made.more = 1
    assert_refused(made, "more")
    counter = Counter("ab")
    counter.more = 1
    assert_refused(counter, "more")


def test_values_that_contain_themselves_are_refused():
    one = []
    one.append(one)
    two = []
    two += [two, two]
    three = {"x": {}}
    three["x"]["up"] = [three, three]
    for value in (one, two, three):
        message = assert_refused(value, "^'a/b.* nested deeper than 100 levels, or contains itself")
        assert len(message) < 600

    class Recursive:
        def state_dict(self):
            return {"me": self}

        def load_state_dict(self, state):
            raise AssertionError

    assert_refused(Recursive(), "'a/b/me' .* an object in the state of another one")


class Loader:
    """A stateful object like a data loader with workers. Values of other objects are deep in its
    state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"_snapshot": {"_worker_snapshots": {"worker_0": {"dataset_state": self.value}}}}

    def load_state_dict(self, state):
        self.value = state


DEEP = "loader/_snapshot/_worker_snapshots/worker_0/dataset_state"


@pytest.mark.parametrize(
    ("value", "deep", "message"),
    [
        (
            {"file": object()},
            "/file",
            "an object that cannot be saved faithfully: it is not a tensor",
        ),
        ({"seen": {(1, object())}}, "/seen/1", "a member of a set must be a plain value"),
        (torch.ones(2, device="meta"), "", "a meta tensor has no data"),
        (Loader({"x": 1}), "", "an object in the state of another one"),
    ],
)
def test_the_error_for_a_value_deep_in_an_object_s_state_names_the_object(value, deep, message):
    with pytest.raises(Unsupported, match=message) as e:
        limpet.save(unused_url(), {"a": 1, "loader": Loader(value)})
    start = "'loader', a Loader, cannot be saved because of a value in its state_dict(): "
    assert str(e.value).startswith(f"{start}'{DEEP}{deep}' is a")
    assert ". Or leave the whole of 'loader' out of the state, or wrap it in" in str(e.value)
    assert (e.value.leaf, e.value.member) == (DEEP + deep, "loader")


def test_the_state_of_a_loader_with_workers_is_restored():
    assert_same(round_trip({"l": Loader({"n": 3, "rng": (3, tuple(range(600)), None)})})["l"],
         Loader({"n": 3, "rng": (3, tuple(range(600)), None)}).state_dict())  # fmt: skip


def test_the_state_itself_must_be_a_mapping():
    for state in ([], None, nn.Linear(1, 1), torch.ones(1)):
        url = unused_url()
        with pytest.raises(Unsupported, match=r"The state must be a dict, such as .*, not an? "):
            limpet.save(url, state)


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": 1}, {"a": [], "b": ()}], ids=repr)
def test_states_without_tensors_are_restored(state, tmp_path):
    assert_same(state, round_trip(state))
    assert_same(state, round_trip(state, tmp_path / "version_1"))
    live = clone_of(state)
    limpet.load(save_state(state), into=live)
    assert_same(state, live)


def clone_of(state):
    import copy

    return copy.deepcopy(state)


def test_a_shared_list_is_loaded_as_two_equal_lists():
    """Only tensors can be tied. A plain value that occurs twice is written twice."""
    shared = [1, 2]
    made = round_trip({"a": shared, "b": shared})
    assert made == {"a": [1, 2], "b": [1, 2]}
    assert made["a"] is not made["b"]


def test_an_array_that_occurs_twice_is_loaded_as_two_arrays():
    a = np.arange(3)
    made = round_trip({"a": a, "b": a})
    assert made["a"] is not made["b"]


def test_a_bytearray_may_change_its_size_during_a_save():
    data = bytearray(b"x" * 10_000)
    pending = limpet.save_async(unused_url(), {"data": data})
    data.extend(b"more")
    assert_same({"data": bytearray(b"x" * 10_000)}, limpet.load(pending.wait().url))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
        | st.dictionaries(st.integers() | st.text("ab/~12") | st.tuples(st.integers()), inner)
        | st.dictionaries(st.text("ab"), inner).map(OrderedDict)
        | st.sets(st.integers() | st.text("ab") | st.tuples(st.integers(), st.none()))
    ),
    max_leaves=15,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.dictionaries(st.text("abc/~"), plain, max_size=4))
def test_any_plain_state_is_restored(state):
    url = save_state(state)
    assert_same(state, limpet.load(url))
    live = clone_of(state)
    limpet.load(url, into=live)
    assert_same(state, live)
