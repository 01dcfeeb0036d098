"""Cuts: rows as they were at one moment, read while they change."""

import random
import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from limpet.errors import LimpetError
from limpet.tables.ids import BUCKETS, bucket_of
from limpet.tables.rows import Column, Rows

COLUMNS = {
    "values": Column(torch.bfloat16, 3, None),
    "sum": Column(torch.float32, 1, 0.5),
}


class Model:
    """Rows, and the same as a dict: the entries of each id, as text."""

    def __init__(self, seed):
        self.rows, self.content = Rows(COLUMNS), {}
        self.random, self.clock = random.Random(seed), 0
        self.pool = [self.random.randrange(-(2**63), 2**63) for _ in range(60)]

    def write(self, numbers):
        self.clock += 1
        at = torch.from_numpy(numbers)
        ids = self.rows.column("ids")[at]
        self.rows.column("values")[at] = (ids % 251)[:, None].bfloat16() + self.clock % 97
        self.rows.column("sum")[at] += 1
        self.rows.column("counts")[at] += 1
        self.rows.column("last_steps")[at] = self.clock
        for i, number in zip(ids.tolist(), numbers.tolist(), strict=True):
            self.content[i] = tuple(str(self.rows.column(n)[number].tolist()) for n in names())

    def some(self, most=15):
        return np.array(self.random.sample(self.pool, self.random.randint(1, most)))

    def push(self, ids=None):
        ids = self.some() if ids is None else ids
        with self.rows.lock:
            numbers = self.rows.find(ids)
            numbers[numbers < 0] = self.rows.insert(ids[numbers < 0])
            self.rows.before_change(numbers)
            self.write(numbers)

    def delete(self):
        with self.rows.lock:
            numbers = self.rows.find(self.some())
            numbers = numbers[numbers >= 0]
            for i in self.rows.column("ids").numpy()[numbers].tolist():
                del self.content[i]
            self.rows.delete(numbers)

    def act(self):
        what = self.random.random()
        if what < 0.03:  # growth
            count = min(len(self.rows.column("ids")) // 2 + 200, 2000)
            self.push(np.array([self.random.randrange(2**62) for _ in range(count)]))
        elif what < 0.3:
            self.delete()
        else:
            self.push()


def names():
    return ["values", "sum", "counts", "last_steps"]


def read(cut, name, dtype, shape, blocks, between):
    """A column of a cut, in ``blocks`` pieces, with something between them."""
    found = torch.empty((cut.count, *shape), dtype=dtype)
    raw = memoryview(found.view(-1).view(torch.uint8).numpy()) if cut.count else None
    size = len(raw) // cut.count if cut.count else 0
    bounds = np.linspace(0, cut.count, blocks + 1).astype(int).tolist()
    pieces = [*pairwise(bounds)]
    for first, stop in random.Random(cut.count).sample(pieces, len(pieces)):
        between()
        if stop > first:
            cut.read(name, first, stop, raw[first * size : stop * size])
    return found


def content_of(cut, between=lambda: None):
    """All columns of a cut, as a dict, after checks of their order."""
    kinds = {
        "ids": (torch.int64, ()),
        "values": (torch.bfloat16, (3,)),
        "sum": (torch.float32, (1,)),
    }
    kinds |= {"counts": (torch.int32, ()), "last_steps": (torch.int64, ())}
    found = {name: read(cut, name, *kind, 3, between) for name, kind in kinds.items()}
    buckets = bucket_of(found["ids"].numpy())
    assert (np.diff(buckets.astype(int)) >= 0).all()
    assert (np.bincount(buckets, minlength=BUCKETS) == cut.rows_per_bucket).all()
    assert (np.diff(bucket_of(cut.deleted).astype(int)) >= 0).all()
    assert cut.deleted_per_bucket.sum() == len(cut.deleted) == len({*cut.deleted.tolist()})
    assert cut.rows_per_bucket.dtype == cut.deleted_per_bucket.dtype == np.int32
    entries = zip(*(found[name].tolist() for name in names()), strict=True)
    return dict(zip(found["ids"].tolist(), (tuple(map(str, e)) for e in entries), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_versions_of_cuts_equal_the_rows_at_each_cut(seed):
    """Rows change, go, come back, and grow between the reads of full and incremental saves, of
    which some fail, while views for evaluations are held."""
    model, stored, has_version = Model(seed), {}, False
    rows, views = model.rows, []
    for _ in range(12):
        for _ in range(model.random.randint(0, 6)):
            model.act()
        if model.random.random() < 0.5:
            views.append((rows.begin_view("values"), dict(model.content)))
        is_full = not has_version or model.random.random() < 0.2
        cut = rows.begin_cut(is_full=is_full)
        cut.old_bytes_limit = 2**60
        expected = dict(model.content)
        found = content_of(cut, model.act)
        version = (
            {} if is_full else {i: e for i, e in stored.items() if i not in cut.deleted.tolist()}
        )
        version |= found
        assert version == expected
        if is_full:
            assert found == expected
            assert len(cut.deleted) == 0
        is_committed = model.random.random() < 0.7
        cut.end(is_committed=is_committed)
        if is_committed:
            stored, has_version = version, True
        for view, then in views:
            ids = np.array([*model.pool, *[*model.content][-50:], *[*then][-50:]])
            values, is_there = view.find("values", ids)
            assert is_there.tolist() == [i in then for i in ids.tolist()]
            for i, value in zip(
                ids[is_there].tolist(), values[torch.from_numpy(is_there)], strict=True
            ):
                assert str(value.tolist()) == then[i][0]
        if len(views) > 2:
            views.pop(0)[0].end()
    assert rows.count == len(model.content)


def test_an_increment_holds_touched_rows_only():
    model = Model(0)
    model.push(np.arange(1000))
    rows = model.rows
    rows.begin_cut(is_full=True).end(is_committed=True)
    assert rows.begin_cut(is_full=False).count == 0


def test_rows_that_change_during_a_save_are_in_the_next_one():
    model = Model(0)
    model.push(np.arange(100))
    cut = model.rows.begin_cut(is_full=True)
    model.push(np.arange(7))
    cut.end(is_committed=True)
    assert {*content_of(model.rows.begin_cut(is_full=False))} == {*range(7)}


def test_a_save_that_failed_leaves_no_row_and_no_deletion_out():
    model = Model(0)
    rows = model.rows
    model.push(np.arange(100))
    rows.begin_cut(is_full=True).end(is_committed=True)
    model.push(np.arange(10))
    rows.delete(rows.find(np.arange(90, 95)))
    failed = rows.begin_cut(is_full=False)
    rows.delete(rows.find(np.arange(95, 97)))
    model.push(np.arange(20, 22))
    failed.end(is_committed=False)
    cut = rows.begin_cut(is_full=False)
    assert sorted(content_of(cut)) == [*range(10), 20, 21]
    assert sorted(cut.deleted.tolist()) == [*range(90, 97)]


def test_a_full_save_that_failed_touches_no_other_row():
    model = Model(0)
    rows = model.rows
    model.push(np.arange(100))
    rows.begin_cut(is_full=True).end(is_committed=True)
    rows.begin_cut(is_full=True).end(is_committed=False)
    assert rows.begin_cut(is_full=False).count == 0


def test_deletions_of_rows_that_no_version_has_are_not_kept():
    """Else they would be kept forever if nothing is saved."""
    model = Model(0)
    for start in range(0, 100_000, 10_000):
        numbers = model.rows.insert(np.arange(start, start + 10_000))
        model.rows.delete(numbers)
    assert len(model.rows.begin_cut(is_full=False).deleted) == 0


def test_a_row_is_copied_once():
    model = Model(0)
    model.push(np.arange(50))
    cut = model.rows.begin_cut(is_full=True)
    for _ in range(3):
        model.push(np.arange(10))
    row = 8 + 6 + 4 + 4 + 8
    assert cut.old_bytes == 10 * row
    model.rows.delete(model.rows.find(np.arange(8, 12)))
    model.push(np.arange(100, 104))
    assert cut.old_bytes == 12 * row


def test_a_view_copies_only_its_columns():
    model = Model(0)
    model.push(np.arange(50))
    view = model.rows.begin_view("values")
    model.push(np.arange(10))
    assert view.old_bytes == 10 * (8 + 6)


def test_the_old_rows_are_limited():
    """By default to a quarter of the bytes of all rows, but not to less than 4 MiB."""
    model = Model(0)
    model.push(np.arange(400))
    cut = model.rows.begin_cut(is_full=True)
    row = cut._old_row
    assert cut.old_bytes_limit == 4 << 20
    cut.end()
    cut = model.rows.begin_cut(is_full=True)
    cut.old_bytes_limit = 100 * row
    model.push(np.arange(99))
    assert not model.rows.must_wait
    model.push(np.arange(101))
    assert model.rows.must_wait
    cut.end()
    assert not model.rows.must_wait
    assert not Model(1).rows.must_wait


def test_a_cut_of_no_rows_is_empty():
    for rows in (Rows(COLUMNS), Rows({})):
        cut = rows.begin_cut(is_full=True)
        cut.read("ids", 0, 0, memoryview(bytearray()))
        assert cut.count == cut.rows_per_bucket.sum() == 0
        assert not rows.begin_view().find("counts" if rows.count else "ids", np.arange(3))[1].any()
        assert not rows.must_wait


def test_only_one_cut_for_a_save_is_held():
    rows = Rows({})
    rows.begin_cut(is_full=True)
    with pytest.raises(LimpetError, match="held already"):
        rows.begin_cut(is_full=False)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_cut_cannot_be_read_after_its_end(is_read):
    model = Model(0)
    model.push(np.arange(5))
    cut, view = model.rows.begin_cut(is_full=True), model.rows.begin_view("values")
    if is_read:
        cut.read("ids", 0, 5, memoryview(bytearray(40)))
        view.find("values", np.arange(5))
    for held in (cut, view):
        held.end()
    with pytest.raises(LimpetError, match=r"after its end.*one save .* at a time"):
        cut.read("ids", 0, 5, memoryview(bytearray(40)))
    with pytest.raises(LimpetError, match=r"after its end.*one save .* at a time"):
        view.find("values", np.arange(5))


def test_a_cut_gives_its_copies_back_at_its_end():
    """What reads it may live on."""
    model = Model(0)
    model.push(np.arange(500))
    for cut in (model.rows.begin_cut(is_full=True), model.rows.begin_view("values")):
        model.push(np.arange(500))
        assert cut.old_bytes > 0
        old = weakref.ref(cut._old["values"])
        cut.end()
        assert old() is None
        assert len(cut._copies) == 0


def test_threads_read_a_cut_while_another_changes_rows():
    model = Model(0)
    model.push(np.arange(10_000))
    cut = model.rows.begin_cut(is_full=True)
    cut.old_bytes_limit = 2**60
    expected = {i: e[1] for i, e in model.content.items()}
    has_read, found = threading.Event(), []

    def change():
        numbers = np.arange(0, 10_000, 2)
        while not has_read.is_set():
            with model.rows.lock:
                model.rows.before_change(numbers)
                model.rows.column("sum")[torch.from_numpy(numbers)] += 1
                model.rows.insert(np.random.default_rng(len(found)).integers(2**40, 2**62, 500))
            found.append(None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        ids = read(cut, "ids", torch.int64, (), 50, lambda: None).tolist()
        sums = read(cut, "sum", torch.float32, (1,), 50, lambda: None).tolist()
    finally:
        has_read.set()
        thread.join()
    assert {i: str(s) for i, s in zip(ids, sums, strict=True)} == expected
