"""Imports of other libraries' checkpoints are exact or raise. No code in them is run."""

import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import limpet
from limpet.convert.import_ import read_foreign_checkpoint
from limpet.convert.mmap_files import MappedFile, read_zip_records
from limpet.errors import FormatError, LimpetError, NotFound, Unsupported
from tests.convert.checkpoints import MaliciousPickle, import_and_load, import_checkpoint
from tests.memory_peak import numbers_of
from tests.states import TORCH_DTYPES, assert_same, random_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def state_of_all_kinds(zipped=True):
    """Return a state with all kinds of values. The old format of torch.save lacks newer dtypes."""
    dtypes = [
        d
        for d in TORCH_DTYPES
        if zipped or not re.search("uint(16|32|64)|float[48]|complex32", str(d))
    ]
    plain = {str(d): random_tensor(d, (3, 5), i) for i, d in enumerate(dtypes)}
    return {
        "plain": plain,
        "strided": random_tensor(torch.float32, (8, 6))[::2, 1::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(3).to_sparse(),
        "values": [1, 2.5, float("nan"), None, True, "ü", b"raw", 1 << 80, (1, (2,)), 1j, {3, 4}],
        "ordered": OrderedDict(b=1, a=[{}]),
        7: "an integer key",
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_torch_save_file(tmp_path, zipped):
    state = state_of_all_kinds(zipped)
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=zipped)
    read = read_foreign_checkpoint(str(tmp_path / "x"))
    assert (read.kind, read.mapped, read.step) == ("torch", zipped, None)
    assert_same(state, import_and_load(tmp_path / "x"))


@pytest.mark.parametrize("name", ["x.safetensors", "x.bin", ".metadata", "shard-1"])
def test_the_file_name_does_not_matter(tmp_path, name):
    torch.save({"a": torch.arange(3)}, tmp_path / "plain")
    (tmp_path / "plain").rename(tmp_path / name)
    assert_same({"model": {"a": torch.arange(3)}}, import_and_load(tmp_path / name))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_tied_tensors_stay_tied(tmp_path, zipped):
    a = torch.arange(1000.0)
    state = {"model": {"a": a, "b": a, "view": a[10:20], "other": a.clone()}}
    torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=zipped)
    imported = import_checkpoint(tmp_path / "x")
    assert sorted(imported.leaves) == ["model/a", "model/other", "model/view"]
    loaded = limpet.load(imported.url)
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["b"].data_ptr()
    assert_same(state, loaded)


def test_the_source_is_recorded(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    imported = import_checkpoint(tmp_path / "x.pt", step=12)
    assert imported.step == 12
    assert imported.metadata["reason"] == "import"
    note = imported.metadata["note"]["imported_from"]
    assert note == {"path": str(tmp_path / "x.pt"), "kind": "torch"}
    assert imported.verify().ok


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_truncated_file(tmp_path, zipped):
    torch.save({"a": torch.arange(1000)}, tmp_path / "x", _use_new_zipfile_serialization=zipped)
    raw = (tmp_path / "x").read_bytes()
    for length in [*range(0, 60, 7), *(len(raw) * n // 10 for n in (3, 6, 9)), len(raw) - 1]:
        (tmp_path / "x").write_bytes(raw[:length])
        with pytest.raises((FormatError, Unsupported)):
            read_foreign_checkpoint(str(tmp_path / "x"))


@pytest.mark.slow
def test_every_flipped_bit_of_the_data_is_detected(tmp_path):
    """PyTorch writes CRCs but does not check them, so it would not detect a flipped bit."""
    state = {"a": torch.arange(50.0), "n": 3}
    torch.save(state, tmp_path / "x")
    raw = (tmp_path / "x").read_bytes()
    with zipfile.ZipFile(tmp_path / "x") as opened:
        entry = next(i for i in opened.infolist() if i.filename.endswith("data/0"))
    begin = raw.index(struct.pack("<50f", *range(50)), entry.header_offset)
    for at in [*range(begin, begin + 200), *range(0, len(raw), 5)]:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        (tmp_path / "x").write_bytes(flipped)
        try:
            found = read_foreign_checkpoint(str(tmp_path / "x")).value
        except (FormatError, Unsupported):
            continue
        assert not begin <= at < begin + 200
        assert_same(state, found)


def test_a_file_without_crcs_is_accepted(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3)}, tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same({"model": {"a": torch.arange(3)}}, import_and_load(tmp_path / "x"))


def test_a_tensor_beyond_its_storage_is_rejected(tmp_path):
    """PyTorch checks the sizes in the pickle. Its error is reported as damage."""
    torch.save({"a": torch.arange(1000.0)}, tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as opened:
        records = {i.filename: opened.read(i) for i in opened.infolist()}
    with zipfile.ZipFile(tmp_path / "wrong_size", "w") as opened:
        for name, data in records.items():
            opened.writestr(name, data.replace(b"K\x00M\xe8\x03\x85", b"K\x00M\xe9\x03\x85"))
    with pytest.raises(FormatError, match="resize storage"):
        read_foreign_checkpoint(str(tmp_path / "wrong_size"))
    with zipfile.ZipFile(tmp_path / "small", "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in records.items():
            opened.writestr(name, data)
    with pytest.raises(Unsupported, match="compressed"):
        read_foreign_checkpoint(str(tmp_path / "small"))


def test_a_record_cannot_extend_into_the_next(tmp_path):
    """The record has no CRC, and the directory gives it a larger size."""
    with zipfile.ZipFile(tmp_path / "x", "w") as opened:
        opened.writestr("x/data.pkl", "abc")
        crc = struct.pack("<L", opened.infolist()[0].CRC)
    raw = (tmp_path / "x").read_bytes().replace(crc, bytes(4))
    (tmp_path / "y").write_bytes(raw + raw)
    assert read_zip_records(MappedFile(str(tmp_path / "y")), 0, len(raw))["data.pkl"].stop == 43
    longer = raw.replace(struct.pack("<LL", 3, 3), struct.pack("<LL", 999, 999))
    (tmp_path / "y").write_bytes(longer + longer + bytes(999))
    with pytest.raises(FormatError, match="up to byte"):
        read_zip_records(MappedFile(str(tmp_path / "y")), 0, len(longer))


@pytest.fixture
def canary(tmp_path):
    """Return the path of a file that must not exist after the test."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def check_rejected(path, *texts):
    with pytest.raises(Unsupported) as e:
        read_foreign_checkpoint(str(path))
    text = str(e.value)
    assert "\n" not in text
    for expected in ("was run", "If you trust", *texts):
        assert expected in text


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize("name", ["x.pt", "pytorch_model.bin"])
def test_a_file_that_would_run_code(tmp_path, canary, zipped, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    state = {"w": torch.ones(3), "malicious": MaliciousPickle(canary)}
    torch.save(state, folder / name, _use_new_zipfile_serialization=zipped)
    check_rejected(folder / name, "posix.system")
    if name == "pytorch_model.bin":
        check_rejected(folder, "posix.system")


def test_the_error_names_all_globals_of_the_file(tmp_path, canary):
    import argparse

    state = {
        "malicious": MaliciousPickle(canary),
        "args": argparse.Namespace(lr=1),
        "path": tmp_path,
        "module": nn.Linear(2, 2),
    }
    torch.save(state, tmp_path / "x.pt")
    named = ("posix.system", "argparse.Namespace", "pathlib.PosixPath")
    check_rejected(tmp_path / "x.pt", *named, "torch.nn.modules.linear.Linear")


def test_the_environment_cannot_permit_code(tmp_path, canary, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(MaliciousPickle(canary), tmp_path / "x.pt")
    check_rejected(tmp_path / "x.pt", "posix.system")


def test_a_bare_pickle_is_not_read(tmp_path, canary):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(MaliciousPickle(canary)))
    with pytest.raises(Unsupported, match="is not a checkpoint"):
        read_foreign_checkpoint(str(tmp_path / "x.pt"))


def lightning(**other_values):
    """Return a state as Lightning writes it."""
    model = nn.Linear(3, 2)
    return {
        "epoch": 2,
        "global_step": 34,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.ones(())}},
        "optimizer_states": [torch.optim.Adam(model.parameters()).state_dict()],
        "lr_schedulers": [],
        **other_values,
    }


def test_a_lightning_file(tmp_path, canary):
    state = lightning()
    torch.save(state, tmp_path / "last.ckpt")
    read = read_foreign_checkpoint(str(tmp_path / "last.ckpt"))
    assert (read.kind, read.step) == ("lightning", 34)
    assert_same(state, import_and_load(tmp_path / "last.ckpt"))
    torch.save(lightning(hyper_parameters=MaliciousPickle(canary)), tmp_path / "malicious.ckpt")
    check_rejected(tmp_path / "malicious.ckpt", "posix.system")


SAFE_DTYPES = [d for d in TORCH_DTYPES if d.itemsize < 16 and d != torch.complex32]
SAFE_DTYPES = [d for d in SAFE_DTYPES if "fnuz" not in str(d) and "float4" not in str(d)]


def test_a_safetensors_file(tmp_path):
    state = {str(d): random_tensor(d, (3, 5), i) for i, d in enumerate(SAFE_DTYPES)}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(state, tmp_path / "odd.name", metadata={"format": "pt"})
    read = read_foreign_checkpoint(str(tmp_path / "odd.name"))
    assert (read.kind, read.mapped, read.step) == ("safetensors", True, None)
    loaded = import_and_load(tmp_path / "odd.name")["model"]
    assert_same({k: state[k] for k in loaded}, loaded)
    assert loaded.keys() == state.keys()


def write_safe(path, header, data=b"", pad=0):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_unaligned_data(tmp_path):
    data = struct.pack("<4d3b", 1, 2, 3, 4, 5, 6, 7)
    entry = {"dtype": "F64", "shape": [2, 2], "data_offsets": [3, 35]}
    small = {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}
    for pad in range(9):
        write_safe(tmp_path / "x", {"big": entry, "small": small}, data[32:] + data[:32], pad)
        loaded = import_and_load(tmp_path / "x")["model"]
        assert loaded["big"].tolist() == [[1, 2], [3, 4]]
        assert loaded["small"].tolist() == [5, 6, 7]


def entry(dtype="F32", shape=(1,), at=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


@pytest.mark.parametrize(
    ("header", "length", "message"),
    [
        ({"a": entry()}, 3, "in full"),
        ({"a": entry()}, 5, "a file of"),
        ({"a": entry(at=(1, 5))}, 5, "from byte 0"),
        ({"a": entry(), "b": entry()}, 4, "from byte 4"),
        ({"a": entry(), "b": entry(at=(5, 9))}, 9, "from byte 4"),
        ({"a": entry(shape=(2,))}, 4, "in full"),
        ({"a": entry(shape=(-1,), at=(0, -4))}, 4, "in full"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, 4, "in full"),
        ({"a": entry(shape=(0, 1 << 62), at=(0, 0))}, 0, "in full"),
        ({"a": entry(at=(0, -4))}, 4, "in full"),
        ({"a": entry(at=(4, 0))}, 4, "from byte 0"),
        ({"a": entry() | {"unknown": 1}}, 4, "a JSON header"),
        ({"a": {"dtype": "F32"}}, 4, "a JSON header"),
        ({"a": entry(shape=(1.5,))}, 4, "a JSON header"),
        ({"a": 3}, 4, "a JSON header"),
        (b"{" + b"[" * 100_000, 0, "a JSON header"),
        (b'{"\xff": 3}', 0, "a JSON header"),
        ({"__metadata__": {"format": 3}}, 0, "a JSON header"),
    ],
)
def test_an_invalid_header_is_rejected(tmp_path, header, length, message):
    write_safe(tmp_path / "x", header, bytes(length))
    with pytest.raises(FormatError, match=message):
        read_foreign_checkpoint(str(tmp_path / "x"))


@given(st.binary(max_size=200), st.integers(0, 300))
@settings(max_examples=300)
def test_random_bytes_are_rejected(tmp_path_factory, data, size):
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(size.to_bytes(8, "little") + b'{"a":' + data)
    with pytest.raises((FormatError, Unsupported)):
        read_foreign_checkpoint(str(path))


def test_an_unknown_dtype_is_named(tmp_path):
    write_safe(tmp_path / "x", {"a": entry("F6_E2M3")}, bytes(4))
    with pytest.raises(Unsupported, match=r"dtype F6_E2M3.*found a\."):
        read_foreign_checkpoint(str(tmp_path / "x"))


@pytest.mark.parametrize(("name", "begin"), [("x", 1), ("shard-00001-model-1.safetensors", 0)])
def test_the_part_of_one_rank_is_rejected(tmp_path, name, begin):
    note = json.dumps({"a": {"saved_offsets": [begin]}})
    header = {"__metadata__": {"DCP_SHARDING_INFO": note}, "a": entry()}
    write_safe(tmp_path / name, header, bytes(4))
    with pytest.raises(Unsupported, match="parts of one rank"):
        read_foreign_checkpoint(str(tmp_path / name))
    write_safe(
        tmp_path / "complete", {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "a": entry()}, b"0000"
    )
    assert import_and_load(tmp_path / "complete")["model"]["a"].shape == (1,)


def write_model(folder, parts, kind="safetensors"):
    """Write a folder in ``parts`` files like Transformers. Return the tensors by name."""
    folder.mkdir(exist_ok=True)
    tensors = {f"layers.{i}.weight": torch.full((2, 2), float(i)) for i in range(4)}
    base = "model" if kind == "safetensors" else "pytorch_model"
    names, weight_map = list(tensors), {}
    for p in range(parts):
        file = f"{base}-{p + 1:05}-of-{parts:05}.{kind}" if parts > 1 else f"{base}.{kind}"
        own = {n: tensors[n] for n in names[p::parts]}
        weight_map |= dict.fromkeys(own, file)
        if kind == "safetensors":
            save_file(own, folder / file, metadata={"format": "pt"})
        else:
            torch.save(own, folder / file)
    if parts > 1:
        index = {"metadata": {"total_size": 64}, "weight_map": weight_map}
        (folder / f"{base}.{kind}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_hugging_face_folder(tmp_path, parts, kind):
    tensors = write_model(tmp_path, parts, kind)
    (tmp_path / "rng_state.pth").write_bytes(b"anything")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 55}')
    read = read_foreign_checkpoint(f"{tmp_path}/")
    assert (read.kind, read.step, read.mapped) == ("huggingface", 55, True)
    assert read.left_out == ("rng_state.pth",)
    loaded = import_and_load(tmp_path)["model"]
    assert loaded.keys() == tensors.keys()
    assert_same(tensors, {k: loaded[k] for k in tensors})


def test_safetensors_take_precedence_over_pickles(tmp_path, canary):
    tensors = write_model(tmp_path, 2)
    torch.save(MaliciousPickle(canary), tmp_path / "pytorch_model.bin")
    assert read_foreign_checkpoint(str(tmp_path)).left_out == ("pytorch_model.bin",)
    assert_same(tensors["layers.1.weight"], import_and_load(tmp_path)["model"]["layers.1.weight"])


def test_a_missing_part(tmp_path):
    write_model(tmp_path, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match="the part model-00002-of-00003"):
        read_foreign_checkpoint(str(tmp_path))


def test_a_part_without_an_indexed_tensor(tmp_path):
    write_model(tmp_path, 2)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(FormatError, match=r"layers\.0\.weight in model-00001"):
        read_foreign_checkpoint(str(tmp_path))


def test_tensors_missing_in_the_index_are_imported(tmp_path):
    tensors = write_model(tmp_path, 2)
    part = {"layers.0.weight": torch.ones(1), "layers.1.weight": torch.zeros(9)}
    part |= {"layers.2.weight": torch.ones(2), "other_values": torch.ones(3)}
    save_file(part, tmp_path / "model-00001-of-00002.safetensors")
    loaded = import_and_load(tmp_path)["model"]
    assert loaded["other_values"].tolist() == [1, 1, 1]
    assert_same(
        tensors["layers.1.weight"], loaded["layers.1.weight"]
    )  # the index selects one of the two


@pytest.mark.parametrize("path", ["../x.safetensors", "/x", "a/b", "", "..", "a\0b"])
def test_an_index_cannot_refer_to_other_folders(tmp_path, path):
    index = {"weight_map": {"a": path}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="files in the same folder"):
        read_foreign_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{"])
def test_an_invalid_index(tmp_path, text):
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(FormatError):
        read_foreign_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"global_step": "x"}', '{"global_step": -1}'])
def test_a_trainer_state_without_a_valid_step(tmp_path, text):
    write_model(tmp_path / "model", 1)
    (tmp_path / "model" / "trainer_state.json").write_text(text)
    assert read_foreign_checkpoint(str(tmp_path / "model")).step is None


def test_a_part_without_a_dict(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="a dict of tensors"):
        read_foreign_checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"hello")
    with pytest.raises(FormatError, match="hello"):
        read_foreign_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"), (b"hello", "begins with b'hello'"), (b"GGUF\3\0", "b'GGUF"),
        (b"\xff" * 8 + b"{", "begins with"), (b"\1" + bytes(7) + b"{", "begins with"),
    ],
)  # fmt: skip
def test_a_file_without_a_checkpoint(tmp_path, data, found):
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(Unsupported) as e:
        read_foreign_checkpoint(str(tmp_path / "x.pt"))
    for expected in (found, "torch.save", "safetensors", "Hugging Face", ".metadata"):
        assert expected in str(e.value)


def test_other_zip_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as opened:
        opened.writestr("a/b", "c")
    with pytest.raises(Unsupported, match="begins with b'PK"):
        read_foreign_checkpoint(str(tmp_path / "x.zip"))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as opened:
        for name in ("data.pkl", "constants.pkl"):
            opened.writestr(f"x/{name}", "c")
    with pytest.raises(Unsupported, match="TorchScript"):
        read_foreign_checkpoint(str(tmp_path / "x.pt"))


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(Unsupported, match="an empty folder"):
        read_foreign_checkpoint(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "consolidated.00.pth").write_text("x")
    with pytest.raises(Unsupported, match=r"found consolidated.*Import a file in it: .*00\.pth"):
        read_foreign_checkpoint(str(tmp_path))


def test_two_checkpoints_in_one_folder(tmp_path):
    write_model(tmp_path, 1)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"two checkpoints.*model\.safetensors"):
        read_foreign_checkpoint(str(tmp_path))


def test_missing_and_unusual_paths(tmp_path):
    with pytest.raises(NotFound, match="Check the path"):
        read_foreign_checkpoint(str(tmp_path / "modell.pt"))
    with pytest.raises(NotFound, match=r"nothing at memory://unused/model\.pt"):
        read_foreign_checkpoint("memory://unused/model.pt")
    (tmp_path / "dangling_link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotFound):
        read_foreign_checkpoint(str(tmp_path / "dangling_link"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unsupported, match="not a regular file"):
        read_foreign_checkpoint(str(tmp_path / "pipe"))


MEASURE_MEMORY = """
import sys
import torch
import limpet
from limpet.snapshot.location import locate
from limpet.convert.arrange import arrange_state
from limpet.convert.import_ import read_foreign_checkpoint, save_foreign_checkpoint
from limpet.state.flatten import flatten
from tests.memory_peak import print_peak_memory

torch.ones(3).sum()
limpet.save("memory://warm/version_1", {"x": torch.ones(3)})
with print_peak_memory():
    read = read_foreign_checkpoint(sys.argv[1])
    state = arrange_state(read.value, None).state
    save_foreign_checkpoint(locate(sys.argv[2]), flatten(state), read, 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_large_import_needs_little_memory(tmp_path, kind):
    if kind == "torch":
        torch.save({str(i): torch.ones(1 << 25) for i in range(4)}, tmp_path / "x")
    else:
        write_safe(tmp_path / "x", {"a": entry(shape=(1 << 27,), at=(0, 1 << 29))})
        os.truncate(tmp_path / "x", os.path.getsize(tmp_path / "x") + (1 << 29))
    [growth] = numbers_of(MEASURE_MEMORY, tmp_path / "x", tmp_path / "run" / "version_1")
    assert growth < 256 << 20


def test_a_file_larger_than_the_commit_limit(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(3)}, tmp_path / "x")

    def fail(*_, **__):
        raise RuntimeError("unable to mmap 99 bytes from file <x>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(LimpetError, match="overcommit_memory=1"):
        read_foreign_checkpoint(str(tmp_path / "x"))


@pytest.mark.parametrize("path", [io.BytesIO(), b"x.pt", None, 3])
def test_a_path_of_another_class_is_named(path, tmp_path):
    limpet.save(tmp_path / "snap", {"a": 1})
    for call in (
        lambda: limpet.import_checkpoint(path, tmp_path / "run"),
        lambda: limpet.export(tmp_path / "snap", path, to="torch"),
    ):
        with pytest.raises(limpet.errors.LimpetError, match="path must be a path or a URL, not"):
            call()
