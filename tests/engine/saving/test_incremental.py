"""Incremental saves: what stands in an earlier version is not written again, and comes back."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.buffers import BufferPool, shared_pool
from holdfast.engine.loading.load import load_snapshot
from holdfast.engine.planning.shard_layout import own_spans
from holdfast.engine.saving import image
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.transform.copy import copy_snapshot
from holdfast.errors import CommitError, DigestMismatch, FormatError, StoreError
from holdfast.format import names
from holdfast.format.names import MANIFEST, Version
from holdfast.run.run import Run
from holdfast.storage.local import LocalStore
from holdfast.storage.memory import MemoryStore
from holdfast.storage.store import Store
from holdfast.testing.fakegroup import FakeGroup
from tests.engine.unreliable_stores import HookedStore
from tests.forging import files_of, values_equal
from tests.trainings import flip_bit, shard_of

State = dict[str, Any]

UNIT = 1024
DTYPES = ["uint8", "int16", "float32", "float64", "complex128", "bool"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 1 KiB, shared by boxes below 64 bytes, so that small states have many."""
    for module in ("planning.shard_layout", "saving.image", "planning.read_plan"):
        monkeypatch.setattr(f"holdfast.engine.{module}.BLOCK_SIZE", UNIT)
    monkeypatch.setattr("holdfast.engine.planning.shard_layout.SMALL_BOX_BYTES", 64)
    monkeypatch.setattr("holdfast.engine.planning.shard_layout.MAX_SHARED_CHUNK_BYTES", 256)


def save(
    store: Store, step: int, state: State, base: Snapshot | None, *, ahead: bool = False
) -> Snapshot:
    pool = BufferPool(1 << 30, max(image.BLOCK_SIZE, 4096)) if ahead else shared_pool()
    live = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
    place = Location(store, f"version_{step}")
    draft = begin_save(place, live, VersionMetadata(step=step), pool, stage_now=ahead, base=base)
    if ahead:
        for value in live.values():
            if isinstance(value, np.ndarray):
                value[...] = 0  # what was staged is what counts
    snapshot = finish_save(draft)
    assert pool.allocated_bytes == pool.free_bytes
    return snapshot


def sound(store: Store, snapshot: Snapshot, state: State) -> None:
    """The snapshot, read anew, is what was saved, in every way in which it can be read."""
    found = Run(store).open(snapshot.version)
    report = found.verify()
    assert report.ok, report.problems
    assert values_equal(load_snapshot(found), state)
    assert {p[0] for s in found.manifest.shards for r in s.refers if (p := parse(r.path))} == (
        found.bases
    )
    flat(store, found)
    opened_by_safetensors(store, found, state)


def parse(path: str) -> tuple[Version, str] | None:
    return names.parse_reference(path)


def flat(store: Store, snapshot: Snapshot) -> None:
    """Every reference leads to a file that itself holds the bytes: its own index says so."""
    for index in snapshot.indexes():
        for c in range(1, len(index.cuts)):
            path, at = index.locate_chunk(c)
            reference = parse(path)
            if reference is None:
                continue
            base = Run(store).open(reference[0])
            [other] = base.indexes()
            places = [other.locate_chunk(d) for d in range(1, len(other.cuts))]
            held = places.index((base.manifest.shards[0].name, at)) + 1
            assert other.chunk_digest(held) == index.chunk_digest(c)


def opened_by_safetensors(store: Store, snapshot: Snapshot, state: State) -> None:
    """Whoever has only that library finds the shard's own parts under names that tell which."""
    [shard] = snapshot.manifest.shards
    raw = store.get(snapshot.location.key(shard.name), 1 << 30)
    seen = 0
    for entry_name, entry in safetensors.deserialize(raw):
        name, data = entry_name.rstrip("~"), bytes(entry["data"])
        key, _, part = name.rpartition("[")
        meant = [state[name]] if name in state else []
        if key in state:
            first, _, last = part.removesuffix("]").partition(":")
            meant.append(state[key].reshape(-1)[int(first) : int(last)])
        assert data in [m.tobytes() for m in meant], entry_name
        seen += len(data)
    assert seen + snapshot.indexes()[0].header == shard.length
    total = sum(v.nbytes for v in state.values() if isinstance(v, np.ndarray))
    assert seen + snapshot.referred_bytes == total


# -- any history ---------------------------------------------------------------------------------

names_of_leaves = st.sampled_from(["a", "b", "c", "d", "e", "a[0:1]", "f"])
changes = st.one_of(
    st.tuples(st.just("element"), names_of_leaves, st.integers(0, 5000)),
    st.tuples(
        st.just("new"), names_of_leaves, st.sampled_from(DTYPES),
        st.lists(st.integers(0, 40), min_size=0, max_size=2),
    ),
    st.tuples(st.just("grow"), names_of_leaves, st.integers(1, 300)),
    st.tuples(st.just("drop"), names_of_leaves),
)  # fmt: skip


def change(state: State, seed: int, how: tuple[Any, ...]) -> None:
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
    derandomize=True,
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.lists(changes, max_size=3), st.booleans(), st.integers(0, 3)), max_size=5)
)
def test_any_history(small: None, history: list[tuple[list[tuple[Any, ...]], bool, int]]) -> None:
    store = MemoryStore()
    state: State = {
        "a": np.arange(700.0),
        "b": np.arange(1500, dtype=np.int16).reshape(30, 50),
        "c": np.ones(3, np.complex128),
        "d": np.arange(5000, dtype=np.uint8),
        "n": 1,
    }
    made = [(save(store, 0, state, None), dict(state))]
    for step, (several, ahead, back) in enumerate(history, 1):
        state = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
        for number, how in enumerate(several):
            change(state, step * 10 + number, how)
        base = made[max(0, len(made) - 1 - back)][0]
        snapshot = save(store, step, state, base, ahead=ahead)
        assert snapshot.chain in (0, base.chain + 1)
        made.append((snapshot, dict(state)))
    to = MemoryStore()
    for snapshot, wanted in made:
        sound(store, snapshot, wanted)
        copy = copy_snapshot(snapshot, Location(to, str(snapshot.version)))
        assert (copy.chain, copy.bases, copy.referred_bytes) == (0, frozenset(), 0)
        sound(to, copy, wanted)


# -- what is written, to the byte ----------------------------------------------------------------


def frozen(steps: int = 0) -> State:
    """A frozen base with an adapter, in small."""
    base = np.random.default_rng(0).random(20_000)
    return {"base": base, "adapter": np.full(200, float(steps)), "step": steps}


def test_a_frozen_base_is_written_once(small: None) -> None:
    store = MemoryStore()
    first = save(store, 0, frozen(), None)
    assert first.bases == frozenset()
    last = first
    for step in range(1, 5):
        last = save(store, step, frozen(step), last)
        assert last.nbytes == 4096 + 1600
        assert last.referred_bytes == 160_000
        assert last.bases == {Version(0)}, "flat: not through the versions between"
        assert last.chain == step
        sound(store, last, frozen(step))
    assert last.metadata["statistics"]["bytes"] == last.nbytes


def test_nothing_has_changed(small: None) -> None:
    """An own shard without data, that safetensors opens."""
    store = MemoryStore()
    state = frozen()
    snapshot = save(store, 1, state, save(store, 0, state, None))
    assert snapshot.nbytes == 4096
    sound(store, snapshot, state)


def test_most_has_changed(small: None) -> None:
    """Then a full version depends on nothing, for hardly more bytes."""
    store = MemoryStore()
    first = save(store, 0, {"a": np.arange(2000.0), "b": np.arange(200.0)}, None)
    full = save(store, 1, {"a": np.arange(2000.0) + 1, "b": np.arange(200.0)}, first)
    assert (full.chain, full.bases) == (0, frozenset())
    assert store.get("version_1/manifest.json", 1 << 20).startswith(b'{"format":1,')
    part = save(store, 2, {"a": np.arange(2000.0) + 1, "b": np.arange(200.0)}, full)
    assert part.chain == 1
    assert store.get("version_2/manifest.json", 1 << 20).startswith(b'{"format":2,')


def test_a_full_save_after_increments_is_number_1_and_alone(small: None) -> None:
    store = MemoryStore()
    increment = save(store, 1, frozen(1), save(store, 0, frozen(), None))
    full = save(store, 2, frozen(2), None)
    assert increment.chain == 1
    assert full.chain == 0
    assert full.nbytes > 160_000


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.arange(2000.0)},
        {"base": np.arange(2000.0).view(np.int64)},
        {"base": np.roll(np.arange(2000.0), 128)},
    ],
    ids=["another leaf", "another dtype", "another offset"],
)
def test_the_same_bytes_elsewhere_are_not_referred_to(small: None, other: State) -> None:
    """Not in another leaf, under another dtype, or at another offset."""
    store = MemoryStore()
    first = save(store, 0, {"base": np.arange(2000.0)}, None)
    assert save(store, 1, other, first).bases == frozenset()
    assert save(store, 2, {"base": np.arange(2000.0)}, first).bases == {Version(0)}


def test_chunks_that_small_boxes_share_stay_while_all_of_them_stay(small: None) -> None:
    store = MemoryStore()
    state: State = {f"k{i:03}": np.full(4, float(i)) for i in range(100)}
    first = save(store, 0, state, None)
    state["k050"] = np.zeros(4)
    second = save(store, 1, state, first)
    assert 0 < second.nbytes - 4096 <= 256
    sound(store, second, state)
    del state["k050"]  # what lies before it is where it was
    third = save(store, 2, state, second)
    assert third.referred_bytes > 1000
    sound(store, third, state)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["grows", "shrinks", "comes", "goes", "grows itself"])
def test_what_lies_behind_a_change_of_structure_is_found(
    small: None, kind: str, ahead: bool
) -> None:
    """A leaf before it shifts it against the grid of chunks; only the leaf itself is written."""
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
        last = save(store, step, state, last, ahead=ahead)
        written = last.nbytes - last.indexes()[0].header
        assert last.referred_bytes >= 160_000 - UNIT
        assert written <= 5 * UNIT
        sound(store, last, state)
    [index] = last.indexes()
    assert np.diff(index.cuts).max() <= UNIT
    assert len(index.cuts) < 200, "no more and more chunks"


def test_pages_come_first_so_that_most_is_read_past_the_page_cache(small: None) -> None:
    store = MemoryStore()
    state = {"a": np.arange(3.0), "b": np.arange(4096.0), "c": np.arange(4096.0), "d": np.ones(99)}
    first = save(store, 0, state, None)
    for name in "acd":
        state[name] = state[name] + 1
    second = save(store, 1, state, first)
    [index] = second.indexes()
    lengths = [stop - start for start, stop, _ in own_spans(index)]
    assert [n % 4096 != 0 for n in lengths] == sorted(n % 4096 != 0 for n in lengths)
    sound(store, second, state)


def test_real_chunks_on_a_disk(tmp_path: Any) -> None:
    """Pieces of 4 MiB through O_DIRECT, chunks that straddle them, sync and staged."""
    store = LocalStore(str(tmp_path))
    rng = np.random.default_rng(1)
    state: State = {
        "big": rng.random(3_000_001), "odd": rng.integers(0, 255, 9_000_001, dtype=np.uint8)
    }  # fmt: skip
    last = save(store, 0, state, None)
    for step in range(1, 4):
        state["big"][step * 600_000] += 1
        state["odd"][-step * 3_000_000] ^= 1
        last = save(store, step, state, last, ahead=step % 2 == 0)
        assert 4 << 20 < last.nbytes < 20 << 20
        sound(store, last, state)


MEASURE = """
import sys, numpy as np, holdfast
from pathlib import Path
from holdfast.buffers import shared_pool
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.snapshot.location import locate
from holdfast.engine.saving.save import begin_save
from holdfast.engine.saving.save import finish_save

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024

folder = sys.argv[1]
state = {f"t{i}": np.ones(12_345_679 + i, np.float32) for i in range(8)}
base = holdfast.save(folder + "/version_1", state)
for i in range(0, 8, 2):
    state[f"t{i}"][5_000_000:] = i  # odd spans of many chunks, of which each lies across two pieces
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
place = locate(folder + "/version_2")
metadata = VersionMetadata(step=2)
job = begin_save(place, state, metadata, shared_pool(), stage_now=False, base=base)
saved = finish_save(job)
print((memory("VmHWM") - before) >> 20, saved.nbytes, saved.referred_bytes)
Path("/proc/self/clear_refs").write_text("5")
holdfast.load(folder + "/version_2", into=state)
print((memory("VmHWM") - before) >> 20)
"""


@pytest.mark.slow
def test_memory_beyond_the_state() -> None:
    """Saving 400 MB, of which a quarter is new, and loading it takes at most 256 MiB more: 128 of
    the pool, which the first save has filled already, and no more than as much again."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        command = [sys.executable, "-c", MEASURE, folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        saving, own, referred, loading = map(int, done.stdout.split())
        assert own > 100 << 20
        assert referred > 200 << 20
        assert max(saving, loading) <= 128


# -- bases that cannot be had --------------------------------------------------------------------


def gone(store: MemoryStore, base: Snapshot) -> Snapshot:
    Run(store).delete(base.version)
    return base


def without_shard(store: MemoryStore, base: Snapshot) -> Snapshot:
    store.delete(shard_of(store, "version_0"))
    return base


def another_length(store: MemoryStore, base: Snapshot) -> Snapshot:
    key = shard_of(store, "version_0")
    raw = store.get(key, 1 << 30)
    store.delete(key)
    store.put_if_absent(key, raw[:-1])
    return base


def bad_index(store: MemoryStore, base: Snapshot) -> Snapshot:
    [key] = [k for k in files_of(store) if k.endswith("index.json")]
    flip_bit(store, key)
    return Run(store).open(base.version)


def of_another_run(store: MemoryStore, base: Snapshot) -> Snapshot:
    return save(MemoryStore("other"), 0, frozen(), None)


def no_version(store: MemoryStore, base: Snapshot) -> Snapshot:
    return holdfast.save(store.at("mine"), frozen())


@pytest.mark.parametrize(
    "spoil", [gone, without_shard, another_length, bad_index, of_another_run, no_version]
)
def test_without_a_sound_base_the_save_is_full(small: None, spoil: Any) -> None:
    store = MemoryStore()
    base = spoil(store, save(store, 0, frozen(), None))
    snapshot = save(store, 1, frozen(1), base)
    assert (snapshot.chain, snapshot.bases) == (0, frozenset())
    sound(store, snapshot, frozen(1))
    assert not [k for k in files_of(store) if k.startswith("pin-")]


def test_a_base_that_is_deleted_after_it_was_planned_with(small: None) -> None:
    """Its files vanish although it is pinned: nothing is committed."""
    store = HookedStore(MemoryStore())
    base = save(store, 0, frozen(), None)

    def before(method: str, key: str) -> None:
        if method == "put_if_absent" and key.endswith("index.json"):
            store.inner.delete(shard_of(store.inner, "version_0"))

    store.before = before
    with pytest.raises(CommitError, match="which this version refers to, is missing") as e:
        save(store, 1, frozen(1), base)
    assert e.value.fields["file"].startswith("version_0/shard-")
    assert f"version_1/{MANIFEST}" not in files_of(store.inner)  # type: ignore[arg-type]


def test_all_that_is_referred_to_is_pinned_before_planning(small: None) -> None:
    """The base, and whatever the base refers to; and the pins are gone afterwards."""
    store = HookedStore(MemoryStore())
    first = save(store, 0, frozen(), None)
    second = save(store, 1, frozen(1), first)
    pinned: list[str | None] = []
    calls: list[tuple[str, str]] = []

    def before(method: str, key: str) -> None:
        calls.append((method, key))
        if method == "put" and key.startswith("version_2/"):
            pinned.extend(
                holdfast.format.records.decode_pin(raw, key).version
                for key, raw in files_of(store.inner).items()  # type: ignore[arg-type]
                if key.startswith("pin-")
            )

    store.before = before
    save(store, 2, frozen(2), second)
    assert sorted(pinned, key=str) == ["version_0", "version_1"]
    last_pin = max(i for i, c in enumerate(calls) if c[0] == "put_if_absent" and "pin-" in c[1])
    seen = calls.index(("stat", f"version_1/{MANIFEST}"))
    assert last_pin < seen, "pinned first, then looked at"
    assert not [k for k in files_of(store.inner) if "pin-" in k]  # type: ignore[arg-type]


def test_a_state_that_changes_while_it_is_saved_is_refused(small: None) -> None:
    """A synchronous save reads the state twice; it must be the same."""
    store = HookedStore(MemoryStore())
    base = save(store, 0, frozen(), None)
    live = frozen(1)
    place = Location(store, "version_1")
    draft = begin_save(
        place, live, VersionMetadata(step=1), shared_pool(), stage_now=False, base=base
    )

    def before(method: str, key: str) -> None:
        if method == "put":
            live["adapter"][100] = 9.0

    store.before = before
    with pytest.raises(CommitError, match="adapter changed while it was saved"):
        finish_save(draft)
    assert not [k for k in files_of(store.inner) if k.startswith("version_1/")]  # type: ignore[arg-type]


def test_staged_pieces_that_are_not_needed_go_back_at_once(small: None) -> None:
    store = HookedStore(MemoryStore())
    base = save(store, 0, frozen(), None)
    pool = BufferPool(1 << 30, 4096)
    place = Location(store, "version_1")
    draft = begin_save(place, frozen(1), VersionMetadata(step=1), pool, stage_now=True, base=base)
    staged = pool.allocated_bytes - pool.free_bytes
    held = []
    store.before = lambda method, key: (
        method == "put" and held.append(pool.allocated_bytes - pool.free_bytes)
    )
    finish_save(draft)
    assert staged > 150 * 4096
    assert held == [2 * 4096], "the adapter's 1,600 bytes in pieces of 1 KiB"


# -- damage --------------------------------------------------------------------------------------


def test_a_damaged_base_is_named_with_every_version_that_it_takes_along(small: None) -> None:
    store = MemoryStore()
    made = [save(store, 0, frozen(), None)]
    for step in (1, 2):
        made.append(save(store, step, frozen(step), made[-1]))
    flip_bit(store, shard_of(store, "version_0"), byte=4096 + 5000)
    for snapshot in made[1:]:
        fresh = Run(store).open(snapshot.version)
        with pytest.raises(DigestMismatch, match=r"refers to \.\./version_0/shard-") as e:
            load_snapshot(fresh)
        assert e.value.fields["file"] == shard_of(store, "version_0")
        assert e.value.fields["base"] == "version_0"
        assert e.value.fields["leaf"] == "base"
        [problem] = fresh.verify().problems
        assert (problem.file, problem.leaves) == (shard_of(store, "version_0"), ("base",))
        assert problem.offset is not None
        assert 0 <= 4096 + 5000 - problem.offset < UNIT
    assert load_snapshot(made[2], keys="adapter")["adapter"][0] == 2.0


def test_verifying_several_versions_reads_a_shared_chunk_once(small: None) -> None:
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
def test_a_base_whose_file_is_not_what_it_was(small: None, what: str) -> None:
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
        load_snapshot(fresh)
    assert e.value.fields["file"] == key
    report = Run(store).open(second.version).verify()
    assert not report.ok
    assert {p.file for p in report.problems} == {key}
    with pytest.raises((FormatError, StoreError)):
        copy_snapshot(Run(store).open(second.version), Location(MemoryStore(), "version_1"))


def test_opened_apart_from_its_run_it_says_so(small: None) -> None:
    store = MemoryStore()
    save(store, 1, frozen(1), save(store, 0, frozen(), None))
    with pytest.raises(FormatError, match="which is outside of the store"):
        holdfast.load(store.at("version_1"))


# -- copies --------------------------------------------------------------------------------------


def test_copies_of_one_increment_are_the_same_byte_for_byte(small: None) -> None:
    store = MemoryStore()
    second = save(store, 1, frozen(1), save(store, 0, frozen(), None))
    told: list[int] = []
    one, two = MemoryStore(), MemoryStore()
    copy = copy_snapshot(second, Location(one, "version_1"), told.append)
    copy_snapshot(second, Location(two, "elsewhere"))
    assert [*files_of(one).values()] == [*files_of(two).values()]
    assert sum(told) <= copy.nbytes + copy.manifest.shards[0].index.length
    assert copy.manifest.attempt != second.manifest.attempt
    assert copy.manifest.parent == second.manifest.parent
    assert copy.metadata == second.metadata
    again = copy_snapshot(copy, Location(MemoryStore(), "version_1"))
    assert again.digest == copy.digest


def test_a_copy_that_failed_is_gone_on_with(small: None) -> None:
    store = MemoryStore()
    second = save(store, 1, frozen(1), save(store, 0, frozen(), None))
    to = HookedStore(MemoryStore())

    def before(method: str, key: str) -> None:
        if method == "put_if_absent" and key.endswith(MANIFEST):
            raise StoreError("no", key=key)

    to.before = before
    with pytest.raises(StoreError):
        copy_snapshot(second, Location(to, "version_1"))
    to.before = lambda method, key: None
    copy = copy_snapshot(second, Location(to, "version_1"))
    sound(to, copy, frozen(1))


def test_spans_of_a_full_index_are_none(small: None) -> None:
    store = MemoryStore()
    [index] = save(store, 0, frozen(), None).indexes()
    assert own_spans(index) == []
    assert all(a.key <= b.key for a, b in pairwise(sorted(index.leaves, key=lambda f: f.key)))


# -- several shards ------------------------------------------------------------------------------


def save_by_two(store: Store, step: int, state: State, base: Snapshot | None) -> Snapshot:
    with FakeGroup(2) as group:
        made = group.run(lambda rank: save(store, step, state, base))
    assert made[0].digest == made[1].digest
    assert made[1].keys() == made[0].keys()  # read anew by rank 1
    return made[0]


def test_two_ranks_refer_to_what_either_has_written(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.shared_pool", lambda: BufferPool(1 << 30, 4096))
    store = MemoryStore()
    rng = np.random.default_rng(0)
    state: State = {f"w{i}": rng.random(1000 + 100 * i) for i in range(8)}
    total = sum(v.nbytes for v in state.values())
    last = save_by_two(store, 0, state, None)
    assert len(last.manifest.shards) == 2
    assert all(s.length > 20_000 for s in last.manifest.shards)
    for step in range(1, 4):
        state[f"w{step}"] = state[f"w{step}"] + 1
        save_ = save_by_two if step < 3 else save  # at last, one rank alone
        before, last = last, save_(store, step, state, last)
        assert last.chain == step
        assert len(last.manifest.shards) == (2 if step < 3 else 1)
        found = Run(store).open(Version(step))
        assert found.verify().ok
        assert values_equal(load_snapshot(found), state)
        own = sum(s.length - i.header for s, i in zip(found.manifest.shards, found.indexes()))
        assert own == state[f"w{step}"].nbytes
        assert own + found.referred_bytes == total
        copy = copy_snapshot(found, Location(MemoryStore(), "version_9"))
        assert values_equal(load_snapshot(copy), state)
        assert copy.verify().ok
    # where a rank has nothing to refer to, its shard is one of number 1 in a manifest of number 2
    apart = {"w0": state["w0"], **{f"n{i}": rng.random(1000) for i in range(3)}}
    mixed = save_by_two(store, 9, apart, before)
    assert sorted(bool(s.refers) for s in mixed.manifest.shards) == [False, True]
    assert Run(store).open(Version(9)).verify().ok
    assert values_equal(load_snapshot(Run(store).open(Version(9))), apart)
