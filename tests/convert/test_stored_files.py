"""Imports from a store: what is fetched, how often, and what a failure leaves."""

import io
import json
import os
import threading
import uuid
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as to_safetensors

import limpet
from limpet.convert.arrange import arrange_state
from limpet.convert.import_ import read_foreign_checkpoint, save_foreign_checkpoint
from limpet.convert.stored_files import size_of_foreign
from limpet.errors import Denied, FormatError, NoSpace, NotFound, StoreError, Unsupported
from limpet.loading.snapshot import Snapshot
from limpet.snapshot.location import Location
from limpet.state.flatten import flatten
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from tests.cli.invoke import run_cli
from tests.states import assert_same

MODEL = {
    "big": torch.arange(3 << 20, dtype=torch.float32),  # 12 MiB
    "half": torch.randn(7, 5).to(torch.bfloat16),
    "fp8": torch.randn(64).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    **{f"norm.{i}": torch.randn(33) for i in range(20)},
}


class CountingStore(MemoryStore):
    """Records the ranges that are read; ``refused`` keys raise ``Denied``."""

    def __init__(self):
        super().__init__("counting")
        self.ranges: list[tuple[str, int, int]] = []
        self.refused: tuple[str, ...] = ()
        self.lock = threading.Lock()

    def get_range(self, key, offset, length, into):
        if key.endswith(self.refused) and self.refused:
            raise Denied(f"Access to {key} was denied", key=key)
        with self.lock:
            self.ranges.append((key, offset, length))
        super().get_range(key, offset, length, into)

    def bytes_read(self, key):
        return sum(n for k, _, n in self.ranges if k == key)


def torch_bytes(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def import_from(source, to, step=1):
    checkpoint = read_foreign_checkpoint(source)
    flat = flatten(arrange_state(checkpoint.value, None).state)
    location = Location(to, f"version_{step}")
    return Snapshot(save_foreign_checkpoint(location, flat, checkpoint, step))


def temporary_files():
    """Return the temporary files of imports that this process has open."""
    opened = [os.path.join("/proc/self/fd", n) for n in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in opened if os.path.lexists(path)]
    return [link for link in links if "/temporary/" in link]


def assert_equal(loaded, expected):
    assert loaded.keys() == expected.keys()
    assert_same({name: loaded[name] for name in expected}, expected)


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return CountingStore()


def test_a_safetensors_file_is_read_once_and_not_copied(store, monkeypatch, tmp_path):
    raw = to_safetensors(MODEL)
    store.put_if_absent("models/step_7.safetensors", raw)
    monkeypatch.setattr("tempfile.TemporaryFile", None)  # a call would fail
    to = MemoryStore()
    checkpoint = read_foreign_checkpoint(Location(store, "models/step_7.safetensors"))
    assert checkpoint.step == 7
    begin = len(raw) - sum(t.nbytes for t in MODEL.values())
    assert store.bytes_read("models/step_7.safetensors") < 3 * begin
    store.ranges.clear()
    flat = flatten(arrange_state(checkpoint.value, None).state)
    snapshot = save_foreign_checkpoint(Location(to, "version_7"), flat, checkpoint, 7)
    read = [(at, at + n) for _, at, n in sorted(store.ranges)]
    assert read[0][0] == begin
    assert read[-1][1] == len(raw)
    assert all(end == start for (_, end), (start, _) in pairwise(read))
    assert_equal(limpet.load(to.at("version_7"))["model"], MODEL)
    assert snapshot.verify().ok
    imported_from = snapshot.metadata["note"]["imported_from"]
    assert imported_from == {
        "path": f"{store.url}/models/step_7.safetensors",
        "kind": "safetensors",
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])
def test_a_file_of_torch_save_is_fetched_once(store, zipped):
    state = {"model": {k: v for k, v in MODEL.items() if k != "fp8"}, "step": 5}
    raw = torch_bytes(state, _use_new_zipfile_serialization=zipped)
    store.put_if_absent("x.safetensors", raw)  # the suffix does not matter
    to = MemoryStore()
    snapshot = import_from(Location(store, "x.safetensors"), to)
    assert_same(limpet.load(to.at("version_1")), state)
    assert len(raw) <= store.bytes_read("x.safetensors") < len(raw) + 100
    assert temporary_files() == []
    assert snapshot.verify().ok


@pytest.mark.filterwarnings("ignore")
def test_a_dcp_folder(store, tmp_path):
    dcp.save(
        {"model": MODEL, "epoch": 3}, checkpoint_id=str(folder := tmp_path / "dcp"), no_dist=True
    )
    for name in os.listdir(folder):
        store.put_if_absent(f"ckpt/step_9/{name}", (folder / name).read_bytes())
    to = MemoryStore()
    checkpoint = read_foreign_checkpoint(Location(store, "ckpt/step_9"))
    assert (checkpoint.kind, checkpoint.step) == ("dcp", 9)
    snapshot = import_from(Location(store, "ckpt/step_9"), to)
    loaded = limpet.load(to.at("version_1"))
    assert_equal(loaded["model"], MODEL)
    assert loaded["epoch"] == 3
    assert snapshot.verify().ok
    assert temporary_files() == []
    [data] = [n for n in os.listdir(folder) if n.endswith(".distcp")]
    store.delete(f"ckpt/step_9/{data}")
    with pytest.raises(FormatError, match="metadata is damaged"):
        read_foreign_checkpoint(Location(store, "ckpt/step_9"))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_folder_of_parts(store, suffix):
    base = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = [n for n in MODEL if n != "fp8"]
    weight_map = {}
    for i in range(3):
        part = f"{base}-{i}.{suffix}"
        tensors = {n: MODEL[n] for n in names[i::3]}
        raw = to_safetensors(tensors) if suffix == "safetensors" else torch_bytes(tensors)
        store.put_if_absent(f"hf/checkpoint-40/{part}", raw)
        weight_map |= dict.fromkeys(tensors, part)
    index = json.dumps({"weight_map": weight_map}).encode()
    store.put_if_absent(f"hf/checkpoint-40/{base}.{suffix}.index.json", index)
    store.put_if_absent("hf/checkpoint-40/trainer_state.json", b'{"global_step": 41}')
    store.put_if_absent("hf/checkpoint-40/rng_state.pth", b"not read")
    checkpoint = read_foreign_checkpoint(Location(store, "hf/checkpoint-40"))
    assert (checkpoint.kind, checkpoint.step) == ("huggingface", 41)
    assert checkpoint.left_out == ("rng_state.pth",)
    to = MemoryStore()
    import_from(Location(store, "hf/checkpoint-40"), to)
    assert_equal(limpet.load(to.at("version_1"))["model"], {n: MODEL[n] for n in names})
    assert store.bytes_read("hf/checkpoint-40/rng_state.pth") == 0
    store.delete(f"hf/checkpoint-40/{base}-1.{suffix}")
    with pytest.raises(FormatError, match="checkpoint-40 is not complete"):
        read_foreign_checkpoint(Location(store, "hf/checkpoint-40"))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_object_that_is_replaced_during_the_import_is_not_committed(store, kind):
    def write(value):
        state = {"w": torch.full((2000,), value)}
        raw = to_safetensors(state) if kind == "safetensors" else torch_bytes(state)
        store.delete("x")
        store.put_if_absent("x", raw)

    write(1.0)
    checkpoint = read_foreign_checkpoint(Location(store, "x"))
    write(2.0)
    to = MemoryStore()
    flat = flatten(arrange_state(checkpoint.value, None).state)
    with pytest.raises(StoreError, match="counting/x was replaced while it was imported"):
        save_foreign_checkpoint(Location(to, "version_1"), flat, checkpoint, 1)
    assert limpet.Run(to).snapshots() == []


def test_a_failed_read_commits_nothing(store):
    store.put_if_absent("x", to_safetensors(MODEL))
    checkpoint = read_foreign_checkpoint(Location(store, "x"))
    flat = flatten(arrange_state(checkpoint.value, None).state)
    store.refused = ("x",)
    to = MemoryStore()
    with pytest.raises(Denied):
        save_foreign_checkpoint(Location(to, "version_1"), flat, checkpoint, 1)
    assert limpet.Run(to).snapshots() == []
    with pytest.raises(Denied):
        read_foreign_checkpoint(Location(store, "x"))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(store, monkeypatch):
    store.put_if_absent("x.pt", raw := torch_bytes({"w": torch.ones(1 << 20)}))

    class Small:
        free = 4096

    monkeypatch.setattr("limpet.convert.stored_files.shutil.disk_usage", lambda folder: Small)
    with pytest.raises(NoSpace, match="cannot be fetched") as caught:
        read_foreign_checkpoint(Location(store, "x.pt"))
    assert "TMPDIR" in str(caught.value)
    assert f"{len(raw)} bytes" in str(caught.value)
    assert store.bytes_read("x.pt") < 100
    assert temporary_files() == []


def test_a_flipped_bit_of_a_fetched_file_is_detected(store):
    raw = bytearray(torch_bytes({"w": torch.ones(1 << 18)}))
    raw[len(raw) // 2] ^= 1
    store.put_if_absent("x.pt", bytes(raw))
    with pytest.raises(FormatError, match=r"counting/x\.pt is damaged"):
        read_foreign_checkpoint(Location(store, "x.pt"))
    assert temporary_files() == []


@pytest.mark.parametrize("is_local", [True, False])
def test_paths_and_urls_of_something_else(is_local, tmp_path):
    url = str(tmp_path) if is_local else f"memory://{uuid.uuid4()}"
    limpet.save(f"{url}/run/version_3", {"w": torch.ones(2)}, step=3)
    for folder in ("run", "run/version_3"):
        with pytest.raises(Unsupported, match="already a Limpet snapshot or run") as caught:
            read_foreign_checkpoint(f"{url}/{folder}")
        assert "limpet copy" in str(caught.value)
    [shard] = [s.key for s in open_store(url).list("") if s.key.endswith(".safetensors")]
    with pytest.raises(Unsupported, match="a shard of a Limpet snapshot"):
        read_foreign_checkpoint(f"{url}/{shard}")
    with pytest.raises(NotFound, match="limpet copy"):
        read_foreign_checkpoint(f"{url}/run@3")
    with pytest.raises(NotFound, match=r"nothing at .*/nothing\.pt"):
        read_foreign_checkpoint(f"{url}/nothing.pt")


def test_a_file_url_is_a_local_path(tmp_path):
    torch.save({"model": {"w": torch.ones(3)}, "step": 4}, tmp_path / "x.pt")
    url = f"file://{tmp_path}/x.pt"
    assert size_of_foreign(url) == os.path.getsize(tmp_path / "x.pt")
    checkpoint = read_foreign_checkpoint(url)
    assert (checkpoint.path, checkpoint.step) == (str(tmp_path / "x.pt"), 4)
    assert checkpoint.stored == ()


def test_the_size_counts_what_is_fetched(store):
    store.put_if_absent("a/x.safetensors", to_safetensors(MODEL))
    store.put_if_absent("b/x.pt", b"PK\3\4" + bytes(100))
    url = f"memory://{uuid.uuid4()}"
    target = open_store(url)
    for stat in store.list(""):
        target.put_if_absent(stat.key, store.get(stat.key, 1 << 30))
    sizes = [size_of_foreign(f"{url}/{p}") for p in ("a", "b", "a/x.safetensors", "b/x.pt", "c")]
    assert sizes == [0, 104, 0, 104, 0]
    assert size_of_foreign(url) == 0


def test_a_whole_bucket_is_a_folder(tmp_path):
    url = f"memory://{uuid.uuid4()}"
    open_store(url).put_if_absent("model.safetensors", to_safetensors(MODEL))
    for place in (url, f"{url}/"):
        result = run_cli("import", place, tmp_path / place[-3:].strip("/"), "--step", "1")
        assert (result.code, result.err) == (0, "")
