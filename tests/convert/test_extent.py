"""Files that claim far more than they contain are refused in time and memory that are proportional
to their length. Shared values and expanded tensors of reasonable size are imported exactly."""

import copy
import io
import pickle
import signal
import zipfile
from collections import OrderedDict
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from limpet.convert.import_ import read_foreign_checkpoint
from limpet.convert.mmap_files import MappedFile, read_zip_records
from limpet.convert.read_dcp import unflatten
from limpet.errors import FormatError, LimpetError, Unsupported
from limpet.format.tree import MAX_DEPTH
from tests.convert.checkpoints import import_and_load
from tests.memory_peak import print_peak_memory
from tests.states import assert_same


@pytest.fixture(autouse=True)
def limited_time():
    """Interrupt a test after 60 seconds: without limits, an import would take minutes to years."""

    def interrupt(*_):
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def peak_memory(call):
    """Return by how many bytes the memory grows at most during a call."""
    out = io.StringIO()
    with redirect_stdout(out), print_peak_memory():
        call()
    return int(out.getvalue())


def doubled(make, levels=60):
    value = make([1, 2])
    for _ in range(levels):
        value = make([value, value])
    return value


def shared_dicts(width=300, levels=3):
    value = {i: i for i in range(width)}
    for _ in range(levels):
        value = dict.fromkeys(map(str, range(width)), value)
    return value


def own_cycle():
    value: list = []
    value += [value, value]
    return value


def cycle_of_two():
    a: dict = {}
    a["b"] = [a, a]
    return a


def deep(n):
    value: list = []
    for _ in range(n):
        value = [value]
    return value


def views(n=400):
    base = torch.zeros(1 << 20)
    return [base[i:] for i in range(n)]


BOMBS = {
    "lists": lambda: doubled(list),
    "tuples": lambda: doubled(tuple),
    "dicts": shared_dicts,
    "ordered dicts": lambda: doubled(lambda v: OrderedDict(enumerate(v))),
    "itself": own_cycle,
    "each other": cycle_of_two,
    "deep": lambda: deep(MAX_DEPTH + 1),
    "text": lambda: [["x" * 100_000] * 1000] * 100,
    "bytes": lambda: [[bytearray(100_000)] * 1000] * 100,
    "integer": lambda: [[1 << 800_000] * 1000] * 100,
    "stride 0": lambda: torch.zeros(1).expand(1 << 31),
    "stride 0 in one dimension": lambda: torch.zeros(100).expand(1 << 24, 100),
    "windows": lambda: torch.zeros(1 << 15).as_strided((1 << 14, 1 << 14), (1, 1)),
    "views": views,
    "sparse": lambda: torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 24),
        torch.zeros(1).expand(1 << 24),
        (9,),
    ),
    "conjugate": lambda: torch.zeros(1, dtype=torch.complex64).conj().expand(1 << 30),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_expands_to_far_more_than_it_contains_is_refused(name, zipped, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": BOMBS[name]()}, path, _use_new_zipfile_serialization=zipped)

    def load():
        with pytest.raises(Unsupported):
            import_and_load(path)

    assert peak_memory(load) < 200 << 20


SHARED = {
    "list": lambda: {"a": (one := [1, [2.5, "x"]]), "b": [one, one, {"c": one}]},
    "tensor": lambda: [t := torch.arange(4.0), t, {"t": t}],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 1000),
    "scalar": lambda: torch.tensor(2.0).expand(1 << 20),
    "views": lambda: [torch.arange(100.0)[i:] for i in range(100)],
    "windows": lambda: torch.arange(50.0).unfold(0, 8, 1),
    "wide": lambda: [[0] * 100] * 1000,
    "deep": lambda: deep(MAX_DEPTH - 3),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_values_of_reasonable_size_are_imported_exactly(name, zipped, tmp_path):
    value = {"x": SHARED[name](), "n": {"m": 1}}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert_same(copy.deepcopy(value), import_and_load(tmp_path / "x.pt"))


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    for depth in (3 * MAX_DEPTH, 100_000):
        with zipfile.ZipFile(path, "w") as opened:
            lists = b"]" * depth + b"a" * (depth - 1)
            opened.writestr("x/data.pkl", b"\x80\x02" + lists + b".")
            opened.writestr("x/version", "3\n")
            opened.writestr("x/byteorder", "little")
        with pytest.raises(Unsupported, match="nested deeper than 200 levels"):
            read_foreign_checkpoint(str(path))


def rewrite_directory(path, change):
    """Write the zip file again with other entries in its directory."""
    with zipfile.ZipFile(path, "a") as opened:
        change(opened.filelist, opened.NameToInfo)
        opened._didModify = True


@pytest.mark.parametrize("case", ["same", "nested", "name"])
def test_records_that_overlap_are_refused(case, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(1000.0)}, path)

    def change(entries, _):
        data = next(e for e in entries if e.filename.endswith("data/0"))
        for i in range(1 if case == "name" else 500):
            entry = copy.copy(data)
            if case != "name":
                entry.filename = f"x/data/{i + 1}"
            if case == "nested":
                entry.header_offset = entries[0].header_offset
                entry.file_size = entry.compress_size = data.file_size + 500
            entries.append(entry)

    rewrite_directory(path, change)
    with pytest.raises(FormatError, match=r"records that do not overlap"):
        read_foreign_checkpoint(str(path))


def test_two_records_of_one_name_are_refused(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "x", "w") as opened,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        for content in ("abc", "def"):
            opened.writestr("x/data.pkl", content)
    with pytest.raises(FormatError, match="one record of each name"):
        read_zip_records(MappedFile(str(tmp_path / "x")))


def save_dcp(folder, state):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def edit_metadata(folder, change):
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def copy_entry(metadata, name, copies):
    """Add names whose values are the same bytes of the same file."""
    index = next(i for i in metadata.storage_data if i.fqn == name)
    for i in range(copies):
        other = f"{name}{i}"
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
        metadata.storage_data[type(index)(other, index.offset)] = metadata.storage_data[index]


@pytest.mark.parametrize("name", ["tensor", "object"])
def test_values_of_dcp_that_share_their_bytes_are_bounded(name, tmp_path):
    state = {"tensor": torch.zeros(1 << 20), "object": {"b": bytes(1 << 20)}["b"]}
    save_dcp(tmp_path, state)
    edit_metadata(tmp_path, lambda m: copy_entry(m, name, 200))
    assert peak_memory(lambda: check_dcp_refused(tmp_path)) < 200 << 20


def check_dcp_refused(folder):
    with pytest.raises((Unsupported, FormatError)):
        import_and_load(folder)


def test_some_values_of_dcp_may_share_their_bytes(tmp_path):
    save_dcp(tmp_path, {"tensor": torch.arange(100.0), "object": "x" * 100})
    edit_metadata(tmp_path, lambda m: (copy_entry(m, "tensor", 5), copy_entry(m, "object", 5)))
    loaded = import_and_load(tmp_path)
    assert torch.equal(loaded["tensor4"], torch.arange(100.0))
    assert loaded["object4"] == "x" * 100


def test_metadata_of_dcp_with_shared_lists_is_bounded(tmp_path):
    save_dcp(tmp_path, {f"t{i}": torch.zeros(2) for i in range(300)})

    def share_chunks(metadata):
        chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))] * 3000
        for tensor in metadata.state_dict_metadata.values():
            tensor.chunks = chunks

    edit_metadata(tmp_path, share_chunks)
    with pytest.raises(FormatError, match="tensors that share parts"):
        read_foreign_checkpoint(str(tmp_path))

    def long_shape(metadata):
        for tensor in metadata.state_dict_metadata.values():
            tensor.size = torch.Size([1] * 70)

    edit_metadata(tmp_path, long_shape)
    with pytest.raises(FormatError, match="at most 64 dimensions"):
        read_foreign_checkpoint(str(tmp_path))


def test_an_expanded_tensor_in_a_file_of_dcp_is_bounded(tmp_path):
    """The metadata and the pickle both claim 8 GiB."""
    save_dcp(tmp_path, {"x": torch.zeros(4)})

    def enlarge(metadata):
        tensor = metadata.state_dict_metadata["x"]
        tensor.size = torch.Size([1 << 31])
        tensor.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1 << 31]))]

    edit_metadata(tmp_path, enlarge)
    with pytest.raises(Unsupported, match="far more than it contains"):
        read_foreign_checkpoint(str(tmp_path))


def test_list_positions_without_a_value_are_bounded():
    def error(expected, found):
        return LimpetError("invalid", expected=expected, found=found)

    values = {f"v{i}": i for i in range(50)}
    sparse = {name: (f"list{i}", 1 << 19) for i, name in enumerate(values)}
    with pytest.raises(LimpetError, match="positions in a list"):
        unflatten(values, sparse, 1000, error)
    few = unflatten(values, {name: ("l", 3 * i) for i, name in enumerate(values)}, 0, error)
    assert few["l"][:5] == [0, None, None, 1, None]


def test_a_file_that_claims_a_storage_it_does_not_contain_is_refused(tmp_path):
    """In the old format, a storage that no data follows is uninitialized memory."""
    path = tmp_path / "x.pt"
    torch.save({"x": torch.zeros(1000)}, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    position = raw.rindex(b"\x80\x02]q")  # the list of storages, which is the last pickle
    path.write_bytes(raw[:position] + pickle.dumps([], 2))
    with pytest.raises((Unsupported, FormatError)):
        read_foreign_checkpoint(str(path))
