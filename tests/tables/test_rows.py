"""Rows by id: growth without a copy, deletion, and use again."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from limpet.errors import LimpetError
from limpet.tables.rows import Column, GrowableArray, Rows


def some_rows(ids=()):
    rows = Rows(
        {
            "values": Column(torch.float32, 4, None),
            "small": Column(torch.bfloat16, 2, 3.5),
            "sum": Column(torch.float32, 1, 0.0),
        }
    )
    if len(ids):
        insert(rows, ids)
    return rows


def insert(rows, ids):
    ids = np.asarray(ids, dtype=np.int64)
    numbers = rows.insert(ids)
    rows.column("values")[torch.from_numpy(numbers)] = torch.from_numpy(ids).float()[:, None]
    return numbers


def test_rows_survive_growth_from_a_thousand_to_a_million():
    rows = some_rows(range(1000))
    insert(rows, range(1000, 1_000_000))
    ids = np.random.default_rng(0).permutation(1_000_000)
    found = torch.from_numpy(rows.find(ids))
    assert torch.equal(rows.column("values")[found, 3], torch.from_numpy(ids).float())
    assert (rows.column("small") == 3.5).all()
    assert (rows.column("sum") == 0).all()
    assert rows.count == 1_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("width", [None, 1, 3, 5000])
def test_an_array_grows_and_keeps_its_rows(dtype, width):
    array = GrowableArray(dtype, width)
    assert len(array.view(0)) == 0
    array.reserve(10)
    array.view(10).copy_(torch.arange(10).view(-1, *[1] * (width is not None)))
    for rows in (11, 500, 400, 3000):
        array.reserve(rows)
    assert array.view(10)[7].sum() == 7 * (width or 1)
    assert (array.view(3000)[10:] == 0).all()
    assert array.view(3000).shape == ((3000,) if width is None else (3000, width))


def test_an_array_does_not_move_under_a_view():
    """torch would read freed memory."""
    array = GrowableArray(torch.bfloat16, 4)
    view = array.view(3)[1:]
    with pytest.raises(BufferError):
        array.reserve(1_000_000)
    assert (view == 0).all()
    del view
    array.reserve(1_000_000)


def test_no_method_of_rows_leaves_a_view():
    rows = some_rows(range(100))
    rows.find(np.arange(5))
    rows.before_change(np.arange(5))
    rows.delete(np.arange(5))
    rows.live()
    cut = rows.begin_cut(is_full=True)
    rows.before_change(np.arange(6, 50))
    cut.read("values", 0, 10, memoryview(bytearray(160)))
    cut.find("values", np.arange(20))
    insert(rows, range(1000, 200_000))
    rows.before_change(np.arange(50, 100))
    assert rows.count == 95 + 199_000


def test_no_memory_is_an_error_that_changes_nothing():
    array = GrowableArray(torch.float32, 64)
    with pytest.raises(LimpetError, match=r"no memory for .* rows of a table"):
        array.reserve(2**50)
    assert len(array.view(10)) == 10


def test_too_many_rows_are_refused_before_any_work():
    rows = Rows({})
    with pytest.raises(LimpetError, match=r"more than 2,147,483,647 rows on one server"):
        rows.reserve(2**31)


def test_a_row_that_is_used_again_is_as_new():
    """A new id never inherits a slot or count."""
    rows = some_rows([1, 2, 3])
    for name in ("sum", "small", "counts", "last_steps"):
        rows.column(name).fill_(9)
    rows.delete(rows.find(np.array([2])))
    assert rows.find(np.array([1, 2, 3])).tolist() == [0, -1, 2]
    assert rows.live().tolist() == [0, 2]
    assert insert(rows, [7]).tolist() == [1]
    found = {name: rows.column(name)[1].flatten().tolist() for name in rows.columns}
    assert found == {
        "ids": [7],
        "values": [7.0] * 4,
        "small": [3.5, 3.5],
        "sum": [0.0],
        "counts": [0],
        "last_steps": [0],
    }
    assert rows.count == 3


def test_rows_are_used_again_before_there_are_more():
    rows = some_rows(range(100))
    for _ in range(50):
        rows.delete(rows.live()[::2])
        insert(rows, np.random.default_rng(rows.count).integers(200, 2**60, 100 - rows.count))
    assert len(rows.column("ids")) == 100
    assert rows.nbytes < 100 * 200 + 4096 + 1000


@pytest.mark.slow
def test_a_deletion_costs_the_same_beside_any_number_of_deleted_rows():
    seconds = {}
    for deleted in (10_000, 4_000_000):
        rows = some_rows(range(deleted))
        rows.delete(rows.live())
        times = []
        for n in range(50):
            start = time.perf_counter()
            rows.delete(insert(rows, range(deleted + 100 * n, deleted + 100 * (n + 1))))
            times.append(time.perf_counter() - start)
        seconds[deleted] = min(times)
    assert seconds[4_000_000] < 10 * seconds[10_000]


def test_rows_of_a_version_are_adopted():
    """B 14, 19."""
    rows = some_rows()
    rows.reserve(5000)
    rows.column("ids", 5000)[:] = torch.arange(5000) * 3
    rows.column("values", 5000)[:] = 1.5
    rows.adopt(5000)
    assert rows.find(np.array([0, 3, 14997, 1])).tolist() == [0, 1, 4999, -1]
    assert rows.begin_cut(is_full=False).count == 0


@pytest.mark.slow
def test_rows_take_little_more_memory_than_their_payload_also_while_they_grow():
    """In a process of its own: memory that others freed would be used again, and not be counted."""
    code = (
        "import numpy as np, torch\n"
        "from limpet import tables\n"
        "from limpet.tables.shard import TableShard\n"
        "torch.set_num_threads(1)\n"
        "def rss():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "def a_shard():\n"
        "    return TableShard(tables.Table('words', 64, optimizer=tables.Adagrad(0.1)))\n"
        "grads = torch.ones(20_000, 64)\n"
        "a_shard().push(np.arange(20_000), grads, lr=0.1, step=1)\n"
        "shard, before, worst = a_shard(), rss(), 0\n"
        "for start in range(0, 1_000_000, 20_000):\n"
        "    shard.push(np.arange(start, start + 20_000), grads, lr=0.1, step=1)\n"
        "    if start >= 500_000:\n"
        "        payload = shard.rows.count * (8 + 2 * 256)\n"
        "        worst = max(worst, (rss() - before) / payload)\n"
        "print(worst)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    worst = float(done.stdout)
    assert 1 < worst < 1.15


def test_an_id_that_a_version_has_twice_is_not_adopted():
    rows = some_rows()
    rows.reserve(200_000)
    rows.column("ids", 200_000)[:] = torch.arange(200_000)
    rows.column("ids", 200_000)[199_999] = 5
    with pytest.raises(LimpetError, match="the id 5 occurs twice"):
        rows.adopt(200_000)
