"""Folders of torch.distributed.checkpoint: from PyTorch, from many ranks, and invalid ones."""

import io
import os
import pickle
import pickletools
import resource
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import limpet
from limpet.convert.import_ import read_foreign_checkpoint
from limpet.errors import FormatError, LimpetError, NotFound, Unsupported
from limpet.layout.shard_layout import leaf_boxes_from_index
from limpet.loading.snapshot import Snapshot
from tests.convert.checkpoints import (
    MaliciousPickle,
    import_and_load,
    import_checkpoint,
    write_dcp_as_ranks,
    write_dcp_folder,
)
from tests.ranks.world import run_ranks
from tests.states import TORCH_DTYPES, assert_same, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def dcp_save(state, folder, **options):
    """Save with PyTorch in this process only."""
    dcp.save(state, checkpoint_id=str(folder), no_dist=True, **options)


def saved_bytes(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_one_process(tmp_path):
    state = {
        "model": {str(d): random_tensor(d, (3, 5), i) for i, d in enumerate(TORCH_DTYPES)},
        "strided": random_tensor(torch.float32, (8, 6))[::2, 1::2],
        "transposed": random_tensor(torch.float32, (4, 6)).T,
        "expanded": torch.ones(1).expand(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "list": [torch.ones(2), {"a": 1, "b": [2, 3]}],
        "values": [1, 2.5, None, "ü", (1, (2,)), {3}],
        "global_step": 40,
    }
    dcp_save(state, tmp_path / "x")
    read = read_foreign_checkpoint(str(tmp_path / "x"))
    assert (read.kind, read.mapped, read.step) == ("dcp", True, 40)
    assert_same(state, import_and_load(tmp_path / "x"))


@pytest.mark.filterwarnings("ignore")
def test_unflattened_names(tmp_path):
    state = {"layers.0.w": torch.ones(2), "layers.0.b": torch.zeros(1)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(state, tmp_path / "x", planner=planner)
    assert_same({"model": state}, import_and_load(tmp_path / "x"))


def numbered(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((3,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((3,), [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(1), Shard(1)]),
    ],
    ids=str,
)
def test_tensors_sharded_over_ranks_become_boxes(tmp_path, mesh, placements):
    full_tensors = {"even": numbered(12, 6), "uneven": numbered(5, 7), "few": numbered(2, 2)}

    def make_state(rank):
        device_mesh = init_device_mesh("cpu", mesh)
        sharded = {
            k: distribute_tensor(v, device_mesh, placements, src_data_rank=None)
            for k, v in full_tensors.items()
        }
        return {"model": sharded, "step": 9}

    write_dcp_as_ranks(tmp_path / "x", int(np.prod(mesh)), make_state)
    imported = import_checkpoint(tmp_path / "x")
    assert imported.verify().ok
    assert_same({"model": full_tensors, "step": 9}, limpet.load(imported.url))
    is_sharded = Shard(0) in placements or Shard(1) in placements
    boxes = [h for index in imported.indexes() for h in leaf_boxes_from_index(index)[0]]
    assert (len(boxes) > 3) == is_sharded  # boxes are never merged
    assert Snapshot(imported)["model/uneven"][3:5].tolist() == full_tensors["uneven"][3:5].tolist()


def save_with_fsdp(rank, port, folder):
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    names = ("model", "optimizer")
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(names, parts, strict=True)), checkpoint_id=folder / "step_3")
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(dict(zip(names, full, strict=True)), folder / "full.pt")
    (folder / f"{rank}.json").write_text("null")
    dist.destroy_process_group()


def sort_dicts(value):
    """Return the value with all dicts sorted, because DCP keeps no order."""
    if isinstance(value, dict):
        return {k: sort_dicts(value[k]) for k in sorted(value)}
    return [sort_dicts(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_a_folder_saved_with_fsdp_on_two_ranks(tmp_path):
    run_ranks(save_with_fsdp, tmp_path, exit_codes=(0, 0))
    assert read_foreign_checkpoint(str(tmp_path / "step_3")).step == 3
    imported = import_checkpoint(tmp_path / "step_3")
    full = import_checkpoint(tmp_path / "full.pt")
    assert_same(sort_dicts(limpet.load(full.url)), sort_dicts(limpet.load(imported.url)))
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    limpet.load(imported.url, into={"model": model, "optimizer": optimizer})
    assert torch.equal(model[0].weight, limpet.load(full.url)["model"]["0.weight"])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.fixture
def canary(tmp_path):
    """Return the path of a file that must not exist after the test."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def write_valid_folder(folder):
    """Write a small folder with a tensor in two parts, one in one part, and a value."""
    w = numbered(4, 3)
    write_dcp_folder(
        folder,
        {
            "w": ((4, 3), torch.float32, [((0, 0), w[:2]), ((2, 0), w[2:])]),
            "b": ((2,), torch.int64, [((0,), torch.tensor([1, 2]))]),
        },
        {"n": saved_bytes({"x": 7})},
    )
    return {"w": w, "b": torch.tensor([1, 2]), "n": {"x": 7}}


def check_rejected(folder, *texts):
    with pytest.raises(Unsupported) as e:
        read_foreign_checkpoint(str(folder))
    for expected in ("was run", "If you trust", *texts):
        assert expected in str(e.value)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_metadata_that_would_run_code(tmp_path, canary, protocol):
    write_valid_folder(tmp_path / "x")
    malicious = pickle.dumps(MaliciousPickle(canary), protocol=protocol)
    (tmp_path / "x" / ".metadata").write_bytes(malicious)
    check_rejected(tmp_path / "x", ".metadata refers to posix.system")


@pytest.mark.parametrize(
    "name",
    [
        "builtins.eval",
        "builtins.getattr",
        "os.system",
        "torch.load",
        "torch.distributed.checkpoint.filesystem.FileSystem",
        "torch.distributed.checkpoint.metadata.os",
        "torch.serialization._get_layout.__globals__",
        "torch.storage._load_from_bytes",
        "collections.OrderedDict.__reduce__",
    ],
)
def test_only_globals_that_dcp_writes_are_permitted(tmp_path, name):
    write_valid_folder(tmp_path / "x")
    module, _, attribute = name.rpartition(".")
    if module.endswith("_get_layout"):
        module, attribute = "torch.serialization", "_get_layout.__globals__"
    short = b"\x8c" + bytes([len(module)]) + module.encode()
    short += b"\x8c" + bytes([len(attribute)]) + attribute.encode()
    (tmp_path / "x" / ".metadata").write_bytes(b"\x80\x04" + short + b"\x93.")
    check_rejected(tmp_path / "x", name)


def test_a_value_that_would_run_code(tmp_path, canary):
    write_dcp_folder(tmp_path / "x", {}, {"n": saved_bytes(MaliciousPickle(canary))})
    check_rejected(tmp_path / "x", "(n)", "posix.system")


def test_a_part_that_would_run_code(tmp_path, canary):
    """The malicious pickle is in the zip file of the part."""
    parts = [((0,), torch.ones(2))]
    state = {"w": MaliciousPickle(canary)}
    write_dcp_folder(tmp_path / "y", {"w": ((2,), torch.float32, parts)})
    metadata = pickle.loads((tmp_path / "y" / ".metadata").read_bytes())
    data = saved_bytes(state)
    (tmp_path / "y" / "__0_0.distcp").write_bytes(data)
    info = metadata.storage_data[MetadataIndex("w", (0,))]
    info.offset, info.length = 0, len(data)
    (tmp_path / "y" / ".metadata").write_bytes(pickle.dumps(metadata))
    check_rejected(tmp_path / "y", "(w)", "posix.system")


def test_a_pickle_cannot_change_later_imports(tmp_path):
    """A pickle that sets attributes of a class affects only its own import."""
    state = write_valid_folder(tmp_path / "x")
    raw = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}U\x0c__setstate__ctorch\nSize\ns\x86b."
    )
    pickletools.dis(raw, io.StringIO())
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / ".metadata").write_bytes(raw)
    with pytest.raises(FormatError):
        read_foreign_checkpoint(str(tmp_path / "y"))
    assert_same(state, import_and_load(tmp_path / "x"))


def edit_metadata(folder, edit):
    """Edit the metadata of a folder with ``edit``, and write it again."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))


def info(metadata, name, offset=None):
    return metadata.storage_data[MetadataIndex(name, offset)]


def chunk(metadata, at):
    return metadata.state_dict_metadata["w"].chunks[at]


INVALID_EDITS = {
    "no storage info": lambda m: m.storage_data.pop(MetadataIndex("b", (0,))),
    "no storage info for a value": lambda m: m.storage_data.pop(MetadataIndex("n")),
    "no storage infos": lambda m: setattr(m, "storage_data", None),
    "no names": lambda m: setattr(m, "state_dict_metadata", [1]),
    "another file": lambda m: setattr(info(m, "b", (0,)), "relative_path", "other.distcp"),
    "a file elsewhere": lambda m: setattr(info(m, "b", (0,)), "relative_path", "../x/__0_0.distcp"),
    "an absolute file": lambda m: setattr(info(m, "b", (0,)), "relative_path", "/etc/passwd"),
    "no file": lambda m: setattr(info(m, "b", (0,)), "relative_path", ""),
    "a number for a file": lambda m: setattr(info(m, "b", (0,)), "relative_path", 3),
    "too far": lambda m: setattr(info(m, "b", (0,)), "offset", 1 << 40),
    "before": lambda m: setattr(info(m, "b", (0,)), "offset", -1),
    "too long": lambda m: setattr(info(m, "b", (0,)), "length", 1 << 62),
    "short": lambda m: setattr(info(m, "b", (0,)), "length", 100),
    "empty": lambda m: setattr(info(m, "b", (0,)), "length", 0),
    "text": lambda m: setattr(info(m, "b", (0,)), "offset", "0"),
    "another storage info": lambda m: vars(info(m, "w", (0, 0))).update(vars(info(m, "b", (0,)))),
    "a gap": lambda m: setattr(chunk(m, 1), "offsets", torch.Size([3, 0])),
    "an overlap": lambda m: setattr(chunk(m, 1), "offsets", torch.Size([1, 0])),
    "a missing part": lambda m: m.state_dict_metadata["w"].chunks.pop(),
    "no parts": lambda m: m.state_dict_metadata["w"].chunks.clear(),
    "a larger part": lambda m: setattr(chunk(m, 1), "sizes", torch.Size([3, 3])),
    "a flat part": lambda m: setattr(chunk(m, 1), "sizes", torch.Size([2])),
    "a larger tensor": lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([5, 3])),
    "an overflowing tensor": lambda m: setattr(
        m.state_dict_metadata["w"], "size", torch.Size([1 << 62, 1 << 62])
    ),
    "another dtype": lambda m: setattr(
        m.state_dict_metadata["w"].properties, "dtype", torch.float64
    ),
    "no dtype": lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", None),
    "a tensor for a value": lambda m: m.state_dict_metadata.update(
        w=m.state_dict_metadata["n"], n=m.state_dict_metadata["w"]
    ),
    "an invalid path": lambda m: setattr(m, "planner_data", {"w": "w"}),
    "an empty path": lambda m: setattr(m, "planner_data", {"w": ()}),
    "a path of lists": lambda m: setattr(m, "planner_data", {"w": ([],)}),
    "a path within a value": lambda m: setattr(m, "planner_data", {"w": ("b", "c"), "b": ("b",)}),
    "the path of another": lambda m: setattr(m, "planner_data", {"w": ("b",)}),
    "a long path": lambda m: setattr(m, "planner_data", {"w": ("x",) * 999}),
    "a list and a dict": lambda m: setattr(m, "planner_data", {"w": ("x", 0), "b": ("x", "y")}),
    "a list at the top": lambda m: setattr(
        m, "planner_data", {"w": (0,), "b": (1,), "n": (2,)}
    ),
    "a huge list": lambda m: setattr(m, "planner_data", {"w": ("x", 1 << 50)}),
    "a negative index": lambda m: setattr(m, "planner_data", {"w": ("x", -1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID_EDITS)
def test_invalid_metadata_is_rejected(tmp_path, name):
    write_valid_folder(tmp_path / "x")
    edit_metadata(tmp_path / "x", INVALID_EDITS[name])
    with pytest.raises((FormatError, Unsupported)) as e:
        read_foreign_checkpoint(str(tmp_path / "x"))
    assert isinstance(e.value, FormatError) or name == "a tensor for a value"
    assert ("the end of the file" in str(e.value)) == (name in ("too far", "too long"))


def test_transformed_data_is_rejected(tmp_path):
    write_valid_folder(tmp_path / "x")
    edit_metadata(
        tmp_path / "x", lambda m: setattr(info(m, "b", (0,)), "transform_descriptors", ["zstd"])
    )
    with pytest.raises(Unsupported, match=r"b was transformed.*zstd"):
        read_foreign_checkpoint(str(tmp_path / "x"))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_truncated_files(tmp_path, file):
    write_valid_folder(tmp_path / "x")
    path = tmp_path / "x" / file
    raw = path.read_bytes()
    for length in [*range(0, len(raw), 61), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises((FormatError, Unsupported)):
            read_foreign_checkpoint(str(tmp_path / "x"))


@pytest.mark.slow
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_flipped_bits(tmp_path, file):
    """A flipped bit is detected or has no effect. The weights are never wrong.

    In the metadata, which has no digest, it may change the structure of the state.
    """
    state = write_valid_folder(tmp_path / "x")
    path = tmp_path / "x" / file
    raw = path.read_bytes()
    step = 1 if file == ".metadata" else 23
    for at in range(0, len(raw), step):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            found = import_and_load(tmp_path / "x")
        except LimpetError:
            continue
        if file != ".metadata":
            assert_same(state, found)
        elif "w" in found:
            assert_same(state["w"], found["w"])


def test_a_missing_file(tmp_path):
    write_valid_folder(tmp_path / "x")
    os.remove(tmp_path / "x" / "__0_0.distcp")
    with pytest.raises(
        FormatError, match=r"the file __0_0\.distcp in the same folder, found no such file"
    ):
        read_foreign_checkpoint(str(tmp_path / "x"))
    os.remove(tmp_path / "x" / ".metadata")
    with pytest.raises(Unsupported, match="an empty folder"):
        read_foreign_checkpoint(str(tmp_path / "x"))
    os.symlink("nowhere", tmp_path / "x" / ".metadata")
    with pytest.raises(NotFound):
        read_foreign_checkpoint(str(tmp_path / "x"))


def test_a_tensor_beyond_its_storage(tmp_path):
    """The pickle of a part gives a larger size than its storage has."""
    write_dcp_folder(
        tmp_path / "x", {"w": ((200,), torch.uint8, [((0,), torch.ones(200, dtype=torch.uint8))])}
    )
    edit_metadata(
        tmp_path / "x", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([201]))
    )
    edit_metadata(
        tmp_path / "x",
        lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([201])),
    )
    file = tmp_path / "x" / "__0_0.distcp"
    raw = file.read_bytes()
    changed = raw.replace(b"K\x00K\xc8\x85", b"K\x00K\xc9\x85")
    assert changed != raw
    file.write_bytes(without_crcs(raw, changed))
    with pytest.raises(FormatError, match="uint8"):
        read_foreign_checkpoint(str(tmp_path / "x"))


def without_crcs(raw, changed):
    """Return ``changed`` without the CRCs of the zip file ``raw``, so that they detect nothing."""
    for entry in zipfile.ZipFile(io.BytesIO(raw)).infolist():
        changed = changed.replace(entry.CRC.to_bytes(4, "little"), bytes(4))
    return changed


def test_metadata_of_old_pytorch_versions(tmp_path):
    """Before version 2.2, PyTorch pickled the properties of a tensor from another module."""
    state = write_valid_folder(tmp_path / "x")
    file = tmp_path / "x" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    raw = pickle.dumps(metadata, protocol=2)
    for name in (b"TensorProperties", b"_MEM_FORMAT_ENCODING"):
        new = b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n"
        assert new in raw
        old = b"ctorch.distributed._shard.sharded_tensor.metadata\n" + name.lstrip(b"_") + b"\n"
        raw = raw.replace(new, old)
    file.write_bytes(raw)
    assert_same(state, import_and_load(tmp_path / "x"))


@pytest.mark.filterwarnings("ignore")
def test_more_files_than_the_limit_of_open_files(tmp_path):
    """A memory mapping keeps no file open, so folders of thousands of ranks can be imported."""
    state = {"m": {str(i): torch.ones(1) for i in range(100)}}
    writer = dcp.FileSystemWriter(str(tmp_path / "x"), single_file_per_rank=False)
    dcp_save(state, tmp_path / "x", storage_writer=writer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, hard))
    try:
        assert len(import_and_load(tmp_path / "x")["m"]) == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
