"""Resharding: it writes the same bytes in other shards, or commits nothing. It reads few bytes
twice and needs little memory."""

import itertools
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import limpet
from limpet.buffers import shared_pool
from limpet.convert import reshard as reshard_module
from limpet.convert import windows
from limpet.convert.reshard import reshard
from limpet.errors import (
    AlreadyExists,
    CommitError,
    DigestMismatch,
    FormatError,
    LimpetError,
    NoSpace,
    NotFound,
)
from limpet.format.names import MANIFEST, is_pin_name, parse_attempt
from limpet.layout.placements import ShardPlacement, local_boxes
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.snapshot.compare import compare_bytes
from limpet.snapshot.location import Location, is_snapshot
from limpet.snapshot.reader import open_location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Traits
from limpet.testing.crashfs import CrashFs, PowerCut
from limpet.testing.faults import Fault, FaultFs
from limpet.types import Box
from tests.layout.random_boxes import shapes, tilings
from tests.memory_peak import numbers_of
from tests.pools import allocated_bytes, free_bytes
from tests.snapshot.manual_shards import (
    read_elements,
    split_columns,
    split_rows,
    write_resharded,
)
from tests.states import assert_same
from tests.trainings import flip_bit
from tests.unreliable_stores import HookedStore, HookedUpload

SOURCE_URL = "/a/run"

_numbers = itertools.count()


@pytest.fixture
def small_chunks(monkeypatch):
    """Use chunks of 1 KiB and windows of 4 KiB, so that small states have many."""
    for name in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{name}.BLOCK_SIZE", 1024)
    for name in ("layout.shard_layout", "convert.windows"):
        monkeypatch.setattr(f"limpet.{name}.SMALL_BOX_BYTES", 64)
        monkeypatch.setattr(f"limpet.{name}.MAX_SHARED_CHUNK_BYTES", 256)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 4096)
    monkeypatch.setenv("LIMPET_THREADS", "3")


def url():
    return f"memory://reshard{next(_numbers)}/version_1"


def new_location():
    return Location(MemoryStore(), "version_1")


def assert_same_leaves(a, b):
    """Assert that both snapshots have the same tree and the same bytes. They are read by other code
    than the code that reshards."""
    assert a.manifest.tree == b.manifest.tree
    pairs = [(key, key) for key in a.leaves]
    assert [d.differing for d in compare_bytes(a, b, pairs).values()] == [0] * len(pairs)


def plain_files(snapshot):
    """Return the names that the safetensors library finds in the shards, with the shapes of their
    parts."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for shard in snapshot.manifest.shards:
        raw = snapshot.location.store.get(snapshot.location.key(shard.name), 1 << 40)
        for name, entry in safetensors.deserialize(raw):
            found.setdefault(name.partition("@")[0], []).append(tuple(entry["shape"]))
    return found


DTYPES = ["uint8", "bool", "int16", "float32", "float64", "complex128"]


@st.composite
def tiled_states(draw):
    """Draw arrays and tilings. Each box goes to one or two of three shards."""
    state, layout = {}, {}
    dtypes = draw(st.lists(st.sampled_from(DTYPES), max_size=5))
    # Larger elements come first because write_resharded does not sort them. Otherwise, chunks would
    # end within an element.
    for i, dtype in enumerate(sorted(dtypes, key=lambda d: -np.dtype(d).itemsize)):
        shape = draw(shapes)
        key = f"{draw(st.sampled_from('mo'))}{i}"
        raw = np.random.default_rng(i).integers(0, 2, (*shape, np.dtype(dtype).itemsize), "u1")
        state[key] = raw.view(dtype).reshape(shape)
        layout[key] = [
            (n, box)
            for box in draw(tilings(shape))
            for n in draw(st.sets(st.integers(0, 2), min_size=1, max_size=2))
        ]
    return state, layout


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tiled_state=tiled_states(),
    shards=st.integers(1, 8),
    split=st.sampled_from(reshard_module.SPLITS),
    window=st.sampled_from([1, 48, 400, 4096]),
    at_a_time=st.sampled_from([1, 3, 256]),
)
def test_a_snapshot_in_any_layout_is_resharded_into_any_other(
    tiled_state, shards, split, window, at_a_time, small_chunks
):
    state, layout = tiled_state
    whole = limpet.save(url(), {**state, "n": 1})
    old = write_resharded(reader_of(whole), new_location(), lambda key, shape: layout[key], 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "WINDOW_BYTES", window)
        patch.setattr(reshard_module, "MAX_OPEN_SHARDS", at_a_time)
        copied: list[int] = []
        new = reshard(old, new_location(), shards, split, copied.append)
    new = open_location(new.location)
    assert new.verify().ok, new.verify().problems
    assert len(new.manifest.shards) == shards
    assert_same_leaves(reader_of(whole), new)
    assert sum(copied) == sum(a.nbytes for a in state.values())
    for key, parts in plain_files(new).items():
        is_split = split == "even" and state[key].nbytes and (*state[key].shape, 0)[0] >= shards > 1
        assert len(parts) > 1 if is_split and shards > 1 else len(parts) == 1
    again = reshard(new, new_location(), 1)
    assert_same_leaves(reader_of(whole), again)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.complex32, torch.bool],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_the_bits_of_every_dtype_are_unchanged(dtype, small_chunks):
    raw = torch.arange(7 * 6 * dtype.itemsize).to(torch.uint8)
    tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(7, 6)
    state = {"a": tensor, "b": tensor[0], "c": tensor[:, 3].clone(), "n": 1}
    old = write_resharded(reader_of(limpet.save(url(), state)), new_location(), split_columns(2), 2)
    for shards in (1, 3):
        new = reshard(old, new_location(), shards)
        assert_same(limpet.load(new.location.store.at("version_1")), state)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 64])
def test_rows_are_split_like_fsdp2(shards):
    """Each rank of a later load then needs only the shard with its own number."""
    shapes = [(64, 3), (65, 2), (7,), (4, 4, 2), (63, 1), (1000,), (8, 0)]
    state = {str(i): np.arange(np.prod(s), dtype="f4").reshape(s) for i, s in enumerate(shapes)}
    new = reshard(
        reader_of(limpet.save(url(), {**state, "scalar": np.float32(1)})), new_location(), shards
    )
    for rank, index in enumerate(new.indexes()):
        found = {leaf.key: [Box(b.offsets, b.sizes) for b in leaf.boxes] for leaf in index.leaves}
        for key, array in state.items():
            if len(array) >= shards and array.size:
                local = local_boxes(array.shape, (shards,), (rank,), (ShardPlacement(0),))
                assert found.get(key, []) == [box for box, _ in local.boxes]
            else:
                assert found.get(key, [Box.whole(array.shape)]) == [Box.whole(array.shape)]


def test_leaves_that_are_not_split_are_balanced_by_bytes():
    state = {f"{i}": np.zeros(1000 + i) for i in range(40)}
    new = reshard(reader_of(limpet.save(url(), state)), new_location(), 4, "none")
    sizes = [sum(8 * leaf.shape[0] for leaf in i.leaves) for i in new.indexes()]
    assert max(sizes) - min(sizes) <= 8 * 1040
    assert [len(parts) for parts in plain_files(new).values()] == [1] * 40


def test_a_single_shard_is_a_plain_safetensors_file_with_whole_tensors():
    state = {f"w{i}": np.random.default_rng(i).random((40, 3 + i), np.float32) for i in range(9)}
    old = write_resharded(reader_of(limpet.save(url(), state)), new_location(), split_rows(16), 16)
    new = reshard(old, new_location(), 1)
    [shard] = new.manifest.shards
    loaded = safetensors.numpy.load(new.location.store.get(new.location.key(shard.name), 1 << 30))
    assert loaded.keys() == state.keys()
    assert all(loaded[k].tobytes() == state[k].tobytes() for k in state)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_state_without_tensors_is_resharded(shards):
    new = reshard(reader_of(limpet.save(url(), {"n": 1, "s": "x"})), new_location(), shards)
    assert new.verify().ok
    assert len(new.manifest.shards) == shards
    assert limpet.load(new.location.store.at("version_1")) == {"n": 1, "s": "x"}


def test_an_incremental_version_becomes_self_contained(small_chunks):
    store = MemoryStore()
    state: dict[str, Any] = {"frozen": np.arange(5000.0), "a": np.zeros(300)}
    with limpet.Checkpointer(store, state, save=EverySteps(1), incremental=True) as ckpt:
        ckpt.step()
        ckpt.wait()
        state["a"] += 1
        ckpt.step()
    old = open_location(Location(store, "version_2"))
    assert old.bases
    new = reshard(old, Location(MemoryStore(), "version_2"), 3)
    assert_same_leaves(old, new)
    assert not new.bases
    assert (old.manifest.chain, new.manifest.chain) == (1, 0)
    for stat in list(store.list("")):
        store.delete(stat.key)
    assert new.verify().ok
    assert limpet.load(new.location.store.at("version_2"))["a"].tolist() == [1.0] * 300


def test_other_fields_are_unchanged_and_the_metadata_records_the_reshard():
    store, state = MemoryStore(), {"a": np.arange(9.0), "list": [1, (2, None)]}
    with limpet.Checkpointer(store, state, save=EverySteps(1)) as ckpt:
        ckpt.step({"loss": 1.0})
        ckpt.wait()
        ckpt.step({"loss": 0.5})
    old = open_location(Location(store, "version_2"))
    new = open_location(reshard(old, Location(MemoryStore(), "version_2"), 2).location)
    for field in ("step", "branch", "parent", "created", "tree"):
        assert getattr(new.manifest, field) == getattr(old.manifest, field)
    assert new.manifest.attempt != old.manifest.attempt
    assert new.metadata == {**old.metadata, "resharded": {"from": old.digest, "shards": 1}}
    assert new.version == old.version
    assert {parse_attempt(s.name) for s in new.manifest.shards} == {new.manifest.attempt}


def test_the_source_is_unchanged_and_all_pins_are_removed(monkeypatch):
    monkeypatch.setattr(pins, "MIN_PINNED_BYTES", 0)
    source, to = MemoryStore(), MemoryStore()
    limpet.save(source.at("version_1"), {"a": np.arange(99.0)})
    old = open_location(Location(source, "version_1"))
    before = {s.key: source.get(s.key, 1 << 30) for s in source.list("")}
    pin_counts: list[int] = []

    def on_progress(nbytes):
        pin_counts.append(sum(is_pin_name(s.key) for s in source.list("")))
        assert not Run(to).sweep(grace=0).removed
        assert Run(source).listing().versions
        pin_counts.append(sum(is_pin_name(s.key) for s in to.list("")))

    new = reshard(old, Location(to, "version_1"), 2, "even", on_progress)
    assert set(pin_counts) == {1}
    assert new.verify().ok
    assert {s.key: source.get(s.key, 1 << 30) for s in source.list("")} == before
    assert not [s for s in to.list("") if is_pin_name(s.key)]


@pytest.mark.parametrize("at", ["version_1", ""])
def test_a_reshard_over_an_existing_snapshot_or_run_is_refused(at):
    old, to = limpet.save(url(), {"a": np.arange(9.0)}), MemoryStore()
    limpet.save(to.at("version_1"), {"n": 2})
    before = [s.key for s in to.list("")]
    with pytest.raises(AlreadyExists, match="nothing was changed"):
        reshard(reader_of(old), Location(to, at), 2)
    assert [s.key for s in to.list("")] == before


class Counting(MemoryStore):
    """A store that counts the bytes that are read from shards."""

    read = 0

    def get_range(self, key, offset, length, into):
        if key.endswith(".safetensors"):
            self.read += length
        super().get_range(key, offset, length, into)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "shards", "limit"),
    [
        (None, 1, 1.02), (None, 64, 1.02), (None, 256, 1.1), (split_rows(5), 3, 1.02),
        (split_rows(256), 1, 1.05), (split_rows(256), 256, 1.1), (split_columns(2), 1, 1.1),
        (split_columns(8), 4, 1.3),
    ],
)  # fmt: skip
def test_few_bytes_are_read_twice(layout, shards, limit, monkeypatch):
    """The cases are: few shards to many, many to few, a leaf that is larger than a window, and many
    leaves that share chunks in more shards than fit in a window. All sizes are scaled down."""
    unit = 16 << 10
    for name in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{name}.BLOCK_SIZE", unit)
    for name in ("layout.shard_layout", "convert.windows"):
        monkeypatch.setattr(f"limpet.{name}.SMALL_BOX_BYTES", unit // 64)
        monkeypatch.setattr(f"limpet.{name}.MAX_SHARED_CHUNK_BYTES", unit // 4)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 12 * unit)
    state = {"large": np.zeros((512, 544), np.float32)}
    state |= {f"w{i}": np.zeros((256, 32), np.float32) for i in range(64)}
    state |= {f"b{i}": np.zeros(60, np.float32) for i in range(50)}
    whole = limpet.save(url(), {"model": state})
    store = Counting()
    location = Location(store, "version_1")
    old = write_resharded(
        reader_of(whole), location, layout or (lambda key, shape: [(0, Box.whole(shape))]), 256
    )
    store.read = 0
    new = reshard(old, new_location(), shards)
    nbytes = sum(a.nbytes for a in state.values())
    assert sum(index.cuts[-1] - index.header for index in new.indexes()) == nbytes
    headers = sum(index.header for index in old.indexes())  # each is checked, once
    assert store.read - headers < nbytes * limit


MEASURE_MEMORY = """
import sys
import numpy as np
import limpet
from limpet.snapshot.location import locate
from limpet.snapshot.reader import open_snapshot
from limpet.convert.reshard import reshard
from tests.memory_peak import print_peak_memory

old_url, new_url, shards = sys.argv[1:]
limpet.save("memory://warm/version_1", {"x": np.ones(3)})
reshard(open_snapshot("memory://warm/version_1"), locate("memory://warm2/version_1"), 2)
old = open_snapshot(old_url)
with print_peak_memory():
    reshard(old, locate(new_url), int(shards))
"""


@pytest.mark.slow
def test_resharding_512_mib_needs_at_most_256_mib_of_memory(tmp_path):
    state = {f"w{i}": np.ones((32 << 10, 1 << 10), np.float32) for i in range(4)}
    state |= {f"b{i}": np.ones(3000) for i in range(100)}
    limpet.save(tmp_path / "version_1", state)
    del state
    [growth] = numbers_of(MEASURE_MEMORY, tmp_path / "version_1", tmp_path / "to", 100)
    assert growth < 256 << 20


class CollectingStore(MemoryStore):
    """A store whose uploads keep up to ``kept`` bytes in memory, until they are committed."""

    kept, is_ordered = 3000, False

    def __init__(self):
        super().__init__()
        self.open: dict[str, int] = {}
        self.most_bytes = self.most_open = self.early = 0

    @property
    def traits(self):
        return Traits("x", 1, False, ordered=self.is_ordered, upload_memory=self.kept)

    def put(self, key, length, head=0):
        self.open[key] = min(self.kept, 2 * length)
        self.most_bytes = max(self.most_bytes, sum(self.open.values()))
        self.most_open = max(self.most_open, len(self.open))
        return CollectingUpload(self, key, super().put(key, length))


class CollectingUpload(HookedUpload):
    def __init__(self, store, key, inner):
        self.counted, self.key, self.inner, self.position = store, key, inner, 0

    def write_at(self, offset, data):
        self.counted.early += offset != self.position
        self.position = offset + len(data)
        self.inner.write_at(offset, data)

    def commit(self):
        self.counted.open.pop(self.key)
        return self.inner.commit()


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(("limit", "at_once"), [(1, 1), (9000, 3), (1 << 30, 12)])
def test_the_uploads_of_a_store_that_collects_bytes_are_bounded(
    limit, at_once, is_ordered, monkeypatch, small_chunks
):
    monkeypatch.setattr(reshard_module, "MAX_UPLOAD_BYTES", limit)
    store = CollectingStore()
    store.is_ordered = is_ordered
    state = {f"w{i}": np.arange(2400.0).reshape(24, 100) + i for i in range(5)}
    old = limpet.save(url(), state)
    new = reshard(reader_of(old), Location(store, "version_1"), 12)
    assert_same_leaves(reader_of(old), new)
    assert new.verify().ok
    assert store.most_open == at_once
    assert store.most_bytes <= max(limit, store.kept)
    if is_ordered:
        assert store.early == 0


def assert_nothing_left(to):
    """Assert that there is no snapshot, shard, unfinished file, or pin, and that all buffers are
    free."""
    assert [s.key for s in to.list("")] == []
    assert list(to.partials("")) == []
    assert allocated_bytes(shared_pool()) == free_bytes(shared_pool())


@pytest.mark.parametrize("layout", [split_rows(3), split_columns(3)])
@pytest.mark.parametrize("shards", [1, 4])
def test_the_error_names_the_damaged_file_and_nothing_is_committed(layout, shards, small_chunks):
    state = {"a": np.arange(3000.0).reshape(30, 100), "b": np.ones((6, 5))}
    source, to = MemoryStore(), MemoryStore()
    old = write_resharded(
        reader_of(limpet.save(url(), state)), Location(source, "version_1"), layout, 3
    )
    [name] = [s.name for s in old.manifest.shards if "shard-00001" in s.name]
    flip_bit(source, f"version_1/{name}", byte=-300)
    with pytest.raises(DigestMismatch, match="shard-00001-of-00003") as raised:
        reshard(old, Location(to, "version_1"), shards)
    assert raised.value.file == f"version_1/{name}"
    assert raised.value.leaf == "a"
    assert_nothing_left(to)


def test_a_missing_shard_and_a_deleted_version_raise_different_errors(small_chunks):
    for first in (".safetensors", MANIFEST):
        source, to = MemoryStore(), MemoryStore()
        old = limpet.save(source.at("version_1"), {"a": np.arange(999.0)})
        reader_of(old).indexes()
        keys = [s.key for s in source.list("")]
        for key in sorted(keys, key=lambda k: not k.endswith(first))[: 1 + 2 * (first == MANIFEST)]:
            source.delete(key)
        with pytest.raises(NotFound if first == MANIFEST else LimpetError) as raised:
            reshard(reader_of(old), Location(to, "version_1"), 2)
        assert ("was deleted" in str(raised.value)) == (first == MANIFEST)
        assert_nothing_left(to)


def test_nothing_is_committed_if_the_store_loses_a_shard_or_changes_an_index():
    old = limpet.save(url(), {"a": np.arange(999.0)})
    for kind, error in ((".safetensors", CommitError), (".index.json", FormatError)):
        to = HookedStore(MemoryStore())

        def damage(method, key, to=to, kind=kind):
            if kind == ".safetensors" and method == "commit" and "00001-of" in key:
                to.inner.delete(key)
            elif method == "put_if_absent" and key.endswith(kind) and "00001-of" in key:
                flip_bit(to.inner, key, byte=20)

        to.after = damage
        with pytest.raises(error):
            reshard(reader_of(old), Location(to, "version_1"), 2)
        assert not is_snapshot(Location(to.inner, "version_1"))
        assert not Run(to.inner).listing().process_pins


def test_one_of_two_reshards_to_the_same_location_commits():
    old, to = limpet.save(url(), {"a": np.arange(999.0)}), HookedStore(MemoryStore())

    def reshard_first(method, key):
        if method == "put_if_absent" and key.endswith(MANIFEST):
            to.before = lambda method, key: None
            reshard(reader_of(old), Location(to.inner, "version_1"), 3)

    to.before = reshard_first
    with pytest.raises(CommitError, match="another save has committed"):
        reshard(reader_of(old), Location(to, "version_1"), 2)
    new = limpet.open(to.inner.at("version_1"))
    assert len(reader_of(new).manifest.shards) == 3
    assert new.verify().ok


def save_to_crash_fs():
    """Save a small version on a file system that can simulate power cuts."""
    fs = CrashFs()
    state = {"a": np.arange(1500.0).reshape(15, 100), "b": np.ones(7), "n": 1}
    saved = limpet.save(LocalStore(f"{SOURCE_URL}/version_1", fs=fs), state)
    return fs, reader_of(saved)


def reshard_on(fs):
    old = open_location(Location(LocalStore(SOURCE_URL, fs=fs), "version_1"))
    return reshard(old, Location(LocalStore("/b/run", fs=fs), "version_1"), 3)


def check_snapshots(fs, whole):
    """Return True if the new snapshot exists. Assert that it is then complete, and that the old
    snapshot is intact."""
    assert open_location(Location(LocalStore(SOURCE_URL, fs=fs), "version_1")).verify().ok
    location = Location(LocalStore("/b/run", fs=fs), "version_1")
    if not is_snapshot(location):
        return False
    new = open_location(location)
    assert new.verify().ok
    for key in whole.leaves:
        assert read_elements(new, key).tobytes() == read_elements(whole, key).tobytes()
    return True


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_call_leaves_a_complete_snapshot_or_none(every, small_chunks):
    whole = limpet.save(url(), limpet.load(save_to_crash_fs()[1].location.store))
    seen = set()
    for cut_at in itertools.count(1, every):
        fs, _ = save_to_crash_fs()
        fs.cut_at = fs.operations + cut_at
        try:
            reshard_on(fs)
        except PowerCut:
            done = False
        else:
            done = True
        for left in fs.crashes(limit=4, seed=cut_at):
            exists = check_snapshots(left, reader_of(whole))
            seen.add((done, exists))
            assert exists or not done
        if done:
            break
        assert allocated_bytes(shared_pool()) == free_bytes(shared_pool())
    assert (False, False) in seen
    assert (True, True) in seen


@pytest.mark.parametrize("every", [13, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [NoSpace.__name__, "EIO", "lost"])
def test_a_failed_call_leaves_a_complete_snapshot_or_none(error, every, small_chunks):
    """Each read and each write fails in turn, or every nth of them."""
    import errno

    kind = {NoSpace.__name__: errno.ENOSPC}.get(error, errno.EIO)
    failed = 0
    for at in itertools.count(1, every):
        inner, whole = save_to_crash_fs()
        fs = FaultFs(inner, Fault(None, at, kind, lost=error == "lost"))
        try:
            reshard_on(fs)
        except LimpetError as e:
            failed += 1
            unknown = e.fields.get("outcome") == "unknown"
        else:
            assert check_snapshots(inner, whole)
            if not fs.fired:
                break
            continue
        finally:
            assert allocated_bytes(shared_pool()) == free_bytes(shared_pool())
        assert not check_snapshots(inner, whole) or unknown
    assert failed > 100 // every
