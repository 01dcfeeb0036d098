"""A damaged safetensors header: every use of the data refuses it, and none reads more often."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import limpet
from limpet.convert.copy import copy_snapshot
from limpet.convert.export import _ComparingStore, prepare_export, write_files
from limpet.convert.reshard import reshard
from limpet.errors import DigestMismatch, SkippedVersion
from limpet.integrations.dcp import StorageReader
from limpet.loading import shared_read
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.snapshot.compare import compare_bytes
from limpet.snapshot.location import Location
from limpet.snapshot.reader import open_location
from limpet.storage.memory import MemoryStore
from limpet.threads import no_op
from limpet.types import BLOCK_SIZE, MIB
from tests.fakegroup import FakeGroup
from tests.forging import files_of, save_to_files, shard_key, store_of
from tests.ranks.recorded_reads import RecordingStore
from tests.snapshot.manual_shards import split_columns, write_resharded

Header = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state():
    return {
        "aa": torch.arange(6.0).view(2, 3),
        "bb": -torch.arange(6.0).view(2, 3),
        "c": torch.arange(3),
    }


def zeros():
    return {key: torch.zeros_like(value) for key, value in state().items()}


@pytest.fixture(scope="module")
def files():
    return save_to_files(state())


def with_header(files, raw):
    """Return a store with another beginning of the shard, of the same length."""
    key = shard_key(files)
    data = files[key]
    assert len(raw) == 4096
    return store_of({**files, key: raw + data[4096:]})


def open_in(store):
    return open_location(Location(store, "version_7"))


def load_on_ranks(store, least=1 << 62):
    """Load on two ranks, which share their reads if the snapshot has ``least`` bytes."""
    with FakeGroup(2) as group, patch.object(shared_read, "MIN_SHARED_BYTES", least):
        outcomes = group.outcomes(lambda rank: limpet.load(store.at("version_7"), into=zeros()))
    errors = [o for o in outcomes if isinstance(o, BaseException)]
    for error in sorted(errors, key=lambda e: not isinstance(e, DigestMismatch)):
        raise error


def read_by_dcp(store):
    try:
        dcp.load(zeros(), storage_reader=StorageReader(store.at("version_7")), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def export_all(snapshot):
    plan = prepare_export(snapshot, "memory://headers/out", "safetensors", root="/")
    location = Location(_ComparingStore(MemoryStore()), "out")
    list(write_files(snapshot, plan.files, location, no_op))


def compare(store):
    other = limpet.save(MemoryStore().at("x"), zeros())
    compare_bytes(open_in(store), reader_of(other), [(key, key) for key in state()])


USES: dict[str, Callable[[Any], object]] = {
    "load": lambda store: limpet.load(store.at("version_7")),
    "load into": lambda store: limpet.load(store.at("version_7"), into=zeros()),
    "load keys": lambda store: limpet.load(store.at("version_7"), keys="c"),
    "load on ranks": load_on_ranks,
    "shared load": lambda store: load_on_ranks(store, 0),
    "whole leaf": lambda store: Snapshot(open_in(store))["c"].read(),
    "export": lambda store: export_all(open_in(store)),
    "copy": lambda store: copy_snapshot(open_in(store), Location(MemoryStore(), "x")),
    "reshard": lambda store: reshard(open_in(store), Location(MemoryStore(), "x"), 2),
    "diff": compare,
    "DCP": read_by_dcp,
}


def edit(change):
    def apply(raw):
        header = json.loads(raw[8:])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= len(raw) - 8
        return raw[:8] + text.ljust(len(raw) - 8)

    return apply


def swap_names(header):
    header["aa"], header["bb"] = header["bb"], header["aa"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "two names": edit(swap_names),
    "a dtype": edit(lambda h: h["aa"].update(dtype="I32")),
    "a shape": edit(lambda h: h["aa"].update(shape=[3, 2])),
    "offsets": edit(lambda h: h["aa"].update(data_offsets=[0, 23])),
    "a tensor less": edit(lambda h: h.pop("c")),
    "metadata": edit(lambda h: h["__metadata__"].update(format="np")),
    "the length": lambda raw: (4080).to_bytes(8, "little") + raw[8:],
    "other padding": lambda raw: raw[:-1] + b"\n",
    "no header": lambda raw: bytes(len(raw)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_header_is_refused(files, damage, use):
    raw = files[shard_key(files)][:4096]
    store = with_header(files, DAMAGE[damage](raw))
    with pytest.raises(DigestMismatch, match="its header") as caught:
        USES[use](store)
    assert shard_key(files).endswith(caught.value.fields["file"])
    USES[use](with_header(files, raw))


@pytest.mark.slow
def test_one_bit_in_any_byte_of_the_header_is_detected(files):
    raw = files[shard_key(files)][:4096]
    live, end = zeros(), raw.rindex(b"}") + 1
    for position in [*range(end), *range(end, len(raw), 37), len(raw) - 1]:  # spaces at the end
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DigestMismatch, match="its header"):
            limpet.load(with_header(files, bytes(flipped)).at("version_7"), into=live)
    assert not any(value.any() for value in live.values())  # nothing was copied


@pytest.mark.parametrize("least", [0, 1 << 62])
def test_resume_takes_the_version_before_one_with_a_damaged_header(tmp_path, least):
    def train(rank):
        with limpet.Checkpointer(tmp_path, state(), save=limpet.EverySteps(1)) as ckpt:
            ckpt.step()
            ckpt.step()

    with FakeGroup(2) as group:
        group.run(train)
    shard = sorted((tmp_path / "version_2").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[:4096] = DAMAGE["other padding"](bytes(data[:4096]))
    shard.write_bytes(data)

    def resume(rank):
        with limpet.Checkpointer(tmp_path, zeros(), save=limpet.EverySteps(1)) as ckpt:
            snapshot = ckpt.resume()
            return snapshot and snapshot.step

    shared = patch.object(shared_read, "MIN_SHARED_BYTES", least)
    with FakeGroup(2) as group, shared, pytest.warns(SkippedVersion):
        assert group.run(resume) == [1, 1]


def shard_reads(recorded):
    reads = sorted(r[1:] for r in recorded.ranges if r[0].endswith(".safetensors"))
    recorded.ranges.clear()
    return reads


@pytest.fixture(scope="module")
def large():
    """Return a store with a shard of 3 blocks."""
    store = MemoryStore()
    limpet.save(store.at("version_7"), {"w": np.arange(5 * MIB // 4), "v": np.ones(MIB // 8)})
    return store


def test_a_full_load_reads_the_header_with_the_first_block(large):
    recorded = RecordingStore(large)
    snapshot = open_in(recorded)
    [index] = snapshot.indexes()
    first, second = (0, index.header + BLOCK_SIZE), (index.header + BLOCK_SIZE, BLOCK_SIZE)
    last = (index.header + 2 * BLOCK_SIZE, index.length - index.header - 2 * BLOCK_SIZE)
    for use in (
        lambda: load_snapshot(open_in(recorded)),
        lambda: export_all(open_in(recorded)),
        lambda: copy_snapshot(open_in(recorded), Location(MemoryStore(), "x")),
    ):
        shard_reads(recorded)
        use()
        assert shard_reads(recorded) == [first, second, last]


def test_a_failed_check_is_repeated(files):
    raw = files[shard_key(files)][:4096]
    snapshot = Snapshot(open_in(with_header(files, DAMAGE["two names"](raw))))
    for _ in range(2):
        with pytest.raises(DigestMismatch, match="its header"):
            snapshot["c"].read()


def test_a_header_longer_than_a_buffer_is_read_in_parts(monkeypatch):
    for module in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{module}.BLOCK_SIZE", 4096)
    store = MemoryStore()
    limpet.save(store.at("version_7"), {f"{i:04}": np.arange(3) for i in range(200)})
    recorded = RecordingStore(store)
    header = open_in(store).indexes()[0].header
    assert header > 2 * 4096

    def load(store):
        with monkeypatch.context() as patch:
            patch.setattr("limpet.buffers._pool", limpet.buffers.BufferPool(MIB, 8192))
            load_snapshot(open_in(store))

    load(recorded)
    parts = [r for r in shard_reads(recorded) if r[0] < header]
    assert parts == [(at, min(8192, header - at)) for at in range(0, header, 8192)]
    for position in (0, 8191, 8192, header - 1):
        damaged = {k: bytearray(v) for k, v in files_of(store).items()}
        damaged[shard_key(damaged)][position] ^= 64
        with pytest.raises(DigestMismatch, match="its header"):
            load(store_of({k: bytes(v) for k, v in damaged.items()}))


def test_boxes_that_are_assembled_in_memory_check_the_headers_too():
    store = MemoryStore()
    original = limpet.save(MemoryStore().at("x"), {"w": np.arange(640.0).reshape(20, 32)})
    write_resharded(reader_of(original), Location(store, "version_7"), split_columns(2), 2)
    files = files_of(store)
    for shard in open_in(store).manifest.shards:
        key = f"version_7/{shard.name}"
        raw = files[key]
        damaged = store_of({**files, key: DAMAGE["other padding"](raw[:4096]) + raw[4096:]})
        with pytest.raises(DigestMismatch, match=shard.name):
            export_all(open_in(damaged))


def test_only_own_shards_of_an_incremental_version_are_checked(tmp_path):
    """Version 2 has its own data and refers to version 1; version 3 has no data of its own."""
    live = {"a": torch.arange(1 << 18), "b": torch.zeros(1 << 18)}
    with limpet.Checkpointer(tmp_path, live, save=limpet.EverySteps(1), incremental=True) as ckpt:
        ckpt.step()
        live["b"] += 1
        ckpt.step()
        ckpt.step()
    shards = [next((tmp_path / f"version_{n}").glob("*.safetensors")) for n in (1, 2, 3)]
    versions = [limpet.open(tmp_path / f"version_{n}") for n in (1, 2, 3)]
    assert [len(v.bases) for v in versions] == [0, 1, 2]

    def refused():
        found = []
        for number in (1, 2, 3):
            try:
                limpet.load(tmp_path / f"version_{number}")
            except DigestMismatch as error:
                found.append((number, error.fields["file"].partition("/")[0]))
        return found

    expected: tuple[list[tuple[int, str]], ...] = ([(1, "version_1")], [(2, "version_2")], [])
    for shard, numbers in zip(shards, expected, strict=True):
        intact = shard.read_bytes()
        shard.write_bytes(b"\x01" + intact[1:])
        assert refused() == numbers
        shard.write_bytes(intact)
    assert refused() == []
