"""The store of a run that spreads its shards: contract, mapping, record, other places."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.errors import (
    Denied,
    DigestMismatch,
    FormatError,
    FormatTooNew,
    LimpetError,
    ManifestInvalid,
    NoSnapshot,
    NotFound,
)
from limpet.format import names
from limpet.format.names import Version, index_name, shard_name
from limpet.format.records import Spread, encode_spread
from limpet.format.sealed import seal
from limpet.snapshot.snapshot import reader_of
from limpet.snapshot.spread import SpreadStore, _Known, read_spread, spread_store
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store
from limpet.storage.store import Store
from limpet.testing.contract import keys, put
from tests.storage.test_contract import StoreContract, TestMemoryInParts, _InFolder

ATTEMPT = "7f3a9c01d2e4"
SHARD = f"version_120/{shard_name(3, 16, ATTEMPT)}"
INDEX = f"version_120/{index_name(3, 16, ATTEMPT)}"
SPREAD = Spread("xxh3-128+rank", 16)


def spread_memory(prefixes: int = 16) -> SpreadStore:
    store = spread_store(MemoryStore())
    limpet.Run(store).set_spread(prefixes)
    return store


# -- the contract --------------------------------------------------------------------------------


class _SpreadAll(SpreadStore):
    """Spreads the objects of all keys, as the keys of the contract are not those of shards."""

    @staticmethod
    def _is_spread(key):
        return not key.endswith(".partial")

    @staticmethod
    def _may_hold(folder, prefix):
        return True


class _SpreadContract(StoreContract):
    def make_store(self, folder):
        return _SpreadAll(super().make_store(folder), _Known(SPREAD, looked=True))

    @staticmethod
    def assert_names(error, store, key):  # it says where the object really is
        assert (error.key, error.store) in [(SPREAD.place(key), store.url), (key, store.url)]
        assert error.key in str(error)
        assert store.url in str(error)


class _Memory(StoreContract):
    def make_store(self, folder):
        return MemoryStore()


class TestSpreadMemory(_SpreadContract, _Memory):
    pass


class TestSpreadMemoryInParts(_SpreadContract, TestMemoryInParts):
    pass


class TestSpreadLocal(_SpreadContract, _InFolder):
    pass


class TestNotSpread(_Memory):
    def make_store(self, folder):
        return SpreadStore(super().make_store(folder))


del _InFolder, TestMemoryInParts, StoreContract  # they are collected where they are defined


# -- the mapping ---------------------------------------------------------------------------------


def test_the_mapping_never_changes() -> None:
    """Later versions of Limpet must find what this one has written."""
    assert SPREAD.place(SHARD) == f"spread-02/{SHARD}"
    assert SPREAD.place(INDEX) == f"spread-02/{INDEX}"
    assert Spread("xxh3-128+rank", 256).place(SHARD) == f"spread-22/{SHARD}"
    first = f"version_0.1/{shard_name(0, 1, ATTEMPT)}"
    assert Spread("xxh3-128+rank", 3).place(first) == f"spread-01/{first}"


@given(
    st.integers(0, 10**18 - 1),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**6),
    st.integers(2, 256),
)
@settings(max_examples=200)
def test_every_shard_has_one_place(step: int, branch: int, rank: int, prefixes: int) -> None:
    spread = Spread("xxh3-128+rank", prefixes)
    for name in (shard_name(rank, rank + 1, ATTEMPT), index_name(rank, rank + 1, ATTEMPT)):
        key = f"{Version(step, branch)}/{name}"
        assert names.is_spreadable(key)
        folder, _, rest = spread.place(key).partition("/")
        assert folder in spread.folders
        assert names.is_spread_folder(folder)
        assert rest == key
        assert not names.is_spreadable(spread.place(key))


@pytest.mark.parametrize("prefixes", [2, 16, 100, 256])
def test_shards_are_spread_evenly(prefixes: int) -> None:
    ranks = 64 * prefixes
    spread = Spread("xxh3-128+rank", prefixes)
    places = Counter(
        spread.place(f"version_7/{shard_name(rank, ranks, ATTEMPT)}").partition("/")[0]
        for rank in range(ranks)
    )
    assert sorted(places.values()) == [64] * prefixes


def test_the_versions_of_one_rank_are_spread() -> None:
    places = Counter(
        SPREAD.place(f"version_{100 * n}/{shard_name(0, 1, ATTEMPT)}")[:9] for n in range(1600)
    )
    assert len(places) == 16
    assert max(places.values()) < 2 * 100


@pytest.mark.parametrize(
    "key",
    [
        "manifest.json", "version_1/manifest.json", "version_1/eval-val.7f3a9c01d2e4.json",
        "version_1", "version_01/" + shard_name(0, 1, ATTEMPT), shard_name(0, 1, ATTEMPT),
        "pin-7f3a9c01d2e4.json", "writer.json", "branch-1.json",
        "request-save.json", "a/version_1/" + shard_name(0, 1, ATTEMPT),
        "version_1/a/" + shard_name(0, 1, ATTEMPT), "final/" + shard_name(0, 1, ATTEMPT),
        f"version_1/{shard_name(0, 1, ATTEMPT)}\n", f"spread-00/{SHARD}",
    ],
)  # fmt: skip
def test_nothing_else_is_spread(key: str) -> None:
    assert not names.is_spreadable(key)
    store = spread_memory()
    put(store, key, b"1")
    assert key in keys(store.unspread)
    assert store.get(key, 1) == b"1"
    store.delete(key)
    assert keys(store.unspread) == [names.SPREAD]


def test_keys_are_the_usual_ones() -> None:
    store = spread_memory()
    assert put(store, SHARD, b"12").key == SHARD
    assert store.put_if_absent(INDEX, b"3").key == INDEX
    assert keys(store.unspread) == sorted([SPREAD.place(SHARD), SPREAD.place(INDEX), names.SPREAD])
    assert keys(store) == sorted([SHARD, INDEX, names.SPREAD])
    assert keys(store, "version_120") == sorted([SHARD, INDEX])
    assert store.stat(SHARD) == next(s for s in store.list("") if s.key == SHARD)
    assert store.stat(SHARD).key == SHARD
    upload = store.put(SHARD.replace("00003", "00004"), 5)
    [partial] = store.partials("")
    assert partial.key.startswith("version_120/")
    assert [p.key for p in store.unspread.partials("")] != [partial.key]
    store.delete(partial.key)
    assert list(store.unspread.partials("")) == []
    upload.abort()


# -- the record ----------------------------------------------------------------------------------


def test_an_unspread_run_looks_for_the_record_only_before_it_writes() -> None:
    reads = []

    class Counting(MemoryStore):
        def get(self, key, limit):
            reads.append(key)
            return super().get(key, limit)

    inner = Counting()
    state = {"x": np.arange(9), "progress": limpet.Progress()}
    with limpet.Checkpointer(inner, state, save=limpet.EverySteps(1)) as ckpt:
        for _ in range(3):
            ckpt.step()
            ckpt.wait()
    assert reads.count(names.SPREAD) == 1
    reads.clear()
    run = limpet.Run(inner)
    assert [s.verify().ok for s in run.snapshots()] == [True] * 3
    assert run.latest().step == 3
    assert names.SPREAD not in reads


def test_a_spread_run_reads_the_record_once_and_each_file_once() -> None:
    calls: Counter[str] = Counter()

    class Counting(MemoryStore):
        def _find(self, key):
            calls[key] += 1
            return super()._find(key)

    inner = Counting()
    limpet.Run(inner).set_spread(16)
    state = {"x": np.arange(9), "progress": limpet.Progress()}
    with limpet.Checkpointer(inner, state, save=limpet.EverySteps(1)) as ckpt:
        for _ in range(3):
            ckpt.step()
            ckpt.wait()
    assert calls[names.SPREAD] == 3  # two by set_spread, before and after it wrote the record
    calls.clear()
    run = limpet.Run(inner)
    for snapshot in run.snapshots():
        reader_of(snapshot).check_files()
    wrong = [key for key in calls if names.is_spreadable(key)]
    assert len(wrong) == 1  # the first shard is looked for at its usual place
    assert calls[names.SPREAD] == 1


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_one_of_several_creators_wins(kind: str, tmp_path) -> None:
    for attempt in range(20):
        inner = MemoryStore() if kind == "memory" else LocalStore(tmp_path / str(attempt))
        barrier, values = Barrier(6), [4, 16, 16, 5, 256, 16]

        def create(prefixes: int) -> int | LimpetError:
            run = limpet.Run(inner)  # noqa: B023
            barrier.wait()  # noqa: B023
            try:
                run.set_spread(prefixes)
            except LimpetError as e:
                return e
            return prefixes

        with ThreadPoolExecutor(6) as threads:
            results = [*threads.map(create, values)]
        record = read_spread(inner)
        assert record is not None
        for value, result in zip(values, results, strict=True):
            if value == record.prefixes:
                assert result == value
            else:
                assert f"spread={record.prefixes}" in str(result)


@pytest.mark.parametrize("prefixes", [0, 1, -3, 257, 16.0, "16", True, None])
def test_an_invalid_number_is_refused(prefixes) -> None:
    store = MemoryStore()
    with pytest.raises(LimpetError, match="from 2 to 256"):
        limpet.Run(store).set_spread(prefixes)
    if prefixes is not None:
        with pytest.raises(LimpetError, match="spread="):
            limpet.Checkpointer(store, {}, spread=prefixes)
    assert keys(store) == []


def test_another_number_is_refused() -> None:
    store = spread_memory(16)
    limpet.Run(store).set_spread(16)
    with pytest.raises(LimpetError, match="spread=16") as caught:
        limpet.Run(store).set_spread(8)
    assert "spread=8" in str(caught.value)
    assert read_spread(store) == SPREAD


def test_a_run_with_versions_is_not_spread_later() -> None:
    store = MemoryStore()
    limpet.save(store.at("version_1"), {"x": 1}, step=1)
    with pytest.raises(LimpetError, match="versions that are not spread"):
        limpet.Run(store).set_spread(16)
    assert names.SPREAD not in keys(store)


def save_spread(store: Store, prefixes: int | None, steps: int) -> None:
    state = {"x": np.arange(9), "progress": limpet.Progress()}
    with limpet.Checkpointer(
        store, state, save=limpet.EverySteps(1), spread=prefixes
    ) as checkpointer:
        checkpointer.resume()
        for _ in range(steps):
            checkpointer.step()
            checkpointer.wait()


def follow_advice(error: LimpetError, number: int | None) -> None:
    """Do what the message says."""
    calls = re.findall(r"limpet\.(?:open_store|Run)\([^)]*\)\.\w+\([^)]*\)", str(error))
    assert len(calls) == (1 if number is None else 2)
    for call in calls:
        eval(call.replace("(N)", f"({number})"), {"limpet": limpet})


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("prefixes", [None, 5, 16])
@pytest.mark.parametrize("raw", [b"", b'{"of": "another program"}', encode_spread(SPREAD)[:-9]])
def test_the_advice_restores_a_record(
    tmp_path: Path, raw: bytes, prefixes: int | None, steps: int
) -> None:
    url = str(tmp_path / "run")
    save_spread(open_store(url), prefixes, steps)
    store = open_store(url)
    before = store.get(names.SPREAD, 1 << 20) if prefixes else None
    store.delete(names.SPREAD)
    store.put_if_absent(names.SPREAD, raw)
    if prefixes is None:  # the files are at their usual places
        assert limpet.load(f"{url}/version_1")["x"].tolist() == [*range(9)]
        assert limpet.Run(url).latest().verify().ok
    else:
        for call in (limpet.Run(url).latest, lambda: limpet.load(f"{url}/version_1")):
            with pytest.raises(
                FormatError, match=r"damaged or of another program.*Delete the file"
            ):
                call()
    for call in (
        lambda: save_spread(open_store(url), None, 1),
        lambda: limpet.Run(url).set_spread(5),
    ):
        with pytest.raises(FormatError, match="damaged or of another program") as caught:
            call()
    follow_advice(caught.value, prefixes)
    assert (store.get(names.SPREAD, 1 << 20) if prefixes else None) == before
    save_spread(open_store(url), prefixes, 1)
    assert limpet.Run(url).latest().step == steps + 1
    assert limpet.Run(url).latest().verify().ok


def test_a_lost_record_of_a_run_without_versions_needs_a_number_that_fits() -> None:
    """With another number, sweep would not look where failed saves have left files."""
    store = MemoryStore("orphans")
    limpet.Run(store).set_spread(16)
    spread = limpet.Run(store).store.spread
    orphans = [
        spread.place(f"version_{n}/shard-00000-of-00001.0123456789ab.safetensors") for n in range(8)
    ]
    for key in orphans:
        store.put_if_absent(key, b"x")
    store.delete("spread.json")
    with pytest.raises(LimpetError, match="was lost, and 2 is not its number"):
        limpet.Run(store).set_spread(2)
    limpet.Run(store).set_spread(16)
    assert len(limpet.Run(store).sweep(grace=0).removed) == len(orphans)
    assert [s.key for s in store.list("")] == ["spread.json"]


def test_a_lost_record_is_restored_only_with_a_number_that_fits() -> None:
    store = MemoryStore()
    save_spread(store, 16, 9)
    before = store.get(names.SPREAD, 1 << 20)
    store.delete(names.SPREAD)
    put(store, "spread-00/notes.txt", b"1")  # of somebody else
    with pytest.raises(NoSnapshot, match=r"is missing, and so is spread\.json"):
        limpet.Run(store).latest()
    with pytest.raises(FormatError, match=r"Call limpet\.Run\('.*'\)\.set_spread\(N\)"):
        reader_of(limpet.Run(store).open(Version(9))).check_files()
    for number in (2, 15, 17, 256):
        with pytest.raises(LimpetError, match=r"lost.*that fits the files: 16, found"):
            limpet.Run(store).set_spread(number)
    limpet.Run(store).set_spread(16)
    assert store.get(names.SPREAD, 1 << 20) == before
    save_spread(store, 16, 1)
    assert len(limpet.Run(store).snapshots()) == 10


RECORDS = {
    "empty": (b"", ManifestInvalid),
    "flipped": (encode_spread(SPREAD).replace(b"16", b"17"), DigestMismatch),
    "newer": (seal(SPREAD, 4)[0], FormatTooNew),
    "hash": (seal(Spread("md5", 16))[0], ManifestInvalid),  # type: ignore[arg-type]
    "one": (seal(Spread("xxh3-128+rank", 1))[0], ManifestInvalid),
    "many": (seal(Spread("xxh3-128+rank", 257))[0], ManifestInvalid),
    "long": (b" " * ((1 << 20) + 1), LimpetError),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_record_is_never_absent(name: str) -> None:
    inner = MemoryStore()
    state = {"x": np.arange(9), "progress": limpet.Progress()}
    with limpet.Checkpointer(inner, state, save=limpet.EverySteps(1), spread=16) as ckpt:
        ckpt.step()
    before = {s.key: inner.get(s.key, 1 << 20) for s in inner.list("")}
    raw, error = RECORDS[name]
    inner.delete(names.SPREAD)
    inner.put_if_absent(names.SPREAD, raw)
    for call in (
        lambda: reader_of(limpet.Run(inner).open(Version(1))).check_files(),
        lambda: limpet.Run(inner).set_spread(16),
        lambda: limpet.Run(inner).spread_folders(),
        lambda: limpet.Run(inner).sweep(grace=0, now=2e12),
        lambda: limpet.Run(inner).delete(Version(1)),
        lambda: limpet.Run(inner).store.put(SHARD, 1),
        lambda: limpet.Run(inner).store.delete(SHARD),
        lambda: [*limpet.Run(inner).store.list("")],
    ):
        with pytest.raises(error, match=names.SPREAD):
            call()
    for call in (
        lambda: limpet.Run(inner).latest(),
        lambda: limpet.Checkpointer(inner, dict(state)).resume(),
    ):
        with pytest.raises(LimpetError, match=names.SPREAD):  # no version can be read
            call()
    inner.delete(names.SPREAD)
    inner.put_if_absent(names.SPREAD, before[names.SPREAD])
    assert {s.key: inner.get(s.key, 1 << 20) for s in inner.list("")} == before


# -- objects at the other place ------------------------------------------------------------------


def test_a_save_that_began_before_the_record_can_be_read() -> None:
    inner = MemoryStore()
    early = spread_store(inner)
    put(early, SHARD, b"early")
    reader = spread_store(inner)
    assert reader.get(SHARD, 9) == b"early"
    limpet.Run(inner).set_spread(16)
    for store in (early, reader, spread_store(inner)):
        assert store.get(SHARD, 9) == b"early"
        assert store.stat(SHARD).length == 5
    late = spread_store(inner)
    put(late, INDEX, b"late")
    for store in (early, reader, late):
        assert store.get(INDEX, 9) == b"late"  # the others learn of the record
    assert keys(late) == sorted([SHARD, INDEX, names.SPREAD])
    late.delete(SHARD)
    late.delete(INDEX)
    assert keys(inner) == [names.SPREAD]


def test_a_stray_shard_is_deleted_after_a_listing_of_its_folder() -> None:
    store = spread_memory()
    put(store.unspread, SHARD, b"1")
    assert [e.name for e in store.list_unspread("version_120")] == [SHARD.partition("/")[2]]
    store.delete(SHARD)
    assert keys(store.unspread) == [names.SPREAD]


def test_a_missing_shard_is_not_found_at_both_places() -> None:
    for store in (spread_memory(), spread_store(MemoryStore())):
        with pytest.raises(NotFound):
            store.stat(SHARD)


def test_reading_needs_no_permission_for_the_record_of_an_unspread_run() -> None:
    """S3 denies access to a missing object if the user must not list the bucket."""

    class Guarded(MemoryStore):
        def _find(self, key):
            try:
                return super()._find(key)
            except NotFound as e:
                raise Denied("denied", key=key, store=self.url) from e

    inner = Guarded()
    put(inner, SHARD, b"1")
    assert spread_store(inner).get(SHARD, 1) == b"1"
    with pytest.raises(Denied):
        spread_store(inner).get(INDEX, 1)
    inner.put_if_absent(names.SPREAD, encode_spread(SPREAD))
    put(inner, SPREAD.place(INDEX), b"2")
    reader = spread_store(inner)
    assert reader.get(INDEX, 1) == b"2"
    assert reader.get(SHARD, 1) == b"1"  # of a save that began before the record, which is known
    with pytest.raises(Denied):
        reader.get(SHARD.replace("120", "121"), 1)


def test_a_snapshot_that_is_opened_without_its_run_says_so() -> None:
    inner = MemoryStore()
    state = {"x": np.arange(9), "progress": limpet.Progress()}
    with limpet.Checkpointer(inner, state, save=limpet.EverySteps(1), spread=2) as ckpt:
        ckpt.step()
    with pytest.raises(FormatError, match="RUN/version_N"):
        limpet.load(inner.at("version_1"))
