"""The load recipe: partial loads, renames, devices, slices, failures after the first change, and
large states."""

import functools
import os
import shutil
import tempfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import limpet
from limpet.errors import DigestMismatch, MissingLeaf, PlanError, ShapeMismatch, StoreError
from limpet.loading.snapshot import reader_of
from limpet.types import MIB
from tests.memory_peak import numbers_of
from tests.states import TORCH_DTYPES, assert_same, random_tensor, save_state, unused_url

ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def nested_state():
    return {
        "model": {"a.weight": ONE, "a.bias": TWO, "deep": {"a.weight": ONE + 5, "n": 3}},
        "optimizer": [ONE + 1, {"lr": 0.5}, (7, 8)],
        "note": "hi",
        5: TWO + 1,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("note", {"note": "hi"}),
        ("model/*", {"model": {"a.weight": ONE, "a.bias": TWO}}),
        ("model/**", {"model": nested_state()["model"]}),
        ("**", nested_state()),
        ("**.weight", {"model": {"a.weight": ONE, "deep": {"a.weight": ONE + 5}}}),
        ("model/a.???s", {"model": {"a.bias": TWO}}),
        ("optimizer/1/lr", {"optimizer": [None, {"lr": 0.5}, None]}),
        ("optimizer/2/1", {"optimizer": [None, None, (None, 8)]}),
        (["note", "5"], {"note": "hi", 5: TWO + 1}),
        (("model/deep/n",), {"model": {"deep": {"n": 3}}}),
        ("model", {"model": nested_state()["model"]}),
        (
            ["model/deep", "optimizer/1"],
            {
                "model": {"deep": nested_state()["model"]["deep"]},
                "optimizer": [None, {"lr": 0.5}, None],
            },
        ),
    ],
    ids=str,
)
def test_keys_select_a_part_of_the_state(keys, expected):
    assert_same(expected, limpet.load(save_state(nested_state()), keys=keys))


@pytest.mark.parametrize(
    "keys", ["nothing", "mode", "model/*/*/*", [], "Note", "model.a", "*del", ""]
)
def test_the_error_for_a_pattern_without_matches_names_existing_keys(keys):
    url = save_state(nested_state())
    with pytest.raises(MissingLeaf, match=r"keys like.*model/a\.weight"):
        limpet.load(url, keys=keys)
    with pytest.raises(MissingLeaf, match="keys like"):
        limpet.load(url, into=nested_state(), keys=keys)


def test_keys_select_a_part_of_the_live_state():
    live = {"model": {"a.weight": ONE * 0, "a.bias": ONE * 0}, "note": "old", "other": 1}
    limpet.load(save_state(nested_state()), into=live, keys=["model/*", "note"])
    assert_same({**live, "model": {"a.weight": ONE, "a.bias": TWO}, "note": "hi"}, live)
    assert live["other"] == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["", "inference"])
def test_a_load_into_live_tensors_increments_their_version_counters(mode):
    """PyTorch then refuses a backward pass that needs the old values."""
    model, other = nn.Linear(3, 3), torch.zeros(2)
    url = save_state({"model": nn.Linear(3, 3), "other": torch.ones(2)})
    counts = model.weight._version, model.bias._version, other._version
    passed = model(torch.ones(1, 3, requires_grad=True)).sum()
    with mode():
        limpet.load(url, into={"model": model, "other": other}, keys="model")
    assert model.weight._version > counts[0]
    assert model.bias._version > counts[1]
    assert other._version == counts[2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.backward()


def test_only_selected_leaves_are_read():
    url = save_state({"a": ONE, "b": torch.randn(100_000)})
    store = limpet.open_store(url.rpartition("/")[0])
    damage(store, "b", limpet.open(url))
    assert_same({"a": ONE}, limpet.load(url, keys="a"))
    with pytest.raises(DigestMismatch, match="b"):
        limpet.load(url)


def damage(store, leaf, snapshot):
    """Flip a bit of a leaf in a memory store."""
    (shard,) = reader_of(snapshot).manifest.shards
    (index,) = reader_of(snapshot).indexes()
    box = next(x for x in index.leaves if x.key == leaf).boxes[0]
    path = next(p for p in store._objects if p.endswith(shard.name))
    data, modified = store._objects[path]
    wrong = bytearray(data)
    wrong[box.at] ^= 1
    store._objects[path] = bytes(wrong), modified


def test_renaming_a_submodule_renames_all_names_below_it():
    m = nn.ModuleDict({"old": nn.Linear(2, 2), "older": nn.Linear(2, 2)})
    live = nn.ModuleDict({"new": nn.Linear(2, 2), "older": nn.Linear(2, 2)})
    url = save_state({"model": m})
    limpet.load(url, into={"model": live}, rename={"model/old": "model/new"})
    assert_same(list(m.parameters()), list(live.parameters()))
    made = limpet.load(url, rename={"model/old": "model/new"})
    assert list(made["model"]) == ["new.weight", "new.bias", "older.weight", "older.bias"]


def test_containers_with_tied_tensors_can_be_renamed():
    t = torch.randn(3)
    state = {"a": {1: t, "x": [t, {"y": TWO}]}, "b": OrderedDict(c=t), "raw": b"z" * 5000}
    made = limpet.load(save_state(state), rename={"a": "p", "b": "q", "raw": "r"})
    assert_same({"p": state["a"], "q": state["b"], "r": state["raw"]}, made)
    live = {"p": {1: t * 0, "x": [t * 0, {"y": ONE * 0}]}, "q": OrderedDict(c=t * 0), "r": b""}
    limpet.load(save_state(state), into=live, rename={"a": "p", "b": "q", "raw": "r"})
    assert_same({"p": state["a"], "q": state["b"], "r": state["raw"]}, live)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_can_be_renamed():
    s = torch.eye(3).to_sparse()
    assert_same({"new": s}, limpet.load(save_state({"old": s}), rename={"old": "new"}))


def test_two_names_can_be_swapped():
    made = limpet.load(save_state({"a": ONE, "b": TWO}), rename={"a": "b", "b": "a"})
    assert_same({"b": ONE, "a": TWO}, made)


@pytest.mark.parametrize(
    ("names", "message_part"),
    [
        ({"x": "y", "w": "z"}, "not in the snapshot: w, x. Write rename={"),
        ({"model/a.weight": "a.weight"}, "another level. Expected keys that differ"),
        ({"model/a.weight": "model/a.bias"}, "would be called 'a.bias'"),
        ({"net": "model"}, "not in the snapshot: net. "),
        ({"model/**": "net/**"}, "another level"),
        ({"model/a.*": "model/b.*"}, "not in the snapshot: model/a.*. "),
        ({"model.a": "model.b"}, "not in the snapshot: model.a. "),
    ],
)  # fmt: skip
def test_an_invalid_rename_is_refused_with_advice(names, message_part):
    state = {k: v for k, v in nested_state().items() if isinstance(k, str)}
    with pytest.raises(PlanError) as e:
        limpet.load(save_state(state), rename=names)
    assert message_part in str(e.value)
    assert "None" not in str(e.value)


def test_an_existing_name_with_a_star_is_not_a_pattern():
    assert_same(
        {"x": ONE, "b": TWO}, limpet.load(save_state({"a*": ONE, "b": TWO}), rename={"a*": "x"})
    )


def test_tensors_are_loaded_to_the_given_device():
    state = {"t": ONE, "a": np.ones(2), "n": 1}
    assert_same(state, limpet.load(save_state(state), device="cpu"))
    assert_same(state, limpet.load(save_state(state), device=torch.device("cpu")))
    made = limpet.load(save_state({"t": torch.ones(3, 2), "n": 1}), device="meta")
    assert made["t"].is_meta
    assert made["t"].shape == (3, 2)


def test_into_must_be_a_dict():
    for into in ([], nn.Linear(2, 2), torch.ones(2)):
        with pytest.raises(limpet.errors.LimpetError, match="into= must be a dict"):
            limpet.load(save_state({"a": 1}), into=into)


def test_a_load_of_damaged_bytes_says_that_the_live_state_is_not_valid():
    """The damaged bytes never reach it, and PyTorch knows which tensors may have changed."""
    url = save_state({"a": ONE, "b": torch.randn(100_000)})
    damage(limpet.open_store(url.rpartition("/")[0]), "b", limpet.open(url))
    live = {"a": torch.zeros(2), "b": torch.zeros(100_000)}
    counts = [t._version for t in live.values()]
    with pytest.raises(DigestMismatch, match="is not valid") as e:
        limpet.load(url, into=live)
    assert (e.value.live_state, e.value.leaf) == ("not valid", "b")
    assert not live["b"].any()
    assert all(t._version > n for t, n in zip(live.values(), counts, strict=True))
    with pytest.raises(DigestMismatch) as e:
        limpet.load(url)
    assert "is not valid" not in str(e.value)


def test_the_error_of_a_store_states_that_the_live_state_is_not_valid(monkeypatch):
    url = save_state({"a": torch.randn(1000)})

    def broken(*args):
        raise StoreError("The disk is on fire")

    monkeypatch.setattr("limpet.storage.memory.MemoryStore.get_range", broken)
    with pytest.raises(StoreError, match=r"on fire.*is not valid") as e:
        limpet.load(url, into={"a": torch.zeros(1000)})
    assert e.value.leaf == "a"


def test_differences_are_raised_before_any_bytes_are_read(monkeypatch):
    url = save_state({"a": ONE, "b": TWO})
    monkeypatch.setattr("limpet.storage.memory.MemoryStore.get_range", None)
    with pytest.raises(ShapeMismatch):
        limpet.load(url, into={"a": ONE, "b": torch.zeros(3)})


SHAPE = (7, 5, 6)
FULL = torch.arange(210, dtype=torch.float64).reshape(SHAPE)
bound = st.none() | st.integers(-9, 9)
part = st.integers(-5, 4) | st.builds(slice, bound, bound) | st.just(slice(None))
index = st.lists(part, max_size=3).flatmap(
    lambda parts: (
        st.just(tuple(parts))
        | st.integers(0, len(parts)).map(lambda i: (*parts[:i], ..., *parts[i:]))
    )
)


@functools.cache
def saved_leaves():
    url = unused_url()
    record = np.zeros(SHAPE, [("x", ">i4"), ("y", "M8[s]")])
    record["x"] = np.arange(210).reshape(SHAPE)
    state = {
        "t": FULL,
        "strided": FULL.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "a": FULL.numpy(),
        "record": record,
        "scalar": torch.tensor(5),
        "blob": bytes(range(256)) * 40,
    }
    limpet.save(url, state)
    return limpet.open(url), state


@settings(max_examples=150)
@given(index)
def test_slices_match_those_of_numpy(index):
    snapshot, state = saved_leaves()
    for name in ("t", "strided", "a", "record"):
        found, expected = snapshot[name][index], state[name][index]
        assert tuple(found.shape) == tuple(expected.shape)
        if name == "record":
            assert found.dtype == expected.dtype
        assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(
    "index",
    [
        slice(None, None, 2), slice(None, None, -1), slice(None, None, 0), 7, -8, (0, 5),
        (0, 0, 0, 0), (..., ...), None, True, "x", 1.0, [0, 1], torch.tensor([0]),
    ],
    ids=repr,
)  # fmt: skip
def test_unsupported_indices_are_refused(index):
    snapshot, _ = saved_leaves()
    with pytest.raises((IndexError, ValueError)):
        snapshot["t"][index]


def test_leaves_have_dtype_shape_and_size_and_can_be_read():
    snapshot, state = saved_leaves()
    view = snapshot["t"]
    assert (view.dtype, view.shape, view.nbytes) == ("float64", SHAPE, 210 * 8)
    assert_same(FULL, view.read())
    assert_same(torch.tensor(5), snapshot["scalar"][...])
    assert_same(torch.tensor(5), snapshot["scalar"][()])
    assert snapshot["record"].shape == SHAPE
    assert snapshot["record"].dtype == "[('x', '>i4'), ('y', '<M8[s]')]"
    assert_same(state["record"], snapshot["record"].read())
    assert bytes(snapshot["blob"][256:260]) == bytes(range(4))
    assert list(snapshot) == snapshot.keys() == list(state)
    with pytest.raises(KeyError, match=r"nothing is not a key; the keys are t, .*, and \d+ more"):
        snapshot["nothing"]


def test_the_error_for_a_key_that_is_missing_names_the_keys():
    snapshot = limpet.open(save_state({"model": {"a": torch.zeros(2), "b": 1}, "models": 2}))
    named = r"mod is not a key; the keys are model/a, model/b, models'"
    with pytest.raises(KeyError, match=named):
        snapshot["mod"]
    with pytest.raises(KeyError):
        snapshot[3]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_slices_of_every_dtype_are_read(dtype):
    t = random_tensor(dtype, (40, 30))
    view = limpet.open(save_state({"t": t}))["t"]
    assert_same(t[10:20], view[10:20])
    assert_same(t[3:30, 4:29], view[3:30, 4:29])
    assert_same(t[5, 7], view[5, 7])


def test_a_slice_reads_only_its_chunks(monkeypatch):
    from limpet.storage.memory import MemoryStore

    url = save_state({"t": torch.arange(5_000_000)})
    snapshot = limpet.open(url)
    reader_of(snapshot).indexes()
    read, get_range = [], MemoryStore.get_range

    def counting_get_range(self, key, offset, length, into):
        read.append(length)
        get_range(self, key, offset, length, into)

    monkeypatch.setattr(MemoryStore, "get_range", counting_get_range)
    assert snapshot["t"][4_999_998:].tolist() == [4_999_998, 4_999_999]
    assert sum(read) <= 8 << 20


@pytest.mark.slow
def test_a_tensor_of_more_than_four_gigabytes_is_restored():
    """The test checks elements at offsets below and above 2**32."""
    size = (1 << 32) + (100 << 20) + 7
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30:
        pytest.skip("less than 6 GiB of memory are free")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        t = torch.zeros(size, dtype=torch.uint8)
        marks = {0: 1, 5: 2, (1 << 31) + 3: 3, (1 << 32) - 1: 4, (1 << 32) + 5: 5, size - 1: 6}
        for at, mark in marks.items():
            t[at] = mark
        snapshot = limpet.save(f"{folder}/version_1", {"t": t, "after": ONE})
        assert {at: int(snapshot["t"][at]) for at in marks} == marks
        t.fill_(9)
        live = {"t": t, "after": torch.zeros(2)}
        limpet.load(f"{folder}/version_1", into=live)
        assert_same(ONE, live["after"])
        assert {at: int(t[at]) for at in marks} == marks
        for at in marks:
            t[at] = 0
        assert int(t.count_nonzero()) == 0


MEASURE_MEMORY = """
import sys, torch, limpet
from tests.memory_peak import print_peak_resident
what, folder = sys.argv[1:]
url = folder + "/version_1"
state = {f"t{i}": torch.ones(4096, 4096) for i in range(8)}
limpet.save(folder + "/version_0", {"a": torch.ones(3)})
limpet.load(folder + "/version_0")
if what == "strided":
    state = {k: v.T for k, v in state.items()}
if what == "plain":
    del state
with print_peak_resident():
    if what == "load":
        limpet.load(url, into=state)
    elif what == "plain":
        state = limpet.load(url)
    else:
        limpet.save(url, state)
"""


@pytest.mark.slow
def test_saving_and_loading_512_mib_needs_at_most_256_mib_of_extra_memory():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for what in ("save", "load", "plain", "strided"):
            shutil.rmtree(f"{folder}/version_0", ignore_errors=True)
            if what == "strided":
                shutil.rmtree(f"{folder}/version_1")
            [growth] = numbers_of(MEASURE_MEMORY, what, folder)
            assert growth - 512 * MIB * (what == "plain") < 257 * MIB, what
