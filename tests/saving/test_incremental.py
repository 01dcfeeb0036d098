"""Incremental saves do not write chunks again that an earlier version has, and restore exactly."""

import tempfile
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import limpet
from limpet.buffers import BufferPool, shared_pool
from limpet.convert.copy import copy_snapshot
from limpet.errors import CommitError, DigestMismatch, FormatError, StoreError
from limpet.format.names import MANIFEST, Version, parse_reference
from limpet.loading.load import load_snapshot
from limpet.loading.snapshot import reader_of
from limpet.ranks.group import current_group
from limpet.run.run import Run
from limpet.saving import image
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.fakegroup import FakeGroup
from tests.forging import files_of, values_equal
from tests.memory_peak import numbers_of
from tests.pools import allocated_bytes, free_bytes
from tests.trainings import delete_version, flip_bit, shard_of
from tests.unreliable_stores import HookedStore

State = dict[str, Any]

UNIT = 1024
DTYPES = ["uint8", "int16", "float32", "float64", "complex128", "bool"]


@pytest.fixture
def small_chunks(monkeypatch):
    """Use chunks of 1 KiB, shared by boxes below 64 bytes, so that small states have many."""
    for module in ("layout.shard_layout", "saving.image", "layout.read_plan"):
        monkeypatch.setattr(f"limpet.{module}.BLOCK_SIZE", UNIT)
    monkeypatch.setattr("limpet.layout.shard_layout.SMALL_BOX_BYTES", 64)
    monkeypatch.setattr("limpet.layout.shard_layout.MAX_SHARED_CHUNK_BYTES", 256)


def save(store, step, state, base, *, staged=False):
    pool = BufferPool(1 << 30, max(image.BLOCK_SIZE, 4096)) if staged else shared_pool()
    live = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
    location = Location(store, f"version_{step}")
    metadata, group = VersionMetadata(step=step), current_group()
    job = begin_save(location, live, metadata, pool, group=group, stage_now=staged, base=base)
    if staged:
        for value in live.values():
            if isinstance(value, np.ndarray):
                value[...] = 0  # the save must use the staged bytes
    snapshot = finish_save(job)
    assert allocated_bytes(pool) == free_bytes(pool)
    return snapshot


def assert_restored(store, snapshot, state):
    """Assert that every way of reading the snapshot returns the saved state."""
    found = Run(store).open(snapshot.version)
    report = found.verify()
    assert report.ok, report.problems
    assert values_equal(load_snapshot(reader_of(found)), state)
    assert {
        p[0]
        for s in reader_of(found).manifest.shards
        for r in s.refers
        if (p := parse_reference(r.path))
    } == (found.bases)
    assert_references_lead_to_own_chunks(store, reader_of(found))
    assert_readable_by_safetensors(store, reader_of(found), state)


def assert_references_lead_to_own_chunks(store, snapshot):
    """Assert that every reference leads to a file that holds the bytes itself, by its own index."""
    for index in snapshot.indexes():
        for c in range(1, len(index.cuts)):
            path, at = index.locate_chunk(c)
            reference = parse_reference(path)
            if reference is None:
                continue
            base = Run(store).open(reference[0])
            [other] = reader_of(base).indexes()
            chunks = [other.locate_chunk(d) for d in range(1, len(other.cuts))]
            original = chunks.index((reader_of(base).manifest.shards[0].name, at)) + 1
            assert other.chunk_digest(original) == index.chunk_digest(c)


def assert_readable_by_safetensors(store, snapshot, state):
    """Assert that the safetensors library reads the shard's own parts, under names that state the
    leaf and the range of elements."""
    [shard] = snapshot.manifest.shards
    raw = store.get(snapshot.location.key(shard.name), 1 << 30)
    seen = 0
    for entry_name, entry in safetensors.deserialize(raw):
        name, data = entry_name.rstrip("~"), bytes(entry["data"])
        key, _, part = name.rpartition("[")
        candidates = [state[name]] if name in state else []
        if key in state:
            first, _, last = part.removesuffix("]").partition(":")
            candidates.append(state[key].reshape(-1)[int(first) : int(last)])
        assert data in [c.tobytes() for c in candidates], entry_name
        seen += len(data)
    assert seen + snapshot.indexes()[0].header == shard.length
    total = sum(v.nbytes for v in state.values() if isinstance(v, np.ndarray))
    assert seen + snapshot.referred_bytes == total


leaf_names = st.sampled_from(["a", "b", "c", "d", "e", "a[0:1]", "f"])
changes = st.one_of(
    st.tuples(st.just("element"), leaf_names, st.integers(0, 5000)),
    st.tuples(
        st.just("new"), leaf_names, st.sampled_from(DTYPES),
        st.lists(st.integers(0, 40), min_size=0, max_size=2),
    ),
    st.tuples(st.just("grow"), leaf_names, st.integers(1, 300)),
    st.tuples(st.just("drop"), leaf_names),
)  # fmt: skip


def change(state, seed, how):
    rng = np.random.default_rng(seed)
    kind, name = how[:2]
    if kind == "new":
        count = int(np.prod(how[3], dtype=int))
        raw = rng.integers(0, 2, (count, np.dtype(how[2]).itemsize), np.uint8)
        state[name] = raw.view(how[2]).reshape(how[3])
    elif name not in state:
        return
    elif kind == "drop":
        del state[name]
    elif kind == "grow":
        flat = state[name].reshape(-1)
        state[name] = np.concatenate([flat, np.ones(how[2], flat.dtype)])
    elif state[name].size:
        flat = state[name].reshape(-1).view(np.uint8)
        flat[how[2] % len(flat)] ^= 1


@pytest.mark.slow
@settings(
    derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.lists(changes, max_size=3), st.booleans(), st.integers(0, 3)), max_size=5)
)
def test_every_version_of_a_random_history_is_restored(small_chunks, history):
    store = MemoryStore()
    state: State = {
        "a": np.arange(700.0),
        "b": np.arange(1500, dtype=np.int16).reshape(30, 50),
        "c": np.ones(3, np.complex128),
        "d": np.arange(5000, dtype=np.uint8),
        "n": 1,
    }
    made = [(save(store, 0, state, None), dict(state))]
    for step, (several, staged, back) in enumerate(history, 1):
        state = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
        for number, how in enumerate(several):
            change(state, step * 10 + number, how)
        base = made[max(0, len(made) - 1 - back)][0]
        snapshot = save(store, step, state, base, staged=staged)
        assert snapshot.manifest.chain in (0, base.manifest.chain + 1)
        made.append((snapshot, dict(state)))
    to = MemoryStore()
    for snapshot, expected in made:
        assert_restored(store, snapshot, expected)
        copy = copy_snapshot(snapshot, Location(to, str(snapshot.version)))
        assert (copy.manifest.chain, copy.bases, copy.referred_bytes) == (0, frozenset(), 0)
        assert_restored(to, copy, expected)


def frozen(steps=0):
    """Return a small state with a frozen base and an adapter."""
    base = np.random.default_rng(0).random(20_000)
    return {"base": base, "adapter": np.full(200, float(steps)), "step": steps}


def test_a_frozen_base_is_written_once(small_chunks):
    store = MemoryStore()
    first = save(store, 0, frozen(), None)
    assert first.bases == frozenset()
    last = first
    for step in range(1, 5):
        last = save(store, step, frozen(step), last)
        assert last.nbytes == 4096 + 1600
        assert last.referred_bytes == 160_000
        assert last.bases == {Version(0)}, "references skip the versions in between"
        assert last.manifest.chain == step
        assert_restored(store, last, frozen(step))
    assert last.metadata["statistics"]["bytes"] == last.nbytes


def test_an_unchanged_state_writes_a_shard_without_data(small_chunks):
    """safetensors can open this shard."""
    store = MemoryStore()
    state = frozen()
    snapshot = save(store, 1, state, save(store, 0, state, None))
    assert snapshot.nbytes == 4096
    assert_restored(store, snapshot, state)


def test_a_save_is_full_if_most_of_the_state_has_changed(small_chunks):
    """A full version depends on no other version and is hardly larger."""
    store = MemoryStore()
    first = save(store, 0, {"a": np.arange(2000.0), "b": np.arange(200.0)}, None)
    full = save(store, 1, {"a": np.arange(2000.0) + 1, "b": np.arange(200.0)}, first)
    assert (full.manifest.chain, full.bases) == (0, frozenset())
    part = save(store, 2, {"a": np.arange(2000.0) + 1, "b": np.arange(200.0)}, full)
    assert part.manifest.chain == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.arange(2000.0)},
        {"base": np.arange(2000.0).view(np.int64)},
        {"base": np.roll(np.arange(2000.0), 128)},
    ],
    ids=["another leaf", "another dtype", "another offset"],
)
def test_equal_bytes_at_another_location_are_not_referred_to(small_chunks, other):
    store = MemoryStore()
    first = save(store, 0, {"base": np.arange(2000.0)}, None)
    assert save(store, 1, other, first).bases == frozenset()
    assert save(store, 2, {"base": np.arange(2000.0)}, first).bases == {Version(0)}


def test_a_chunk_of_several_small_boxes_is_referred_to_if_all_are_unchanged(small_chunks):
    store = MemoryStore()
    state: State = {f"k{i:03}": np.full(4, float(i)) for i in range(100)}
    first = save(store, 0, state, None)
    state["k050"] = np.zeros(4)
    second = save(store, 1, state, first)
    assert 0 < second.nbytes - 4096 <= 256
    assert_restored(store, second, state)
    del state["k050"]  # the leaves before it keep their offsets
    third = save(store, 2, state, second)
    assert third.referred_bytes > 1000
    assert_restored(store, third, state)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["grows", "shrinks", "comes", "goes", "grows itself"],
    ids=["earlier_grows", "earlier_shrinks", "leaf_added", "leaf_removed", "frozen_grows"],
)
def test_leaves_after_a_change_of_structure_are_referred_to(small_chunks, kind, staged):
    """A changed leaf shifts the leaves behind it against the chunk boundaries. Only the changed
    leaf is written."""
    store = MemoryStore()
    frozen = np.random.default_rng(0).random(20_000)
    state: State = {"a": np.arange(101.0), "frozen": frozen, "z": np.ones(50)}
    last = save(store, 0, state, None)
    for step in range(1, 6):
        if kind == "grows":
            state["a"] = np.arange(101.0 + step)
        elif kind == "shrinks":
            state["a"] = np.arange(101.0 - step)
        elif kind == "comes":
            state[f"a{step}"] = np.arange(101.0 + step)
        elif kind == "goes":
            state.pop("a" if step == 1 else f"none{step}", None)
        else:
            state["frozen"] = np.concatenate([state["frozen"], np.ones(300)])
        last = save(store, step, state, last, staged=staged)
        written = last.nbytes - last.indexes()[0].header
        assert last.referred_bytes >= 160_000 - UNIT
        assert written <= 5 * UNIT
        assert_restored(store, last, state)
    [index] = last.indexes()
    assert np.diff(index.cuts).max() <= UNIT
    assert len(index.cuts) < 200, "the number of chunks does not grow with each save"


def test_increments_with_chunks_of_the_real_size_are_restored_from_a_disk(tmp_path):
    """The save writes pieces of 4 MiB with O_DIRECT. Chunks cross the boundaries of pieces. Some
    saves are synchronous and some are staged."""
    store = LocalStore(str(tmp_path))
    rng = np.random.default_rng(1)
    state: State = {
        "big": rng.random(3_000_001), "odd": rng.integers(0, 255, 9_000_001, dtype=np.uint8)
    }  # fmt: skip
    last = save(store, 0, state, None)
    for step in range(1, 4):
        state["big"][step * 600_000] += 1
        state["odd"][-step * 3_000_000] ^= 1
        last = save(store, step, state, last, staged=step % 2 == 0)
        assert 4 << 20 < last.nbytes < 20 << 20
        assert_restored(store, last, state)


MEASURE_MEMORY = """
import sys, numpy as np, limpet
from limpet.buffers import shared_pool
from limpet.saving.commit import VersionMetadata
from limpet.snapshot.location import locate
from limpet.saving.save import begin_save, finish_save
from limpet.loading.snapshot import reader_of
from tests.memory_peak import print_peak_resident

folder = sys.argv[1]
state = {f"t{i}": np.ones(12_345_679 + i, np.float32) for i in range(8)}
base = limpet.save(folder + "/version_1", state)
for i in range(0, 8, 2):
    state[f"t{i}"][5_000_000:] = i  # many unaligned chunks, each of which crosses two pieces
with print_peak_resident():
    location, metadata = locate(folder + "/version_2"), VersionMetadata(step=2)
    saved = finish_save(begin_save(
        location, state, metadata, shared_pool(), stage_now=False, base=reader_of(base)
    ))
with print_peak_resident():
    limpet.load(folder + "/version_2", into=state)
print(saved.nbytes, saved.referred_bytes)
"""


@pytest.mark.slow
def test_an_incremental_save_and_a_load_need_at_most_256_mib_of_extra_memory():
    """The state has 400 MB, and a quarter is new. The pool of 128 MiB was filled by the first save,
    so the save and the load may use at most another 128 MiB."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        saving, loading, own, referred = numbers_of(MEASURE_MEMORY, folder)
        assert own > 100 << 20
        assert referred > 200 << 20
        assert max(saving, loading) <= 129 << 20


def deleted(store, base):
    delete_version(store, base.step)
    return base


def shard_missing(store, base):
    store.delete(shard_of(store, "version_0"))
    return base


def shard_truncated(store, base):
    key = shard_of(store, "version_0")
    raw = store.get(key, 1 << 30)
    store.delete(key)
    store.put_if_absent(key, raw[:-1])
    return base


def index_damaged(store, base):
    [key] = [k for k in files_of(store) if k.endswith("index.json")]
    flip_bit(store, key)
    return reader_of(Run(store).open(base.version))


def from_another_run(store, base):
    return save(MemoryStore("other"), 0, frozen(), None)


def without_version_number(store, base):
    return reader_of(limpet.save(store.at("mine"), frozen()))


@pytest.mark.parametrize(
    "make_unusable",
    [
        deleted, shard_missing, shard_truncated, index_damaged, from_another_run,
        without_version_number,
    ],
)  # fmt: skip
def test_the_save_is_full_if_the_base_version_is_unusable(small_chunks, make_unusable):
    store = MemoryStore()
    base = make_unusable(store, save(store, 0, frozen(), None))
    snapshot = save(store, 1, frozen(1), base)
    assert (snapshot.manifest.chain, snapshot.bases) == (0, frozenset())
    assert_restored(store, snapshot, frozen(1))
    assert not [k for k in files_of(store) if k.startswith("pin-")]


def test_nothing_is_committed_if_files_of_the_base_are_deleted_after_planning(small_chunks):
    """The files disappear although the base version is pinned."""
    store = HookedStore(MemoryStore())
    base = save(store, 0, frozen(), None)

    def before(method, key):
        if method == "put_if_absent" and key.endswith("index.json"):
            store.inner.delete(shard_of(store.inner, "version_0"))

    store.before = before
    with pytest.raises(CommitError, match="which this version refers to, is missing") as e:
        save(store, 1, frozen(1), base)
    assert e.value.fields["file"].startswith("version_0/shard-")
    assert f"version_1/{MANIFEST}" not in files_of(store.inner)


def test_all_versions_that_a_save_refers_to_are_pinned_before_planning(small_chunks):
    """These are the base version and the versions that it refers to. The save removes its pins at
    the end."""
    store = HookedStore(MemoryStore())
    first = save(store, 0, frozen(), None)
    second = save(store, 1, frozen(1), first)
    pinned: list[str | None] = []
    calls: list[tuple[str, str]] = []

    def before(method, key):
        calls.append((method, key))
        if method == "put" and key.startswith("version_2/"):
            pinned.extend(
                limpet.format.records.decode_pin(raw, key).version
                for key, raw in files_of(store.inner).items()
                if key.startswith("pin-")
            )

    store.before = before
    save(store, 2, frozen(2), second)
    assert sorted(pinned, key=str) == ["version_0", "version_1"]
    last_pin = max(i for i, c in enumerate(calls) if c[0] == "put_if_absent" and "pin-" in c[1])
    seen = calls.index(("stat", f"version_1/{MANIFEST}"))
    assert last_pin < seen, "the save pins first and then checks the manifest"
    assert not [k for k in files_of(store.inner) if "pin-" in k]


def test_a_state_that_changes_while_it_is_saved_is_refused(small_chunks):
    """A synchronous save reads the state twice and compares."""
    store = HookedStore(MemoryStore())
    base = save(store, 0, frozen(), None)
    live = frozen(1)
    location = Location(store, "version_1")
    job = begin_save(
        location, live, VersionMetadata(step=1), shared_pool(), stage_now=False, base=base
    )

    def before(method, key):
        if method == "put":
            live["adapter"][100] = 9.0

    store.before = before
    with pytest.raises(CommitError, match="adapter changed while it was saved"):
        finish_save(job)
    assert not [k for k in files_of(store.inner) if k.startswith("version_1/")]


def test_errors_of_all_versions_that_refer_to_a_damaged_base_name_its_file(small_chunks):
    store = MemoryStore()
    made = [save(store, 0, frozen(), None)]
    for step in (1, 2):
        made.append(save(store, step, frozen(step), made[-1]))
    flip_bit(store, shard_of(store, "version_0"), byte=4096 + 5000)
    for snapshot in made[1:]:
        fresh = Run(store).open(snapshot.version)
        with pytest.raises(DigestMismatch, match=r"refers to \.\./version_0/shard-") as e:
            load_snapshot(reader_of(fresh))
        assert e.value.fields["file"] == shard_of(store, "version_0")
        assert e.value.fields["base"] == "version_0"
        assert e.value.fields["leaf"] == "base"
        [problem] = fresh.verify().problems
        assert (problem.file, problem.leaves) == (shard_of(store, "version_0"), ("base",))
        assert problem.offset is not None
        assert 0 <= 4096 + 5000 - problem.offset < UNIT
    assert load_snapshot(made[2], keys="adapter")["adapter"][0] == 2.0


def test_verifying_several_versions_reads_each_shared_chunk_once(small_chunks):
    store = HookedStore(MemoryStore())
    made = [save(store, 0, frozen(), None)]
    for step in (1, 2):
        made.append(save(store, step, frozen(step), made[-1]))
    flip_bit(store.inner, shard_of(store.inner, "version_0"), byte=4096 + 5000)
    reads: list[str] = []
    store.before = lambda method, key: method == "get_range" and reads.append(key)
    seen: dict[Any, Any] = {}
    reports = [Run(store).open(s.version).verify(None, seen) for s in made]
    assert [len(r.problems) for r in reports] == [1, 1, 1]
    assert [str(p.error.what).split()[0] for r in reports for p in r.problems][1:] == [
        f"{made[1].url}", f"{made[2].url}"
    ]  # fmt: skip
    alone = reads.count(shard_of(store.inner, "version_0"))
    reads.clear()
    Run(store).open(made[0].version).verify()
    assert reads.count(shard_of(store.inner, "version_0")) == alone
    assert reports[1].nbytes < 20_000


@pytest.mark.parametrize("what", ["gone", "shorter", "swapped"])
def test_a_missing_or_changed_file_of_the_base_is_reported(small_chunks, what):
    store = MemoryStore()
    first = save(store, 0, frozen(), None)
    second = save(store, 1, frozen(1), first)
    key = shard_of(store, "version_0")
    raw = store.get(key, 1 << 30)
    store.delete(key)
    if what != "gone":
        store.put_if_absent(key, raw[:-8] if what == "shorter" else raw[::-1])
    fresh = Run(store).open(second.version)
    with pytest.raises((FormatError, StoreError)) as e:
        load_snapshot(reader_of(fresh))
    assert e.value.fields["file"] == key
    report = Run(store).open(second.version).verify()
    assert not report.ok
    assert {p.file for p in report.problems} == {key}
    with pytest.raises((FormatError, StoreError)):
        copy_snapshot(
            reader_of(Run(store).open(second.version)), Location(MemoryStore(), "version_1")
        )


def test_an_increment_that_is_opened_outside_its_run_raises_an_error(small_chunks):
    store = MemoryStore()
    save(store, 1, frozen(1), save(store, 0, frozen(), None))
    with pytest.raises(FormatError, match="which is outside of the store"):
        limpet.load(store.at("version_1"))


def test_copies_of_one_increment_are_identical(small_chunks):
    store = MemoryStore()
    second = save(store, 1, frozen(1), save(store, 0, frozen(), None))
    copied: list[int] = []
    one, two = MemoryStore(), MemoryStore()
    copy = copy_snapshot(second, Location(one, "version_1"), copied.append)
    copy_snapshot(second, Location(two, "elsewhere"))
    assert [*files_of(one).values()] == [*files_of(two).values()]
    assert sum(copied) <= copy.nbytes + copy.manifest.shards[0].index.length
    assert copy.manifest.attempt != second.manifest.attempt
    assert copy.manifest.parent == second.manifest.parent
    assert copy.metadata == second.metadata
    assert copy_snapshot(copy, Location(MemoryStore(), "version_1")).digest == copy.digest


def test_a_failed_copy_can_be_continued(small_chunks):
    store = MemoryStore()
    second = save(store, 1, frozen(1), save(store, 0, frozen(), None))
    to = HookedStore(MemoryStore())

    def before(method, key):
        if method == "put_if_absent" and key.endswith(MANIFEST):
            raise StoreError("no", key=key)

    to.before = before
    with pytest.raises(StoreError):
        copy_snapshot(second, Location(to, "version_1"))
    to.before = lambda method, key: None
    copy = copy_snapshot(second, Location(to, "version_1"))
    assert_restored(to, copy, frozen(1))


def save_with_two_ranks(store, step, state, base):
    with FakeGroup(2) as group:
        made = group.run(lambda rank: save(store, step, state, base))
    assert made[0].digest == made[1].digest
    assert [*made[1].nodes()] == [*made[0].nodes()]  # rank 1 reads the snapshot from the store
    return made[0]


def test_two_ranks_refer_to_chunks_of_both_ranks(small_chunks, monkeypatch):
    monkeypatch.setattr(f"{__name__}.shared_pool", lambda: BufferPool(1 << 30, 4096))
    store = MemoryStore()
    rng = np.random.default_rng(0)
    state: State = {f"w{i}": rng.random(1000 + 100 * i) for i in range(8)}
    total = sum(v.nbytes for v in state.values())
    last = save_with_two_ranks(store, 0, state, None)
    assert len(last.manifest.shards) == 2
    assert all(s.length > 20_000 for s in last.manifest.shards)
    for step in range(1, 4):
        state[f"w{step}"] = state[f"w{step}"] + 1
        save_ = save_with_two_ranks if step < 3 else save  # the last save has one rank
        before, last = last, save_(store, step, state, last)
        assert last.manifest.chain == step
        assert len(last.manifest.shards) == (2 if step < 3 else 1)
        found = Run(store).open(Version(step))
        assert found.verify().ok
        assert values_equal(load_snapshot(reader_of(found)), state)
        own = sum(
            s.length - i.header
            for s, i in zip(reader_of(found).manifest.shards, reader_of(found).indexes())
        )
        assert own == state[f"w{step}"].nbytes
        assert own + found.referred_bytes == total
        copy = copy_snapshot(reader_of(found), Location(MemoryStore(), "version_9"))
        assert values_equal(load_snapshot(copy), state)
        assert copy.verify().ok
    # A rank with nothing to refer to writes a shard of format 1. The manifest has format 2.
    apart = {"w0": state["w0"], **{f"n{i}": rng.random(1000) for i in range(3)}}
    mixed = save_with_two_ranks(store, 9, apart, before)
    assert sorted(bool(s.refers) for s in mixed.manifest.shards) == [False, True]
    assert Run(store).open(Version(9)).verify().ok
    assert values_equal(load_snapshot(reader_of(Run(store).open(Version(9)))), apart)
