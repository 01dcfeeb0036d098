"""The contents of a snapshot: statistics are right, and read no more bytes than allowed."""

import tracemalloc

import numpy as np
import pytest
import torch

import limpet
from limpet.snapshot.contents import read_contents
from limpet.snapshot.reader import open_snapshot
from limpet.storage.memory import MemoryStore
from limpet.types import MIB
from tests.trainings import flip_bit, shard_of


def read(state, earlier=None, limit=64 * MIB, most=400):
    store = MemoryStore()
    limpet.save(store.at("version_1"), state if earlier is None else earlier)
    limpet.save(store.at("version_2"), state)
    before = None if earlier is None else open_snapshot(store.at("version_1"))
    return read_contents(open_snapshot(store.at("version_2")), before, most, limit)


def test_statistics_are_those_of_numpy():
    values = np.random.default_rng(0).normal(2, 3, (300, 70)).astype(np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    found = read({"x": values}).statistics["x"]
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (found.elements, found.nans, found.infinite) == (21_000, 1, 2)
    assert found.mean == pytest.approx(finite.mean())
    assert found.deviation == pytest.approx(finite.std())
    assert (found.low, found.high) == (finite.min(), finite.max())
    assert list(found.histogram) == np.histogram(finite, 24)[0].tolist()
    assert found.change is None


@pytest.mark.parametrize(
    ("value", "mean", "low", "high"),
    [
        (np.array([True, False, True, True]), 0.75, 0, 1),
        (np.array([3 + 4j, 0]), 2.5, 0, 5),
        (np.array([-(2**63), 2**63 - 1]), 0, -(2.0**63), 2.0**63),
        (np.array([2**64 - 1], np.uint64), 2.0**64, 2.0**64, 2.0**64),
        (np.array([1e308, -1e308, 1e308]), 1e308 / 3, -1e308, 1e308),
        (np.array([5e-324, 0]), 0, 0, 5e-324),
        (np.array(7, np.int8), 7, 7, 7),
        (torch.tensor([1.5, -2.5], dtype=torch.bfloat16), -0.5, -2.5, 1.5),
        (np.array([1, 3], np.float16), 2, 1, 3),
        (np.array([np.nan, np.nan]), np.nan, np.nan, np.nan),
    ],
)
def test_every_kind_of_number(value, mean, low, high):
    found = read({"x": value}).statistics["x"]
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert (found.low, found.high) == pytest.approx((low, high), nan_ok=True)
    assert sum(found.histogram) == found.elements - found.nans - found.infinite


def test_what_has_no_numbers():
    state = {
        "empty": np.empty((0, 3)),
        "float8": torch.zeros(4, dtype=torch.float8_e4m3fn),
        "record": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "blob": bytes(10_000),
        "n": 1,
    }
    contents = read(state)
    assert contents.statistics == {}
    assert contents.problem is None
    assert [row.key for row, *_ in contents.rows] == [*state]


def test_the_change_is_relative_to_the_snapshot_before():
    before = {"a": np.full(1000, 2.0), "b": np.ones(100_000), "c": np.ones(3), "d": np.zeros(3)}
    after = {"a": np.full(1000, 2.5), "b": np.ones(100_000), "c": np.ones(4), "d": np.ones(3)}
    contents = read(after, before)
    changes = {key: found.change for key, found in contents.statistics.items()}
    assert changes == {"a": 0.25, "b": 0.0, "c": None, "d": np.inf}
    assert contents.statistics["d"].describe(3)[-1] == "from 0"


def test_no_change_means_that_all_bytes_are_equal():
    """Small tensors share a chunk, so that digests do not tell. Of a large one, a part is read."""
    before = {"zero": np.zeros(4), "nan": np.ones(4), "sign": np.zeros(4), "other": np.ones(4)}
    before["large"] = np.ones((40, MIB // 4), np.float32)
    after = {key: value.copy() for key, value in before.items()}
    after["nan"][2], after["sign"][1], after["other"][0], after["large"][-1, -5:] = (
        np.nan,
        -0.0,
        2,
        7,
    )
    statistics = read(after, before, limit=20 * MIB).statistics
    changes = {key: found.describe(before[key].size)[-1] for key, found in statistics.items()}
    least = dict.fromkeys(("nan", "sign", "large"), "0.00%")
    assert changes == {"zero": "none", "other": "50.00%", **least}


class Counting(MemoryStore):
    nbytes = 0

    def get_range(self, key, offset, length, into):
        Counting.nbytes += length
        super().get_range(key, offset, length, into)


@pytest.mark.parametrize("limit", [0, 1, 70_000, 5 * MIB, 9 * MIB, 30 * MIB, 300 * MIB])
@pytest.mark.parametrize("has_earlier", [False, True])
def test_no_more_bytes_are_read_than_allowed(limit, has_earlier):
    """Chunks are read whole: large ones have 4 MiB, and small tensors share one."""
    store, rng = Counting(), np.random.default_rng(0)
    for version in ("version_1", "version_2"):
        state = {f"small{i}": rng.normal(size=20 + i) for i in range(50)}
        state |= {f"large{i}": rng.normal(size=(1 + i, MIB // 4)) for i in range(5)}
        limpet.save(store.at(version), state)
    new, old = (open_snapshot(store.at(f"version_{n}")) for n in (2, 1))
    new.indexes(), old.indexes()
    Counting.nbytes = 0
    contents = read_contents(new, old if has_earlier else None, 400, limit)
    assert Counting.nbytes <= limit
    assert contents.problem is None
    assert len(contents.statistics) == {0: 0, 1: 0}.get(limit, len(contents.statistics))
    if limit >= 9 * MIB:
        assert "large0" in contents.statistics
    if limit == 300 * MIB:
        assert len(contents.statistics) == 55
        assert all(s.elements == np.prod(new.leaves[k][1]) for k, s in contents.statistics.items())


def test_damaged_bytes_are_a_problem_and_the_rest_is_shown():
    store = MemoryStore()
    limpet.save(store.at("version_1"), {"x": np.arange(9.0)})
    flip_bit(store, shard_of(store, "version_1"))
    contents = read_contents(open_snapshot(store.at("version_1")), None, 400, 64 * MIB)
    assert "is damaged" in contents.problem.brief
    assert len(contents.rows) == contents.row_count == 1


def test_statistics_need_memory_for_few_numbers():
    """A number of one byte becomes one of eight: not the whole tensor at once."""
    store = MemoryStore()
    limpet.save(store.at("version_1"), {"x": np.arange(16 * MIB, dtype=np.uint8)})
    snapshot = open_snapshot(store.at("version_1"))
    tracemalloc.start()
    found = read_contents(snapshot, None, 400, 64 * MIB).statistics["x"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MIB * 2 + 8 * 8 * MIB
    assert (found.elements, found.mean) == (16 * MIB, pytest.approx(127.5))
    assert found.deviation == pytest.approx(((256**2 - 1) / 12) ** 0.5)
    assert sum(found.histogram) == 16 * MIB


def test_rows_are_limited():
    contents = read({f"x{i}": np.ones(2) for i in range(100)}, most=10)
    assert (len(contents.rows), contents.row_count, len(contents.statistics)) == (10, 100, 10)
