"""Exports: other libraries read exactly what was saved. Nothing is omitted silently."""

import errno
import json
import os
import sys
import tempfile
import zipfile
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import safetensors.torch as st
import torch
from torch import nn

import limpet
from limpet.convert import windows
from limpet.convert.export import locate_export, prepare_export
from limpet.errors import (
    AlreadyExists,
    DigestMismatch,
    LimpetError,
    MissingLeaf,
    NoSpace,
    StoreError,
    Unsupported,
)
from limpet.format import names
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Traits
from limpet.testing.faults import Fault, FaultFs
from tests.memory_peak import numbers_of
from tests.snapshot.manual_shards import split_columns, split_rows, write_resharded
from tests.states import TORCH_DTYPES, assert_same, random_tensor, save_state, unused_url
from tests.trainings import flip_bit
from tests.unreliable_stores import HookedStore, HookedUpload

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def export(snapshot, kind, to, **options):
    """Export a snapshot, or a state that is saved first."""
    if isinstance(snapshot, dict):
        snapshot = reader_of(limpet.open(save_state(snapshot)))
    prepared = prepare_export(snapshot, str(to), kind, **options)
    prepared.write()
    return prepared


def list_exported(folder):
    """Return the names in a folder without the record, which must be there."""
    names = sorted(os.listdir(folder))
    assert [n for n in names if n.endswith(".limpet.json")]
    return [n for n in names if not n.endswith(".limpet.json")]


def export_and_read(snapshot, to, **options):
    """Export a snapshot, and read it with the safetensors library."""
    export(snapshot, "safetensors", to, **options)
    return st.load_file(to / "model.safetensors")


def export_to_torch(snapshot, to, **options):
    """Export a snapshot, and read it with ``torch.load``, with and without mmap."""
    export(snapshot, "torch", to, **options)
    assert zipfile.ZipFile(to / "model.pt").testzip() is None
    loaded_state = torch.load(to / "model.pt", weights_only=True)
    assert_same(loaded_state, torch.load(to / "model.pt", weights_only=True, mmap=True))
    return loaded_state


def header(file):
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def state_of_all_dtypes():
    """Return a model with tensors of every dtype, and progress."""
    model: dict[str, Any] = {
        str(d).removeprefix("torch."): random_tensor(d, (3, 4), i)
        for i, d in enumerate(TORCH_DTYPES)
    }
    weight = torch.randn(5, 6)
    model |= {"w": weight, "tied": weight, "empty": torch.empty(0, 3), "zero": torch.tensor(2.5)}
    model |= {"strided": torch.randn(6, 4).T, "long": torch.randn(300_000)}
    return {"model": model, "progress": {"step": 3}}


READABLE = [d for d in TORCH_DTYPES if d not in (torch.complex32, torch.complex128)]


def test_every_dtype_is_written_like_the_safetensors_library_does(tmp_path):
    model = {str(i): random_tensor(d, (3, 4), i) for i, d in enumerate(READABLE)}
    export({"model": model}, "safetensors", tmp_path / "exported")
    st.save_file(model, tmp_path / "reference", {"format": "pt"})
    exported_header, reference_header = (
        header(tmp_path / "exported" / "model.safetensors"),
        header(tmp_path / "reference"),
    )
    raw = (tmp_path / "exported" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert exported_header.pop("__metadata__") == reference_header.pop("__metadata__")
    assert exported_header.keys() == reference_header.keys()
    for name, entry in exported_header.items():
        assert [entry[k] for k in ("dtype", "shape")] == [
            reference_header[name][k] for k in ("dtype", "shape")
        ]
        a, b = entry["data_offsets"]
        expected = model[name].contiguous().view(torch.uint8).numpy().tobytes()
        assert raw[begin + a : begin + b] == expected
        assert (begin + a) % model[name].dtype.itemsize == 0


def test_tied_tensors_are_written_twice(tmp_path):
    """A reader finds each tensor by its name and does not need to know the ties."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    loaded = export_and_read({"model": net}, tmp_path)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other.load_state_dict(loaded)
    assert torch.equal(other[1].weight, net[0].weight)
    st.load_model(
        other, tmp_path / "model.safetensors", strict=False
    )  # it expects only one of the two


def test_arrays_become_tensors_and_plain_values_are_omitted(tmp_path):
    state = {"a": np.arange(6, dtype=">i4").astype("i4").reshape(2, 3), "b": np.float64(3), "n": 1}
    state |= {"text": "x", "long": bytes(5000), "nan": float("nan"), "s": {1}, "d": {}, "l": [1, 2]}
    plan = export(state, "safetensors", tmp_path)
    assert (plan.tensors, plan.left_out, plan.root) == (1, 8, "")
    [(name, tensor)] = st.load_file(tmp_path / "model.safetensors").items()
    assert name == "a"
    assert torch.equal(tensor, torch.arange(6, dtype=torch.int32).reshape(2, 3))


def test_the_error_lists_all_leaves_that_safetensors_cannot_store(tmp_path):
    state = {
        "ok": torch.ones(2),
        "c": torch.ones(2, dtype=torch.complex128),
        "half": random_tensor(torch.complex32, (2,)),
        "sp": torch.eye(3).to_sparse(),
        "rec": np.zeros(3, [("id", "<i4"), ("x", "<f4")]),
    }
    with pytest.raises(Unsupported, match=r"--keys PATTERN") as raised:
        export(state, "safetensors", tmp_path / "out")
    assert raised.value.leaves == ("c", "half", "sp", "rec")
    for text in ("c (complex128)", "half (complex32)", "sp (sparse)", "an array of [('id'"):
        assert text in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert list(export_and_read(state, tmp_path / "out", keys=["ok"])) == ["ok"]
    many_leaves = {f"c{i}": torch.ones(1, dtype=torch.complex128) for i in range(50)}
    with pytest.raises(Unsupported, match=r"c19 \(complex128\), and 30 more\."):
        export(many_leaves, "safetensors", tmp_path / "many")


@pytest.fixture
def training():
    net = nn.Linear(3, 2)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(3)).sum().backward()
    adam.step()
    return reader_of(
        limpet.open(save_state({"model": net, "optimizer": adam, "n": [1, torch.ones(1)]}))
    )


def test_the_model_is_exported_unless_another_part_is_selected(training, tmp_path):
    def selected(**options):
        plan = prepare_export(training, "memory://x/y", "safetensors", **options)
        return [t.key for f in plan.files for t in f.tensors], plan.root

    model = ["model/bias", "model/weight"]
    assert selected() == (model, "model")
    assert selected(root="model") == selected(root="/model/") == selected()
    assert selected(keys=["model"]) == (model, "")
    assert selected(keys=["**/weight"], root="model") == (["model/weight"], "model")
    assert (
        len(selected(root="/")[0])
        == len(selected(root="")[0])
        == len(selected(keys=["**"])[0])
        == 9
    )
    assert selected(root="n") == (["n/1"], "n")
    assert sorted(export_and_read(training, tmp_path / "a")) == ["bias", "weight"]
    assert "model/weight" in export_and_read(training, tmp_path / "b", root="/")
    assert sorted(
        export_and_read(training, tmp_path / "c", root="optimizer/state/model.weight")
    ) == ["exp_avg", "exp_avg_sq", "step"]
    assert list(export_and_read(training, tmp_path / "d", keys=["n/**"])) == ["n/1"]


def test_an_empty_selection_is_an_error(training):
    for root in ("modle", "model/weight", "model/weight/x", "mode", "n/1", "model/", "n/7"):
        if root != "model/":
            with pytest.raises(MissingLeaf, match=f"nothing below {root}"):
                prepare_export(training, "memory://x/y", "torch", root=root)
    for kind in ("safetensors", "hf", "torch"):
        with pytest.raises(MissingLeaf, match="selection contains nothing"):
            prepare_export(training, "memory://x/y", kind, keys=["zzz/**"])
    only_values = limpet.open(save_state({"n": 1}))
    with pytest.raises(MissingLeaf, match="selection contains nothing"):
        prepare_export(reader_of(only_values), "memory://x/y", "safetensors")
    assert prepare_export(reader_of(only_values), "memory://x/y", "torch").tensors == 0


UNUSUAL_NAMES = [
    "a/b", "a~b", "", "~", "~1", "a.b.c", "日本", "🎉", " ", "@0,0", "a\nb", '"quoted"', "..",
    "x" * 4096,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_names_equal_those_of_the_state_dict(kind, tmp_path):
    model = {name: torch.full((2,), float(i)) for i, name in enumerate(UNUSUAL_NAMES)}
    read = export_and_read if kind == "safetensors" else export_to_torch
    loaded = read({"model": model}, tmp_path, root="model")
    assert set(loaded) == set(model)
    assert all(torch.equal(loaded[k], model[k]) for k in model)


def test_equal_names_are_an_error(tmp_path):
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.ones(2), "__metadata__": torch.ones(3)}
    with pytest.raises(Unsupported, match="is taken") as raised:
        export(state, "safetensors", tmp_path / "out")
    assert raised.value.leaves == ("a~1b", "__metadata__")
    assert list(export_and_read(state, tmp_path / "out", root="a")) == ["b"]


def test_keys_with_equal_text(tmp_path):
    state = {1: torch.ones(1), "1": torch.ones(2)}
    assert set(export_and_read({"d": state}, tmp_path / "a", root="d")) == {"1", "1~2"}
    loaded = export_to_torch({"d": state}, tmp_path / "b", root="d", keys=["d/1~2"])
    assert list(loaded) == ["1"]
    assert len(loaded["1"]) == 2


SPLITS = [
    ([6, 6, 2, 6, 2, 2], 10, [[0], [1, 2], [3, 4, 5]]),
    ([1, 1, 1], 3, [[0, 1, 2]]),
    ([1, 1, 1], 2, [[0, 1], [2]]),
    ([5, 1, 1], 3, [[0], [1, 2]]),
    ([1, 5, 1, 1], 3, [[1], [0, 2, 3]]),
    ([5], 3, [[0]]),
    ([5, 7], 3, [[0], [1]]),
    ([0, 3, 0, 1], 3, [[0, 1, 2], [3]]),
]


@pytest.mark.parametrize(("sizes", "max_size", "expected"), SPLITS)
def test_shards_of_a_hugging_face_checkpoint(tmp_path, sizes, max_size, expected):
    """The split equals that of ``huggingface_hub`` 1.33."""
    letters = "zyxwvu"
    model = {letters[i]: torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(sizes)}
    plan = export({"model": model}, "hf", tmp_path, max_shard_size=max_size)
    if len(expected) == 1:
        assert list_exported(tmp_path) == ["model.safetensors"]
        assert set(st.load_file(tmp_path / "model.safetensors")) == set(model)
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [f"model-{i + 1:05d}-of-{len(expected):05d}.safetensors" for i in range(len(expected))]
    assert list_exported(tmp_path) == [*files, "model.safetensors.index.json"]
    assert [f.name for f in plan.files] == [*files, "model.safetensors.index.json"]
    assert list(index) == ["metadata", "weight_map"]
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert list(index["weight_map"]) == list(model)
    for file, members in zip(files, expected, strict=True):
        loaded = st.load_file(tmp_path / file)
        assert set(loaded) == {letters[i] for i in members}
        for name, tensor in loaded.items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, model[name])


def test_torch_reads_the_same_state_as_load(tmp_path):
    state = state_of_all_dtypes()
    at = save_state(state)
    loaded = export_to_torch(reader_of(limpet.open(at)), tmp_path)
    assert_same(limpet.load(at), loaded)
    assert loaded["model"]["tied"] is loaded["model"]["w"]
    again = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    assert not any(t.data_ptr() % 64 for t in again["model"].values())


PLAIN: list[Any] = [
    None, True, 0, -1, 1 << 40, -(1 << 100), (1 << 2039) - 1, 0.1, float("inf"), -0.0, 2 + 3j, "",
    "é\n", b"\x00\xff", bytearray(), bytearray(b"\x80"), [], [1, [2]], (), (1, (2, 3)), {},
    set(),
    {1, "a", (2, None)}, {1: "int", "1": "text", (1, 2): "tuple", None: 0, b"k": 1},
    OrderedDict([("b", 1), ("a", {"c": 2})]), Counter("hello"),
]  # fmt: skip


def test_weights_only_reads_plain_values(tmp_path):
    state = {"values": PLAIN, **{str(i): value for i, value in enumerate(PLAIN)}}
    assert_same(state, export_to_torch(state, tmp_path))


def test_the_state_of_an_optimizer_under_other_names_is_unchanged(tmp_path):
    """As ``get_optimizer_state_dict`` returns it, and ``set_optimizer_state_dict`` expects it."""
    groups = [{"params": ["fc.weight"], "lr": 0.1}]
    optimizer = {"state": {"fc.weight": {"m": torch.ones(2)}}, "param_groups": groups}
    state = {"model": {"fc.weight": torch.zeros(2)}, "optimizer": optimizer}
    assert_same(state, export_to_torch(state, tmp_path))


def test_numpy_values_become_torch_and_python_values(tmp_path):
    state = {"f": np.float32(0.1), "i": np.int8(-3), "b": np.bool_(True), "a": np.ones((2, 0, 3))}
    state |= {"c": np.complex64(1j), "u": np.arange(3, dtype=np.uint16), "d": {np.int64(7): 1}}
    expected = {"f": float(np.float32(0.1)), "i": -3, "b": True, "a": torch.ones(2, 0, 3).double()}
    expected |= {"c": 1j, "u": torch.tensor([0, 1, 2], dtype=torch.uint16), "d": {7: 1}}
    loaded = export_to_torch(state, tmp_path)
    assert_same(expected, loaded)
    assert loaded["a"].stride() == expected["a"].stride()


def test_module_metadata_is_exported(tmp_path):
    module_state = nn.Sequential(nn.BatchNorm1d(3)).state_dict()
    loaded = export_to_torch({"module": module_state}, tmp_path)["module"]
    assert type(loaded) is OrderedDict
    assert loaded._metadata == module_state._metadata


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "csc", "bsr", "bsc", "empty"])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors(layout, tmp_path):
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0]])
    makers = {
        "coo": dense.to_sparse,
        "uncoalesced": lambda: torch.sparse_coo_tensor(
            [[0, 0], [1, 1]], [1.0, 2.0], (2, 3), check_invariants=True
        ),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((1, 2)),
        "bsc": lambda: dense.to_sparse_bsc((1, 2)),
        "empty": lambda: torch.sparse_coo_tensor(size=(2, 3), check_invariants=True),
    }
    state = {"s": makers[layout]()}
    export(state, "torch", tmp_path)
    assert_same(state, torch.load(tmp_path / "model.pt", weights_only=True))


def test_the_error_lists_all_leaves_that_weights_only_rejects(tmp_path):
    state = {
        "ok": torch.ones(1), "frozen": frozenset([1]), "in": [{frozenset([1])}, {b""}, (b"", 1)],
        "key": {frozenset([2]): 1}, "huge": 1 << 2040, "when": np.datetime64("2026-01-02"),
        "text": np.str_("x"), "long": np.longdouble(1), "rec": np.zeros(2, "M8[s]"), "empty": b"",
    }  # fmt: skip
    with pytest.raises(Unsupported, match="weights_only") as raised:
        export(state, "torch", tmp_path / "out")
    assert raised.value.leaves == (
        "frozen", "in/0", "in/1", "in/2/0", "key/{2}", "huge", "when", "text", "long", "rec",
        "empty",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()
    assert_same({"ok": torch.ones(1)}, export_to_torch(state, tmp_path / "out", keys=["ok"]))


def test_unselected_list_elements_become_none(tmp_path):
    state = {"l": [torch.ones(1), 5, torch.zeros(2)]}
    loaded = export_to_torch(state, tmp_path, keys=["l/2"])
    assert loaded["l"][:2] == [None, None]
    assert torch.equal(loaded["l"][2], torch.zeros(2))


def test_a_tied_tensor_whose_first_key_is_not_selected(tmp_path):
    weight = torch.randn(3)
    state = {"a": weight, "b": weight}
    for read in (export_and_read, export_to_torch):
        loaded = read(state, tmp_path / read.__name__, keys=["b"])
        assert list(loaded) == ["b"]
        assert torch.equal(loaded["b"], weight)


def test_the_error_without_torch_says_what_to_do(monkeypatch):
    snapshot = limpet.open(save_state({"a": np.ones(2)}))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LimpetError, match=r'pip install "limpet\[torch\]"'):
        prepare_export(reader_of(snapshot), "memory://x/y", "torch")


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch"])
@pytest.mark.parametrize("layout", [split_rows(3), split_columns(4)], ids=["rows", "columns"])
def test_the_files_do_not_depend_on_the_layout(kind, layout, tmp_path):
    state = state_of_all_dtypes()
    for name in ("complex32", "complex128"):
        del state["model"][name]
    original = reader_of(limpet.open(save_state(state)))
    resharded = write_resharded(original, Location(MemoryStore(), "version_1"), layout, 4)
    options = {"max_shard_size": 500} if kind == "hf" else {}
    for name, snapshot in (("original", original), ("resharded", resharded), ("again", original)):
        export(snapshot, kind, tmp_path / name, **options)
    files = list_exported(tmp_path / "original")
    assert len(files) > 2 if kind == "hf" else len(files) == 1
    for name in ("resharded", "again"):
        assert list_exported(tmp_path / name) == files
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (
                tmp_path / "original" / file
            ).read_bytes()


@pytest.mark.parametrize(("layout", "limit"), [(split_rows(4), 1.3), (split_columns(4), 1.5)])
def test_few_bytes_are_read_twice(layout, limit, monkeypatch):
    model = {f"w{i}": np.zeros((1024, 1024 * i), np.float32) for i in (1, 2, 3)}
    model |= {f"b{i}": np.zeros((3, 100)) for i in range(300)}
    read: list[int] = []

    class CountingStore(MemoryStore):
        def get_range(self, key, offset, length, into):
            read.append(length if key.endswith(".safetensors") else 0)
            super().get_range(key, offset, length, into)

    original = limpet.save(unused_url(), {"model": model})
    location = Location(CountingStore(), "version_1")
    snapshot = write_resharded(reader_of(original), location, layout, 4)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 16 << 20)
    read.clear()
    prepare_for(snapshot, MemoryStore(), "safetensors").write()
    headers = sum(index.header for index in snapshot.indexes())
    assert sum(read) < limit * sum(a.nbytes for a in model.values()) + headers


def test_an_incremental_version(tmp_path):
    state = {"model": {"a": torch.randn(100_000), "b": torch.randn(1000)}}
    store = MemoryStore()
    with limpet.Checkpointer(store, state, save=EverySteps(1), incremental=True) as ckpt:
        for _ in range(3):
            state["model"]["b"] += 1
            ckpt.step()
    latest = limpet.Run(store).latest()
    assert latest.bases
    assert_same(export_and_read(reader_of(latest), tmp_path), state["model"])


def test_export_to_another_store():
    snapshot = limpet.open(save_state({"model": {"w": torch.arange(5.0)}}))
    for kind, name in (("safetensors", "model.safetensors"), ("torch", "model.pt")):
        at = unused_url().removesuffix("/version_1")
        for to in (f"{at}-root", f"{at}/folder"):
            location, _ = locate_export(to, kind)
            prepare_export(reader_of(snapshot), to, kind).write()
            keys = [location.key(name), location.key(f"{name}.limpet.json")]
            assert [s.key for s in location.store.list("")] == keys
        raw = location.store.get(location.key(name), 1 << 20)
        if kind == "safetensors":
            assert torch.equal(st.load(raw)["w"], torch.arange(5.0))


class AppendingStore(MemoryStore):
    """A store that only appends. It counts the bytes that wait for those in front of them."""

    def __init__(self):
        super().__init__()
        self.waiting: dict[int, int] = {}
        self.position = self.most_waiting = 0

    @property
    def traits(self):
        return Traits("appending", 1, durable=False, ordered=True)

    def put(self, key, length, head=0):
        store = HookedStore(self)
        upload = HookedUpload(store, key, super().put(key, length))
        real, lock = upload.write_at, Lock()

        def write_at(offset, data):
            with lock:
                self.waiting[offset] = len(data)
                while self.position in self.waiting:
                    self.position += self.waiting.pop(self.position)
                self.most_waiting = max(self.most_waiting, sum(self.waiting.values()))
            real(offset, data)

        upload.write_at = write_at
        return upload


def prepare_for(snapshot, store, kind):
    """Prepare an export into the folder ``out`` of a store."""
    prepared = prepare_export(snapshot, "memory://x/out", kind)
    return replace(prepared, location=Location(store, "out"))


def test_few_bytes_wait_if_a_store_only_appends(monkeypatch):
    nbytes = 1 << 16
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 * nbytes)
    model = {f"w{i:02}": torch.full((nbytes // 4,), i, dtype=torch.float32) for i in range(20)}
    snapshot, store = limpet.save(unused_url(), {"model": model}), AppendingStore()
    plan = prepare_for(reader_of(snapshot), store, "safetensors")
    plan.write()
    [file] = plan.files
    assert store.position == store.stat(f"out/{file.name}").length
    assert store.waiting == {}
    assert store.most_waiting <= 3 * nbytes + 1000
    loaded = st.load(store.get(f"out/{file.name}", 1 << 30))
    assert_same(dict(sorted(loaded.items())), model)


def test_a_version_is_pinned_during_an_export(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 0)
    store = MemoryStore()
    limpet.save(store.at("version_1"), {"model": {"w": torch.ones(100)}}, step=1)
    snapshot = limpet.Run(store).latest()
    assert snapshot is not None
    pins_by_call: list[list[str]] = []

    def record_pins(nbytes):
        pins_by_call.append([s.key for s in store.list("") if names.is_pin_name(s.key)])

    prepare_export(reader_of(snapshot), str(tmp_path), "safetensors").write(record_pins)
    assert [len(k) for k in pins_by_call] == [1]
    assert not [s.key for s in store.list("") if names.is_pin_name(s.key)]


def test_destinations_of_folders_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = reader_of(limpet.open(save_state({"model": {"w": torch.ones(2)}})))
    targets = {
        "out": "out/model.safetensors",
        "a/b/": "a/b/model.safetensors",
        "a/llama.safetensors": "a/llama.safetensors",
        "one.safetensors": "one.safetensors",
        f"{tmp_path}/two.safetensors": "two.safetensors",
        "odd.pt": "odd.pt/model.safetensors",
        ".": "model.safetensors",
    }
    for to, file in targets.items():
        export(snapshot, "safetensors", to)
        assert list(st.load_file(tmp_path / file)) == ["w"], to
    for to in ("w.pt", "w.pth", "w.bin", "w.ckpt"):
        export(snapshot, "torch", to)
        assert torch.load(to, weights_only=True)
    for to in ("", "/"):
        with pytest.raises(StoreError, match="does not name a folder"):
            locate_export(to, "hf")
    location, name = locate_export("memory://bucket.pt", "torch")
    assert (location.url, name) == ("memory://bucket.pt", None)
    assert not list(tmp_path.rglob("*.partial"))


def test_existing_files_are_not_changed(tmp_path):
    at = tmp_path / "run" / "version_1"
    snapshot = limpet.save(at, {"model": {"w": torch.ones(2), "v": torch.ones(2)}})
    run = tmp_path / "run"
    for to in (at, run, at / "x.safetensors", run / "x.safetensors", run / "version_2"):
        with pytest.raises(AlreadyExists, match="a snapshot, a version, or a run"):
            export(reader_of(snapshot), "safetensors", to)
    export(
        reader_of(snapshot), "safetensors", tmp_path / "exports" / "version_1"
    )  # there is no run
    for name, kind in [
        ("model.safetensors", "safetensors"),
        ("model.pt", "torch"),
        ("model.pt.limpet.json", "torch"),
        ("model.safetensors", "hf"),
        ("model.safetensors.index.json", "hf"),
        ("model-00002-of-00002.safetensors", "hf"),
    ]:
        out = tmp_path / f"{name}-{kind}-out"
        out.mkdir()
        (out / name).write_text("existing")
        with pytest.raises(AlreadyExists, match=f"There is already another file {name}"):
            export(
                reader_of(snapshot), kind, out, **({"max_shard_size": 8} if "0000" in name else {})
            )
        assert os.listdir(out) == [name]
        assert (out / name).read_text() == "existing"
    (tmp_path / "file").write_text("a file")
    with pytest.raises(StoreError):
        export(reader_of(snapshot), "hf", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "a file"


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch"])
def test_damage_is_reported_and_leaves_no_file(kind, tmp_path):
    store = MemoryStore()
    state = {"model": {n: torch.randn(50_000) for n in "abcd"}}
    snapshot = limpet.save(store.at("version_1"), state)
    [shard] = [s.key for s in store.list("") if s.key.endswith(".safetensors")]
    flip_bit(store, shard, byte=-1)
    out = tmp_path / "out"
    options = {"max_shard_size": 200_000} if kind == "hf" else {}
    with pytest.raises(DigestMismatch, match="damaged between bytes"):
        export(reader_of(snapshot), kind, out, **options)
    assert not out.exists()
    out.mkdir()
    (out / "existing").touch()
    with pytest.raises(DigestMismatch):
        export(reader_of(snapshot), kind, out, **options)
    assert os.listdir(out) == ["existing"]


@pytest.mark.slow
def test_a_failure_of_any_call_leaves_no_file(tmp_path):
    """Fail the n-th writing system call with ENOSPC, for all n."""
    state = {"model": {n: torch.randn(20, 20) for n in "abc"}}
    snapshot = limpet.open(save_state(state))
    to = str(tmp_path / "out")
    plans = [
        prepare_export(reader_of(snapshot), to, "hf", max_shard_size=1700),
        prepare_export(reader_of(snapshot), to, "torch"),
    ]
    for plan in plans:
        for call in ("open", "fallocate", "pwrite", "fsync", "link"):
            for at in range(1, 100):
                fs = FaultFs(None, Fault(call, at, errno.ENOSPC))
                location = Location(LocalStore(tmp_path, fs=fs), "out")
                try:
                    replace(plan, location=location).write()
                except NoSpace:
                    assert not (tmp_path / "out").exists(), (call, at)
                    continue
                except StoreError as e:
                    # the folder could not be synced, so the outcome is unknown
                    assert e.fields.get("outcome") == "unknown", (call, at)  # noqa: PT017
                    remaining = os.listdir(tmp_path / "out")
                    assert len(remaining) <= 1, (call, at, remaining)
                for name in (*plan.names, plan.record_name):
                    (tmp_path / "out" / name).unlink(missing_ok=True)
                if not fs.fired:
                    break
            else:
                raise AssertionError("the number of calls is unlimited")


MEASURE_MEMORY = """
import sys
from limpet.snapshot.reader import open_snapshot
from limpet.convert.export import prepare_export
from tests.memory_peak import print_peak_resident

snapshot = open_snapshot(sys.argv[1])
plan = prepare_export(snapshot, sys.argv[1] + "-hf", "hf", max_shard_size=200_000_000)
with print_peak_resident():
    plan.write()
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_state():
    """Export a tensor of 256 MiB split by columns and one of 128 MiB split by rows."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        state = {"model": {"a": np.zeros((1 << 13, 1 << 13), np.float32)}}
        state["model"]["a"][::100] = np.arange(1 << 13)
        state["model"]["b"] = state["model"]["a"][::2].copy()
        original = limpet.save(f"{folder}/version_1", state)
        del state

        def layout(key, shape):
            return split_columns(3)(key, shape) if key.endswith("a") else split_rows(3)(key, shape)

        resharded = write_resharded(
            reader_of(original), Location(LocalStore(folder), "resharded"), layout, 3
        )
        [growth] = numbers_of(MEASURE_MEMORY, resharded.url)
        assert growth < 160 << 20
        files = sorted(Path(f"{resharded.url}-hf").iterdir())
        assert len(files) == 4
        for file in files[:2]:
            for name, tensor in st.load_file(file).items():
                expected = original[f"model/{name}"][...]
                assert np.array_equal(tensor.numpy(), expected)
