"""DCP with Limpet's reader and writer in one process: saves, loads, refusals, and leftovers."""

import copy
import errno
import gc
import io
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)

import limpet
from limpet.errors import (
    AlreadyExists,
    CommitError,
    DigestMismatch,
    LimpetError,
    NotFound,
    PlanError,
    ShapeMismatch,
    StoreError,
    Unsupported,
)
from limpet.integrations.dcp import StorageReader, StorageWriter
from limpet.loading.snapshot import reader_of
from limpet.snapshot.location import is_snapshot, locate
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import Fault, FaultFs
from limpet.types import DTYPES
from tests.states import TORCH_DTYPES, random_tensor, tensor_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state, url, planner=None):
    return dcp.save(state, storage_writer=StorageWriter(url), planner=planner, no_dist=True)


def load(state, url, planner=None):
    dcp.load(state, storage_reader=StorageReader(url), planner=planner, no_dist=True)
    return state


def load_everything(url):
    """Return the whole state as DCP rebuilds it without a state to load into."""
    state = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, StorageReader(url), no_dist=True, planner=planner)
    return state


def cause_of(caught):
    """Return the exception that DCP wrapped in its own."""
    (failure,) = {id(e[0]): e[0] for e in caught.value.failures.values()}.values()
    return failure


def trained_state():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.float32))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {str(i): v for i, v in optimizer.state_dict()["state"].items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        },
        "epoch": 3,
        "list": [torch.arange(2), 5, {"a": (1, 2)}],
        "plain": [1, "two", None],
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 3),
        "": {"": 1, "a/b~": torch.ones(2)},
        "numpy": np.arange(3),
    }


def zeroed_like(state):
    """Return the same structure with other contents."""
    if isinstance(state, dict):
        return type(state)((k, zeroed_like(v)) for k, v in state.items())
    if isinstance(state, list):
        return [zeroed_like(v) for v in state]
    return torch.zeros_like(state) if torch.is_tensor(state) else None


def values_equal(a, b):
    if torch.is_tensor(a) or isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(values_equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(values_equal, a, b))
    return type(a) is type(b) and a == b


def make_freed_tensor():
    """Return a tensor without storage, as FSDP leaves a parameter that it has resharded."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.fixture
def store():
    return MemoryStore("dcp")


def test_saved_state_loads_through_dcp_and_is_an_ordinary_snapshot(tmp_path):
    state = trained_state()
    save(state, tmp_path / "version_7")
    assert values_equal(load(zeroed_like(state), tmp_path / "version_7"), state)
    assert values_equal(load_everything(tmp_path / "version_7"), state)
    snap = limpet.open(tmp_path / "version_7")
    assert snap.step == 7
    assert snap.verify().ok
    assert "optimizer/state/0/exp_avg" in snap
    assert "/".join(["~", "a~1b~0"]) in snap
    plain = limpet.load(tmp_path / "version_7")
    assert values_equal(plain["model"], dict(state["model"]))
    assert plain["list"][0].tolist() == [0, 1]
    assert torch.load(io.BytesIO(plain["optimizer"]["param_groups"][0]["betas"])) == (0.9, 0.999)
    assert [v.step for v in limpet.Run(tmp_path).snapshots()] == [7]
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    limpet.load(tmp_path / "version_7", into={"model": model}, unexpected="ignore")
    assert values_equal(dict(model.state_dict()), dict(state["model"]))


def test_save_leaves_only_the_snapshot(tmp_path):
    writer = StorageWriter(tmp_path / "version_7")
    dcp.save(trained_state(), storage_writer=writer, no_dist=True)
    assert os.listdir(tmp_path) == ["version_7"], f"a pin remains while {writer} is alive"
    assert len(os.listdir(tmp_path / "version_7")) == 3


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", [d for d in DTYPES if hasattr(torch, d)])
def test_every_dtype_is_saved_and_loaded(name, store):
    whole = random_tensor(getattr(torch, name), (3, 5), 1)
    save({"a": whole, "scalar": whole.reshape(-1)[0].clone()}, store)
    loaded = load(
        {"a": torch.empty_like(whole), "scalar": torch.empty((), dtype=whole.dtype)}, store
    )
    assert tensor_bytes(loaded["a"]) == tensor_bytes(whole)
    assert tensor_bytes(loaded["scalar"]) == tensor_bytes(whole)[: whole.element_size()]
    assert len(TORCH_DTYPES) > 15


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t.requires_grad_(),
        nn.Parameter,
        lambda t: t.expand(2, 4, 6),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
def test_tensors_that_are_not_contiguous_blocks_are_saved_and_loaded(change, store):
    value = change(torch.randn(4, 6))
    save({"a": value}, store)
    loaded = load({"a": torch.empty(value.shape, dtype=value.dtype)}, store)["a"]
    assert loaded.equal(value.detach())
    strided = torch.empty(value.shape[::-1], dtype=value.dtype).permute(*range(value.ndim)[::-1])
    assert load({"a": strided}, store)["a"].equal(value.detach())


def test_load_casts_dtypes_as_dcp_does(store):
    save({"a": torch.randn(4, 6)}, store)
    into = load({"a": torch.empty(4, 6, dtype=torch.bfloat16)}, store)["a"]
    assert into.equal(limpet.load(store)["a"].bfloat16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        make_freed_tensor,
    ],
    ids=["csr", "coo", "meta", "quantized", "freed"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_bytes_are_refused_by_key(make, tmp_path):
    with pytest.raises(CheckpointException) as caught:
        save({"model": {"odd": make()}}, tmp_path / "a")
    if isinstance(cause_of(caught), LimpetError):  # DCP itself cannot plan some of these tensors
        assert isinstance(cause_of(caught), Unsupported)
        assert cause_of(caught).leaf == "model/odd"
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_metadata_equals_that_of_dcp(tmp_path):
    state = trained_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    dcp_metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    save(state, tmp_path / "limpet")
    metadata = StorageReader(tmp_path / "limpet").read_metadata()
    assert metadata.planner_data == dcp_metadata.planner_data
    assert metadata.state_dict_metadata.keys() == dcp_metadata.state_dict_metadata.keys()
    for fqn, entry in metadata.state_dict_metadata.items():
        dcp_entry = dcp_metadata.state_dict_metadata[fqn]
        assert type(entry) is type(dcp_entry)
        if isinstance(entry, TensorStorageMetadata):
            assert (entry.size, entry.chunks) == (dcp_entry.size, dcp_entry.chunks)
            assert entry.properties.dtype == dcp_entry.properties.dtype
    assert metadata.storage_meta.checkpoint_id == tmp_path / "limpet"
    assert metadata.storage_data["model.0.weight"] == "model/0.weight"
    assert list(metadata.state_dict_metadata) == list(metadata.planner_data)
    pickle.loads(pickle.dumps(metadata))


def test_metadata_contains_the_save_id_and_the_load_id(store):
    metas = []

    class RecordingPlanner(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            metas.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer = StorageWriter(store)
    saved_metadata = dcp.save(
        {"a": 1}, storage_writer=writer, planner=RecordingPlanner(), no_dist=True
    )
    readers = StorageReader(store), StorageReader(store)
    loaded_metas = [reader.read_metadata().storage_meta for reader in readers]
    for meta in (*metas, saved_metadata.storage_meta, *loaded_metas):
        assert (meta.checkpoint_id, meta.save_id) == (writer.checkpoint_id, writer.save_id)
    assert [meta.load_id for meta in loaded_metas] == [reader.load_id for reader in readers]
    before = writer.save_id, readers[0].load_id, readers[1].load_id
    writer.reset()
    readers[0].reset()
    assert len({writer.save_id, readers[0].load_id, *before}) == 5
    assert all(type(name) is str and name for name in before)


def test_native_snapshot_has_a_save_id(store):
    snapshot = limpet.save(store, {"a": 1})
    assert (
        StorageReader(store).read_metadata().storage_meta.save_id
        == reader_of(snapshot).manifest.attempt
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_load_of_a_part_of_a_snapshot_by_keys(store):
    state = {"model": {"a": torch.ones(3), "b": 2}, "more": {"c": [torch.zeros(2), 5]}}
    save(state, store)
    reader = StorageReader(store)
    assert values_equal(
        _load_state_dict_from_keys({"model"}, storage_reader=reader), {"model": state["model"]}
    )
    found = _load_state_dict_from_keys({"model.b", "more.c.0"}, storage_reader=reader)
    assert values_equal(found, {"model": {"b": 2}, "more": {"c": [torch.zeros(2)]}})


def test_state_saved_without_flattening_loads(store):
    state = {"model.weight": torch.ones(3), "deep": {"a": 1}}
    save(state, store, DefaultSavePlanner(flatten_state_dict=False))
    assert limpet.open(store).keys() == ["model.weight", "deep"]
    assert StorageReader(store).read_metadata().planner_data is None
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert values_equal(
        load(zeroed_like({"model.weight": torch.ones(3)}) | {"deep": 0}, store, planner), state
    )


def test_planner_data_is_saved_or_refused(store):
    class PlannerWithData(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data={"mine": (1, [2.5, None])})

    save({"a": {"b": torch.ones(3)}}, store, PlannerWithData())
    assert StorageReader(store).read_metadata().planner_data == {"mine": (1, [2.5, None])}
    assert values_equal(load({"a": {"b": torch.zeros(3)}}, store), {"a": {"b": torch.ones(3)}})

    class PlannerWithUnsupportedData(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=object())

    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(3)}, MemoryStore("odd"), PlannerWithUnsupportedData())
    assert isinstance(cause_of(caught), Unsupported)


def test_planners_can_rename_and_convert(store):
    class HalfPrecision(DefaultSavePlanner):
        def resolve_data(self, write_item):
            data = super().resolve_data(write_item)
            return data.half() if torch.is_tensor(data) else data

    class Renaming(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            super().set_up_planner({"new": state_dict["old"]}, metadata, is_coordinator)

    class Copying(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return torch.full_like(super().resolve_tensor(read_item), 9)

        def commit_tensor(self, read_item, tensor):
            super().resolve_tensor(read_item).copy_(tensor * 2)

    save({"new": torch.ones(3), "n": 5}, store, HalfPrecision())
    assert limpet.open(store)["new"].dtype == "float16"
    assert load({"old": torch.zeros(3)}, store, Renaming())["old"].tolist() == [1, 1, 1]
    assert load({"new": torch.zeros(3)}, store, Copying())["new"].tolist() == [2, 2, 2]


def test_planner_whose_data_differs_from_its_plan_is_refused(store):
    class ReturnsFewerRows(DefaultSavePlanner):
        def resolve_data(self, write_item):
            data = super().resolve_data(write_item)
            return data[:1] if torch.is_tensor(data) else data

    class ReturnsTensorAsBytes(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            items = [replace(i, type=WriteItemType.BYTE_IO, tensor_data=None) for i in plan.items]
            return replace(plan, items=items)

        def transform_object(self, write_item, object):
            return object

    class DropsItem(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return super().finish_plan(replace(new_plan, items=new_plan.items[1:]))

    class PlansHalf(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            (item,) = plan.items
            chunk = replace(item.tensor_data.chunk, sizes=torch.Size([1, 2]))
            data = replace(item.tensor_data, chunk=chunk)
            return replace(plan, items=[replace(item, tensor_data=data)])

        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[:1]

    for planner, kind in (
        (ReturnsFewerRows(), ShapeMismatch),
        (ReturnsTensorAsBytes(), Unsupported),
        (DropsItem(), CommitError),
        (PlansHalf(), PlanError),
    ):
        with pytest.raises(CheckpointException) as caught:
            save({"a": torch.ones(2, 2)}, store, planner)
        assert isinstance(cause_of(caught), kind), cause_of(caught)
        with pytest.raises(NotFound):
            limpet.open(store)

    class ReturnsWrongShape(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return torch.empty(7)

    save({"a": torch.ones(2, 2)}, store)
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.ones(2, 2)}, store, ReturnsWrongShape())
    assert isinstance(cause_of(caught), ShapeMismatch)


def test_native_snapshot_loads_through_dcp(tmp_path):
    model = nn.Linear(3, 4)
    tied = torch.ones(2)
    state = {
        "model": model,
        "tied": {"a": tied, "b": tied},
        "epoch": 5,
        "names": ["a", "b"],
        "mixed": [torch.ones(2), "x", (1, torch.zeros(1))],
        "raw": b"x" * 9000,
        "sparse": torch.eye(3).to_sparse(),
        "array": np.arange(4),
        1: {2: "two"},
    }
    limpet.save(tmp_path / "version_1", state)
    loaded = load_everything(tmp_path / "version_1")
    assert values_equal(loaded["model"], dict(model.state_dict()))
    assert loaded["tied"]["b"].tolist() == [1, 1]
    assert (loaded["epoch"], loaded["names"], loaded["raw"]) == (5, ["a", "b"], b"x" * 9000)
    assert loaded["mixed"][1] == "x"
    assert loaded["mixed"][2][1].tolist() == [0]
    assert loaded["sparse"].to_dense().equal(torch.eye(3))
    assert loaded["array"].tolist() == [0, 1, 2, 3]
    assert loaded["1"] == {"2": "two"}
    into = {"model": nn.Linear(3, 4).state_dict(), "epoch": 0, "tied": {"b": torch.zeros(2)}}
    load(into, tmp_path / "version_1")
    assert values_equal(dict(into["model"]), dict(model.state_dict()))
    assert into["tied"]["b"].tolist() == [1, 1]


def test_native_incremental_snapshot_loads_through_dcp(tmp_path):
    state = {"big": torch.randn(300, 300), "n": torch.zeros(2)}
    ckpt = limpet.Checkpointer(tmp_path, state, save=limpet.EverySteps(1), incremental=True)
    with ckpt:
        ckpt.step()
        state["n"] += 1
        ckpt.step()
    snap = limpet.Run(tmp_path).latest()
    assert snap.referred_bytes
    assert values_equal(load_everything(snap.url), state)


def test_two_leaves_with_the_same_dcp_name_are_refused(store):
    limpet.save(store, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(PlanError, match=r"DCP uses the name 'a\.b' for two leaves"):
        StorageReader(store).read_metadata()


def test_save_never_overwrites_a_snapshot(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "version_1")
    before = sorted(os.listdir(tmp_path / "version_1"))
    for location, error in ((tmp_path / "version_1", AlreadyExists), (tmp_path, AlreadyExists)):
        with pytest.raises(CheckpointException) as caught:
            save({"a": torch.zeros(2)}, location)
        assert isinstance(cause_of(caught), error)
    assert sorted(os.listdir(tmp_path / "version_1")) == before
    assert limpet.load(tmp_path / "version_1")["a"].tolist() == [1, 1]


def test_only_one_of_two_saves_to_the_same_location_commits(store):
    other = {"a": torch.zeros(2)}

    class SavesMeanwhile(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            save(other, store)
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(2)}, store, SavesMeanwhile())
    assert isinstance(cause_of(caught), CommitError)
    assert limpet.load(store)["a"].tolist() == [0, 0]


def failure_of(writer, state):
    """Save, and return the exception that the save raised, or None."""
    try:
        dcp.save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as e:
        return e.failures[0][0]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(4))
def test_failed_disk_calls_commit_nothing_and_leave_no_pin(begin):
    """The same writer can save to the same location after the disk works again."""
    state = {"a": torch.ones(5000), "n": 1}
    pins_left = []
    with limpet.attach(
        lambda name, fields: pins_left.append(fields) if name == "pin_left" else None
    ):
        for at in range(1 + begin, 200, 4):
            fs = FaultFs(CrashFs(), Fault(None, at, errno.EIO, lost=at % 8 > 3))
            store = LocalStore("/disk/version_1", fs=fs)
            writer = StorageWriter(store)
            pins_left.clear()
            error = failure_of(writer, state)
            fs.faults.clear()
            if error is not None:
                committed = is_snapshot(locate(store))
                assert not committed or error.fields.get("outcome") == "unknown"
                del error
                gc.collect()
                assert committed or failure_of(writer, state) is None
            assert limpet.open(store).verify().ok
            assert pins_left or not [s.key for s in store.list("") if s.key.startswith("pin-")]
            if not fs.fired:
                assert at > 50
                return
    pytest.fail("a fault fired in every save")


def test_damage_is_found_before_bytes_are_used(tmp_path):
    state = {"a": torch.ones(50_000), "n": 5}
    save(state, tmp_path / "v")
    shard = next((tmp_path / "v").glob("*.safetensors"))
    whole = shard.read_bytes()
    for at in (len(whole) - 1, 4096 + 8):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        into = {"a": torch.zeros(50_000), "n": 0}
        with pytest.raises(CheckpointException) as caught:
            load(into, tmp_path / "v")
        assert isinstance(cause_of(caught), DigestMismatch)
        assert into["n"] == 0
    shard.unlink()
    with pytest.raises((CheckpointException, LimpetError)) as caught:
        load({"a": torch.zeros(50_000)}, tmp_path / "v")
    assert "is missing" in str(caught.value)


def test_missing_keys_raise_unless_partial_load_is_allowed(store):
    save({"a": torch.ones(2), "n": 1}, store)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: more"):
        load({"a": torch.zeros(2), "more": torch.zeros(2)}, store)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    into = load({"a": torch.zeros(2), "more": torch.zeros(2)}, store, planner)
    assert (into["a"].tolist(), into["more"].tolist()) == ([1, 1], [0, 0])
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(3)}, store)


def test_load_without_a_snapshot_raises(tmp_path):
    with pytest.raises(CheckpointException, match="There is no snapshot at"):
        load({"a": torch.zeros(3)}, tmp_path / "none")


def test_checkpoint_id_selects_the_location_of_a_reused_writer_and_reader(tmp_path):
    writer, reader = StorageWriter("unused"), StorageReader("unused")
    for step in (1, 2):
        location = tmp_path / f"version_{step}"
        state = {"a": torch.full((2,), float(step))}
        dcp.save(state, checkpoint_id=location, storage_writer=writer, no_dist=True)
        assert writer.checkpoint_id == location
        into = {"a": torch.zeros(2)}
        dcp.load(into, checkpoint_id=str(location), storage_reader=reader, no_dist=True)
        assert into["a"].tolist() == [step, step]
    assert [s.step for s in limpet.Run(tmp_path).snapshots()] == [1, 2]


def test_reader_accepts_metadata_that_it_did_not_read(store):
    save({"a": torch.ones(2)}, store)
    metadata = StorageReader(store).read_metadata()
    reader = StorageReader(store)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = DefaultLoadPlanner()
    into = {"a": torch.zeros(2)}
    planner.set_up_planner(into, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert into["a"].tolist() == [1, 1]


def test_out_of_order_calls_raise(store):
    plan = DefaultSavePlanner()
    with pytest.raises(PlanError, match="before a save has begun"):
        StorageWriter(store).write_data(None, plan)
    with pytest.raises(PlanError, match="before a save has begun"):
        StorageWriter(store).finish(None, [])
    with pytest.raises(PlanError, match="before a load has begun"):
        StorageReader(store).read_data(None, None)


@pytest.mark.parametrize(
    ("url", "valid"),
    [("runs/a", True), ("memory://m/a", True), ("abc://x/y", False), ("..", True), ("", False)],
)
def test_validate_checkpoint_id_accepts_locations(url, valid):
    assert StorageWriter.validate_checkpoint_id(url) is valid
    assert StorageReader.validate_checkpoint_id(url) is valid


def test_writer_can_be_pickled_before_and_after_a_save(tmp_path):
    writer = StorageWriter(str(tmp_path / "a"))
    for _ in range(2):
        copied = pickle.loads(pickle.dumps(writer))
        assert copied.url == writer.url
        assert copy.copy(copied).url == writer.url
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        writer.reset(tmp_path / "b")


@pytest.mark.parametrize("async_staging", [False, True])
@pytest.mark.parametrize("shared_memory", [False, True])
def test_async_save_with_a_custom_stager(async_staging, shared_memory, tmp_path):
    if not hasattr(staging, "StagingOptions"):
        pytest.skip(f"torch {torch.__version__} has no StagingOptions")
    stager = staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=shared_memory,
            use_async_staging=async_staging,
            use_non_blocking_copy=False,
        )
    )
    state = {"a": torch.arange(5.0), "b": {"n": 1, "none": None}}
    writer = StorageWriter(tmp_path / "v")
    future = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    assert async_staging == hasattr(future, "staging_completion")
    if async_staging:
        future.staging_completion.result()
    state["a"].fill_(0)
    metadata = getattr(future, "upload_completion", future).result()
    assert metadata.storage_meta.save_id == writer.save_id
    assert values_equal(
        load_everything(tmp_path / "v"), {"a": torch.arange(5.0), "b": {"n": 1, "none": None}}
    )
    stager.close()


def test_cached_plan_is_reused_also_after_a_failure(tmp_path):
    class Cached(DefaultSavePlanner):
        """A planner with its own name, because DCP caches plans by class name."""

    def planner():
        return Cached(enable_plan_caching=True)

    def caches():
        return [d for d in vars(DefaultSavePlanner.__mro__[1]).values() if isinstance(d, dict)]

    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip(f"torch {torch.__version__} does not cache plans")
    try:
        for step in (1, 2, 3):
            state = {"a": torch.full((3,), float(step)), "n": step}
            save(state, tmp_path / f"version_{step}", planner())
            assert values_equal(load_everything(tmp_path / f"version_{step}"), state)
        with pytest.raises(CheckpointException):
            save(state, tmp_path / "version_3", planner())
        save(state, tmp_path / "version_4", planner())
        larger_state = {**state, "more": torch.ones(2)}
        save(larger_state, tmp_path / "version_5", planner())
        assert values_equal(load_everything(tmp_path / "version_5"), larger_state)
    finally:
        for cache in caches():
            cache.pop("Cached", None)


def test_unknown_url_scheme_raises_a_store_error():
    with pytest.raises(StoreError, match="Unsupported kind of store"):
        StorageReader("abc://x/y").read_metadata()
    assert not isinstance(BytesStorageMetadata(), TensorStorageMetadata)


def test_extensions_are_refused_by_name():
    class Rot13:
        pass

    with pytest.raises(Unsupported, match=r"cannot apply _extensions.*Rot13.*Omit _extensions"):
        StorageWriter("runs/a/version_1", _extensions=[Rot13()])
    assert StorageWriter("runs/a/version_1", _extensions=()).url == "runs/a/version_1"
