"""DCP over our classes in one process: what is saved, loaded, refused, and left behind."""

from __future__ import annotations

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

import holdfast
from holdfast.engine.snapshot.location import is_snapshot, locate
from holdfast.errors import (
    AlreadyExists,
    CommitError,
    DigestMismatch,
    HoldfastError,
    NotFound,
    PlanError,
    ShapeMismatch,
    StoreError,
    Unsupported,
)
from holdfast.integrations.dcp.reading import StorageReader
from holdfast.integrations.dcp.writing import StorageWriter
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.testing.crashfs import CrashFs
from holdfast.testing.faults import Fault, FaultFs
from holdfast.types import DTYPES
from tests.engine.states import TORCH_DTYPES, random_tensor, tensor_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state, url, planner=None):
    return dcp.save(state, storage_writer=StorageWriter(url), planner=planner, no_dist=True)


def load(state, url, planner=None):
    dcp.load(state, storage_reader=StorageReader(url), planner=planner, no_dist=True)
    return state


def everything(url):
    """The whole state as DCP rebuilds it without being told what is in it."""
    state = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, StorageReader(url), no_dist=True, planner=planner)
    return state


def cause(caught):
    """What DCP has wrapped into its own exception."""
    (failure,) = {id(e[0]): e[0] for e in caught.value.failures.values()}.values()
    return failure


def trained():
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


def zeroed(state):
    """The same structure, other contents."""
    if isinstance(state, dict):
        return type(state)((k, zeroed(v)) for k, v in state.items())
    if isinstance(state, list):
        return [zeroed(v) for v in state]
    return torch.zeros_like(state) if torch.is_tensor(state) else None


def same(a, b):
    if torch.is_tensor(a) or isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def freed():
    """As FSDP leaves a parameter whose memory it has taken."""
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.fixture
def store():
    return MemoryStore("dcp")


def test_a_state_comes_back_and_is_an_ordinary_snapshot(tmp_path):
    state = trained()
    save(state, tmp_path / "version_7")
    assert same(load(zeroed(state), tmp_path / "version_7"), state)
    assert same(everything(tmp_path / "version_7"), state)
    snap = holdfast.open(tmp_path / "version_7")
    assert snap.step == 7
    assert snap.verify().ok
    assert "optimizer/state/0/exp_avg" in snap
    assert "/".join(["~", "a~1b~0"]) in snap
    plain = holdfast.load(tmp_path / "version_7")
    assert same(plain["model"], dict(state["model"]))
    assert plain["list"][0].tolist() == [0, 1]
    assert torch.load(io.BytesIO(plain["optimizer"]["param_groups"][0]["betas"])) == (0.9, 0.999)
    assert [v.step for v in holdfast.Run(tmp_path).snapshots()] == [7]
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    holdfast.load(tmp_path / "version_7", into={"model": model}, unexpected="ignore")
    assert same(dict(model.state_dict()), dict(state["model"]))


def test_nothing_but_the_snapshot_is_left(tmp_path):
    writer = StorageWriter(tmp_path / "version_7")
    dcp.save(trained(), storage_writer=writer, no_dist=True)
    assert os.listdir(tmp_path) == ["version_7"], f"no pin, although {writer} lives on"
    assert len(os.listdir(tmp_path / "version_7")) == 3


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", [d for d in DTYPES if hasattr(torch, d)])
def test_every_dtype(name, store):
    whole = random_tensor(getattr(torch, name), (3, 5), 1)
    save({"a": whole, "scalar": whole.reshape(-1)[0].clone()}, store)
    back = load({"a": torch.empty_like(whole), "scalar": torch.empty((), dtype=whole.dtype)}, store)
    assert tensor_bytes(back["a"]) == tensor_bytes(whole)
    assert tensor_bytes(back["scalar"]) == tensor_bytes(whole)[: whole.element_size()]
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
def test_tensors_that_are_no_plain_block(change, store):
    value = change(torch.randn(4, 6))
    save({"a": value}, store)
    back = load({"a": torch.empty(value.shape, dtype=value.dtype)}, store)["a"]
    assert back.equal(value.detach())
    strided = torch.empty(value.shape[::-1], dtype=value.dtype).permute(*range(value.ndim)[::-1])
    assert load({"a": strided}, store)["a"].equal(value.detach())


def test_dtypes_are_cast_on_loading_as_dcp_does(store):
    save({"a": torch.randn(4, 6)}, store)
    into = load({"a": torch.empty(4, 6, dtype=torch.bfloat16)}, store)["a"]
    assert into.equal(holdfast.load(store)["a"].bfloat16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        freed,
    ],
    ids=["csr", "coo", "meta", "quantized", "freed"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_bytes_is_refused_by_its_key(make, tmp_path):
    with pytest.raises(CheckpointException) as caught:
        save({"model": {"odd": make()}}, tmp_path / "a")
    if isinstance(cause(caught), HoldfastError):  # DCP itself cannot plan some of them
        assert isinstance(cause(caught), Unsupported)
        assert cause(caught).leaf == "model/odd"
    assert not (tmp_path / "a" / "manifest.json").exists()


# -- metadata ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_the_metadata_is_that_of_dcp_itself(tmp_path):
    state = trained()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    save(state, tmp_path / "ours")
    ours = StorageReader(tmp_path / "ours").read_metadata()
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for fqn, mine in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[fqn]
        assert type(mine) is type(other)
        if isinstance(mine, TensorStorageMetadata):
            assert (mine.size, mine.chunks) == (other.size, other.chunks)
            assert mine.properties.dtype == other.properties.dtype
    assert ours.storage_meta.checkpoint_id == tmp_path / "ours"
    assert ours.storage_data["model.0.weight"] == "model/0.weight"
    assert list(ours.state_dict_metadata) == list(ours.planner_data)
    pickle.loads(pickle.dumps(ours))


def test_the_metadata_names_the_save_and_the_load(store):
    told = []

    class Asking(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            told.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer = StorageWriter(store)
    saved = dcp.save({"a": 1}, storage_writer=writer, planner=Asking(), no_dist=True)
    readers = StorageReader(store), StorageReader(store)
    kept = [reader.read_metadata().storage_meta for reader in readers]
    for meta in (*told, saved.storage_meta, *kept):
        assert (meta.checkpoint_id, meta.save_id) == (writer.checkpoint_id, writer.save_id)
    assert [meta.load_id for meta in kept] == [reader.load_id for reader in readers]
    before = writer.save_id, readers[0].load_id, readers[1].load_id
    writer.reset()
    readers[0].reset()
    assert len({writer.save_id, readers[0].load_id, *before}) == 5
    assert all(type(name) is str and name for name in before)


def test_a_native_snapshot_has_a_save_id_too(store):
    snapshot = holdfast.save(store, {"a": 1})
    assert StorageReader(store).read_metadata().storage_meta.save_id == snapshot.manifest.attempt


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_part_of_a_snapshot_by_its_names(store):
    state = {"model": {"a": torch.ones(3), "b": 2}, "more": {"c": [torch.zeros(2), 5]}}
    save(state, store)
    reader = StorageReader(store)
    assert same(
        _load_state_dict_from_keys({"model"}, storage_reader=reader), {"model": state["model"]}
    )
    found = _load_state_dict_from_keys({"model.b", "more.c.0"}, storage_reader=reader)
    assert same(found, {"model": {"b": 2}, "more": {"c": [torch.zeros(2)]}})


def test_a_state_that_is_not_flattened(store):
    state = {"model.weight": torch.ones(3), "deep": {"a": 1}}
    save(state, store, DefaultSavePlanner(flatten_state_dict=False))
    assert holdfast.open(store).keys() == ["model.weight", "deep"]
    assert StorageReader(store).read_metadata().planner_data is None
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert same(load(zeroed({"model.weight": torch.ones(3)}) | {"deep": 0}, store, planner), state)


def test_a_planner_with_data_of_its_own(store):
    class Own(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data={"mine": (1, [2.5, None])})

    save({"a": {"b": torch.ones(3)}}, store, Own())
    assert StorageReader(store).read_metadata().planner_data == {"mine": (1, [2.5, None])}
    assert same(load({"a": {"b": torch.zeros(3)}}, store), {"a": {"b": torch.ones(3)}})

    class Odd(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=object())

    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(3)}, MemoryStore("odd"), Odd())
    assert isinstance(cause(caught), Unsupported)


def test_planners_that_rename_and_convert(store):
    class Half(DefaultSavePlanner):
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

    save({"new": torch.ones(3), "n": 5}, store, Half())
    assert holdfast.open(store)["new"].dtype == "float16"
    assert load({"old": torch.zeros(3)}, store, Renaming())["old"].tolist() == [1, 1, 1]
    assert load({"new": torch.zeros(3)}, store, Copying())["new"].tolist() == [2, 2, 2]


def test_a_planner_that_gives_something_else_than_it_planned_is_refused(store):
    class Short(DefaultSavePlanner):
        def resolve_data(self, write_item):
            data = super().resolve_data(write_item)
            return data[:1] if torch.is_tensor(data) else data

    class Bytes(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            items = [replace(i, type=WriteItemType.BYTE_IO, tensor_data=None) for i in plan.items]
            return replace(plan, items=items)

        def transform_object(self, write_item, object):
            return object

    class Less(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return super().finish_plan(replace(new_plan, items=new_plan.items[1:]))

    class Half(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            (item,) = plan.items
            chunk = replace(item.tensor_data.chunk, sizes=torch.Size([1, 2]))
            data = replace(item.tensor_data, chunk=chunk)
            return replace(plan, items=[replace(item, tensor_data=data)])

        def resolve_data(self, write_item):
            return super().resolve_data(write_item)[:1]

    for planner, kind in (
        (Short(), ShapeMismatch),
        (Bytes(), Unsupported),
        (Less(), CommitError),
        (Half(), PlanError),
    ):
        with pytest.raises(CheckpointException) as caught:
            save({"a": torch.ones(2, 2)}, store, planner)
        assert isinstance(cause(caught), kind), cause(caught)
        with pytest.raises(NotFound):
            holdfast.open(store)

    class Wide(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return torch.empty(7)

    save({"a": torch.ones(2, 2)}, store)
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.ones(2, 2)}, store, Wide())
    assert isinstance(cause(caught), ShapeMismatch)


# -- snapshots that Holdfast saved itself --------------------------------------------------------


def test_a_native_snapshot_is_loaded_through_dcp(tmp_path):
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
    holdfast.save(tmp_path / "version_1", state)
    back = everything(tmp_path / "version_1")
    assert same(back["model"], dict(model.state_dict()))
    assert back["tied"]["b"].tolist() == [1, 1]
    assert (back["epoch"], back["names"], back["raw"]) == (5, ["a", "b"], b"x" * 9000)
    assert back["mixed"][1] == "x"
    assert back["mixed"][2][1].tolist() == [0]
    assert back["sparse"].to_dense().equal(torch.eye(3))
    assert back["array"].tolist() == [0, 1, 2, 3]
    assert back["1"] == {"2": "two"}
    into = {"model": nn.Linear(3, 4).state_dict(), "epoch": 0, "tied": {"b": torch.zeros(2)}}
    load(into, tmp_path / "version_1")
    assert same(dict(into["model"]), dict(model.state_dict()))
    assert into["tied"]["b"].tolist() == [1, 1]


def test_a_native_incremental_snapshot_is_loaded_through_dcp(tmp_path):
    state = {"big": torch.randn(300, 300), "n": torch.zeros(2)}
    ckpt = holdfast.Checkpointer(tmp_path, state, save=holdfast.EverySteps(1), incremental=True)
    with ckpt:
        ckpt.step()
        state["n"] += 1
        ckpt.step()
    snap = holdfast.Run(tmp_path).latest()
    assert snap.referred_bytes
    assert same(everything(snap.url), state)


def test_two_leaves_with_one_name_are_refused(store):
    holdfast.save(store, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(PlanError, match=r"DCP uses the name 'a\.b' for two leaves"):
        StorageReader(store).read_metadata()


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_snapshot_is_never_overwritten(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "version_1")
    before = sorted(os.listdir(tmp_path / "version_1"))
    for place, kind in ((tmp_path / "version_1", AlreadyExists), (tmp_path, AlreadyExists)):
        with pytest.raises(CheckpointException) as caught:
            save({"a": torch.zeros(2)}, place)
        assert isinstance(cause(caught), kind)
    assert sorted(os.listdir(tmp_path / "version_1")) == before
    assert holdfast.load(tmp_path / "version_1")["a"].tolist() == [1, 1]


def test_of_two_that_save_to_one_place_one_commits(store):
    other = {"a": torch.zeros(2)}

    class Slow(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            save(other, store)
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(2)}, store, Slow())
    assert isinstance(cause(caught), CommitError)
    assert holdfast.load(store)["a"].tolist() == [0, 0]


def failing(writer, state):
    """What a save raised; None if it did not."""
    try:
        dcp.save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as e:
        return e.failures[0][0]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(4))
def test_at_every_call_to_the_disk_that_fails(begin):
    """Nothing is committed, no pin is left, and the same writer saves there once it works."""
    state = {"a": torch.ones(5000), "n": 1}
    left = []
    with holdfast.attach(lambda name, fields: left.append(fields) if name == "pin_left" else None):
        for at in range(1 + begin, 200, 4):
            fs = FaultFs(CrashFs(), Fault(None, at, errno.EIO, lost=at % 8 > 3))
            store = LocalStore("/disk/version_1", fs=fs)
            writer = StorageWriter(store)
            left.clear()
            error = failing(writer, state)
            fs.faults.clear()
            if error is not None:
                committed = is_snapshot(locate(store))
                assert not committed or error.fields.get("outcome") == "unknown"
                del error
                gc.collect()
                assert committed or failing(writer, state) is None
            assert holdfast.open(store).verify().ok
            assert left or not [s.key for s in store.list("") if s.key.startswith("pin-")]
            if not fs.fired:
                assert at > 50
                return
    pytest.fail("it never got through")


def test_damage_is_found_before_a_byte_is_used(tmp_path):
    state = {"a": torch.ones(50_000), "n": 5}
    save(state, tmp_path / "v")
    shard = next((tmp_path / "v").glob("*.safetensors"))
    whole = shard.read_bytes()
    for at in (len(whole) - 1, 4096 + 8):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        into = {"a": torch.zeros(50_000), "n": 0}
        with pytest.raises(CheckpointException) as caught:
            load(into, tmp_path / "v")
        assert isinstance(cause(caught), DigestMismatch)
        assert into["n"] == 0
    shard.unlink()
    with pytest.raises((CheckpointException, HoldfastError)) as caught:
        load({"a": torch.zeros(50_000)}, tmp_path / "v")
    assert "is missing" in str(caught.value)


def test_keys_that_are_missing(store):
    save({"a": torch.ones(2), "n": 1}, store)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: more"):
        load({"a": torch.zeros(2), "more": torch.zeros(2)}, store)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    into = load({"a": torch.zeros(2), "more": torch.zeros(2)}, store, planner)
    assert (into["a"].tolist(), into["more"].tolist()) == ([1, 1], [0, 0])
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(3)}, store)


def test_there_is_no_snapshot(tmp_path):
    with pytest.raises(CheckpointException, match="There is no snapshot at"):
        load({"a": torch.zeros(3)}, tmp_path / "none")


# -- the ways to call it -------------------------------------------------------------------------


def test_a_checkpoint_id_says_where_and_one_writer_saves_many(tmp_path):
    writer, reader = StorageWriter("unused"), StorageReader("unused")
    for step in (1, 2):
        place = tmp_path / f"version_{step}"
        state = {"a": torch.full((2,), float(step))}
        dcp.save(state, checkpoint_id=place, storage_writer=writer, no_dist=True)
        assert writer.checkpoint_id == place
        into = {"a": torch.zeros(2)}
        dcp.load(into, checkpoint_id=str(place), storage_reader=reader, no_dist=True)
        assert into["a"].tolist() == [step, step]
    assert [s.step for s in holdfast.Run(tmp_path).snapshots()] == [1, 2]


def test_a_reader_may_be_given_metadata_that_it_has_not_read(store):
    save({"a": torch.ones(2)}, store)
    metadata = StorageReader(store).read_metadata()
    reader = StorageReader(store)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = DefaultLoadPlanner()
    into = {"a": torch.zeros(2)}
    planner.set_up_planner(into, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert into["a"].tolist() == [1, 1]


def test_out_of_order_calls_are_told(store):
    plan = DefaultSavePlanner()
    with pytest.raises(PlanError, match="before a save has begun"):
        StorageWriter(store).write_data(None, plan)
    with pytest.raises(PlanError, match="before a save has begun"):
        StorageWriter(store).finish(None, [])
    with pytest.raises(PlanError, match="before a load has begun"):
        StorageReader(store).read_data(None, None)


@pytest.mark.parametrize(
    ("url", "good"),
    [("runs/a", True), ("memory://m/a", True), ("abc://x/y", False), ("..", False), ("", False)],
)
def test_which_ids_are_places(url, good):
    assert StorageWriter.validate_checkpoint_id(url) is good
    assert StorageReader.validate_checkpoint_id(url) is good


def test_a_writer_goes_to_another_process_before_and_after_a_save(tmp_path):
    writer = StorageWriter(str(tmp_path / "a"))
    for _ in range(2):
        again = pickle.loads(pickle.dumps(writer))
        assert again.url == writer.url
        assert copy.copy(again).url == writer.url
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        writer.reset(tmp_path / "b")


def test_an_asynchronous_save_keeps_the_state_of_the_call(tmp_path):
    state = trained()
    before = copy.deepcopy(state)
    future = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "v"), no_dist=True)
    future = getattr(future, "upload_completion", future)
    for value in state["model"].values():
        value.fill_(0)
    future.result()
    assert same(everything(tmp_path / "v"), before)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_an_asynchronous_save_with_a_stager_of_its_own(ahead, shared, tmp_path):
    if not hasattr(staging, "StagingOptions"):
        pytest.skip(f"torch {torch.__version__} has no such stager")
    stager = staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=shared,
            use_async_staging=ahead,
            use_non_blocking_copy=False,
        )
    )
    state = {"a": torch.arange(5.0), "b": {"n": 1, "none": None}}
    writer = StorageWriter(tmp_path / "v")
    told = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    assert ahead == hasattr(told, "staging_completion")
    if ahead:
        told.staging_completion.result()
    state["a"].fill_(0)
    metadata = getattr(told, "upload_completion", told).result()
    assert metadata.storage_meta.save_id == writer.save_id
    assert same(everything(tmp_path / "v"), {"a": torch.arange(5.0), "b": {"n": 1, "none": None}})
    stager.close()


def test_a_cached_plan_saves_again_and_after_a_failure(tmp_path):
    class Cached(DefaultSavePlanner):
        """Under a name of its own, since DCP keeps plans by the name of the class."""

    def planner():
        return Cached(enable_plan_caching=True)

    def kept():
        return [d for d in vars(DefaultSavePlanner.__mro__[1]).values() if isinstance(d, dict)]

    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip(f"torch {torch.__version__} caches no plans")
    try:
        for step in (1, 2, 3):
            state = {"a": torch.full((3,), float(step)), "n": step}
            save(state, tmp_path / f"version_{step}", planner())
            assert same(everything(tmp_path / f"version_{step}"), state)
        with pytest.raises(CheckpointException):
            save(state, tmp_path / "version_3", planner())
        save(state, tmp_path / "version_4", planner())
        more = {**state, "more": torch.ones(2)}
        save(more, tmp_path / "version_5", planner())
        assert same(everything(tmp_path / "version_5"), more)
    finally:
        for cache in kept():
            cache.pop("Cached", None)


def test_a_store_error_says_what_to_do():
    with pytest.raises(StoreError, match="Unsupported kind of store"):
        StorageReader("abc://x/y").read_metadata()
    assert not isinstance(BytesStorageMetadata(), TensorStorageMetadata)
