"""From ids to rows, and the distinct ids of a batch."""

import time

import numpy as np
import pytest

from limpet.errors import LimpetError
from limpet.tables.ids import IdIndex, bucket_of, mix, unique
from tests.tables.ids import EXTREMES, unmix, zipf

NUMBERS = np.arange(20_000, dtype=np.uint64)
ATTACKS = {
    "one bucket": unmix(NUMBERS),
    "the same low bits": unmix(NUMBERS << np.uint64(40)),
    "the same high and low bits": unmix(NUMBERS << np.uint64(24)),
    "consecutive": NUMBERS.view(np.int64),
    "powers of two": np.left_shift(np.int64(1), np.arange(64)),
    "extremes": np.array(EXTREMES),
    "zipf": zipf(5_000, 50_000),
    "one id": np.full(200_000, -1),
    "none": np.empty(0, np.int64),
}


def an_index(ids, step=3_000):
    """An index of distinct ids, and their column."""
    index = IdIndex()
    for start in range(0, len(ids), step):
        part = np.arange(start, min(len(ids), start + step))
        index.insert(ids[part], part, ids)
    return index


def test_the_attacks_are_what_they_say():
    assert len({*bucket_of(ATTACKS["one bucket"])}) == 1
    assert len({*(mix(ATTACKS["the same low bits"]) % np.uint64(2**24))}) == 1


@pytest.mark.parametrize("name", ATTACKS)
def test_distinct_ids_are_in_the_order_of_their_first_occurrence(name):
    ids = ATTACKS[name]
    distinct, places = unique(ids)
    assert distinct.tolist() == [*dict.fromkeys(ids.tolist())]
    assert places.dtype == np.int64
    assert (distinct[places] == ids).all()


@pytest.mark.parametrize("name", ATTACKS)
def test_all_ids_are_found_and_no_others(name):
    """B 12."""
    ids = unique(ATTACKS[name])[0]
    index = an_index(ids)
    assert (index.find(ids, ids) == np.arange(len(ids))).all()
    others = np.setdiff1d(np.concatenate([ids + 7, ids ^ (1 << 50), EXTREMES]), ids)
    assert (index.find(others, ids) == -1).all()


@pytest.mark.parametrize("name", ["one bucket", "the same low bits", "the same high and low bits"])
def test_ids_made_to_collide_cost_about_as_much_as_others(name):
    def seconds(ids):
        times = []
        for _ in range(3):
            start = time.thread_time()
            an_index(ids).find(ids, ids)
            times.append(time.thread_time() - start)
        return min(times)

    usual = np.random.default_rng(0).integers(-(2**63), 2**63, 20_000)
    assert seconds(ATTACKS[name]) < 20 * seconds(usual)


def test_an_index_equals_a_dict_through_insertions_and_removals():
    rng = np.random.default_rng(0)
    index, rows_of, keys, free = IdIndex(), {}, np.zeros(30_000, np.int64), [*range(30_000)]
    pool = rng.integers(-(2**63), 2**63, 4_000)
    for _ in range(300):
        batch = rng.choice(pool, rng.integers(1, 700), replace=False)
        found = index.find(batch, keys)
        assert found.tolist() == [rows_of.get(int(i), -1) for i in batch]
        if rng.random() < 0.5:
            new = batch[found < 0]
            rows = np.array([free.pop() for _ in new], np.int64)
            keys[rows] = new
            index.insert(new, rows, keys)
            rows_of.update(zip(new.tolist(), rows.tolist(), strict=True))
        else:
            old = batch[found >= 0]
            index.remove(old, found[found >= 0])
            free += [rows_of.pop(int(i)) for i in old]
    assert index.nbytes <= 4 * 2**14  # removals leave no slots behind that are never used again


def test_an_id_that_occurs_twice_is_an_error():
    ids = np.array([5, 6, 7, 6])
    with pytest.raises(LimpetError, match=r"^the id 6 occurs twice\.$"):
        IdIndex().insert(ids, np.arange(4), ids)
    index = an_index(np.arange(1000))
    with pytest.raises(LimpetError, match="occurs twice"):
        index.insert(np.array([-4, 3]), np.array([1000, 1001]), np.array([*range(1000), -4, 3]))


def test_the_index_takes_6_to_12_bytes_per_row():
    for count in (10_000, 50_000, 100_000):
        assert 5 <= an_index(np.arange(count)).nbytes / count <= 14


@pytest.mark.slow
def test_distinct_ids_are_found_faster_than_by_numpy():
    ids = zipf(1_000_000, 213_000)

    def seconds(function):
        times = []
        for _ in range(5):
            start = time.thread_time()
            function(ids)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(unique) < 0.7 * seconds(lambda x: np.unique(x, return_inverse=True))
