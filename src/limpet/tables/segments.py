"""A table in a version: plain values, and segments of rows in the order of their buckets.

A save adds one *segment*, of all rows or of those that changed since the last version, and carries
the earlier ones over. Each server writes and reads its own *part* of each: the rows of its buckets.
``docs/format.md`` describes the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limpet.buffers import BufferPool
from limpet.errors import ManifestInvalid
from limpet.format.names import join_key
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.snapshot.chunks import Target, execute_read_plan
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import LocalBoxes
from limpet.state.arrays.own import Source
from limpet.tables.hashing import BUCKETS, bucket_of
from limpet.tables.index import unique
from limpet.tables.rows import Column, Cut, Rows
from limpet.tables.shard import TableShard
from limpet.threads import Workers, in_parallel
from limpet.types import BLOCK_SIZE, DTYPES, MIB, Box

_READ_BYTES = 64 * MIB
"""The bytes of the widest column of a later segment that are read at once."""

SETS = ("segments", "candidates")
"""The two sets of rows of a table: those with vectors, and the counts of ids not yet admitted."""


@dataclass(frozen=True)
class Segment:
    """How many rows and deleted ids each part of a stored segment has."""

    rows: Sequence[int]
    deleted: Sequence[int]


def sets_of(shard: TableShard) -> dict[str, Rows]:
    return {n: rows for n, rows in zip(SETS, (shard.rows, shard.candidates)) if rows is not None}


# -- saving ----------------------------------------------------------------------------------------


class CutColumn(Source):
    """A column of the rows of a cut, whose ``read`` this calls."""

    is_held = True

    def __init__(
        self, read: Callable[..., None], name: str, dtype: str, shape: tuple[int, ...]
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self._read = partial(read, name)

    def read_into(self, start: int, view: memoryview) -> None:
        row = self.nbytes // self.shape[0]
        first, stop = start // row, -(-(start + len(view)) // row)
        if (stop - first) * row == len(view):
            self._read(first, stop, view)
            return
        whole = memoryview(bytearray((stop - first) * row))
        self._read(first, stop, whole)
        view[:] = whole[start - first * row :][: len(view)]


class CarriedSource(CutColumn):
    """Rows ``first_row`` to ``stop_row`` of a leaf of the base of a save.

    A save that refers to the base does not read it if the rows are a box of the same leaf, at the
    same place, and the base has that box, too. Otherwise, the rows are read and checked.
    """

    def __init__(self, leaf: LeafView, first_row: int, stop_row: int) -> None:
        shape = (stop_row - first_row, *leaf.shape[1:])
        super().__init__(self._read_leaf, leaf._source_key, leaf.dtype, shape)
        self._reader, self._first_row = leaf._reader, first_row
        offsets = (first_row, *[0] * (len(shape) - 1))
        self.carried = self._reader.digest, leaf._source_key, offsets

    def _read_leaf(self, key: str, first: int, stop: int, view: memoryview) -> None:
        sizes = (stop - first, *self.shape[1:])
        box = Box((self._first_row + first, *[0] * (len(sizes) - 1)), sizes)
        rows = np.frombuffer(view, np.uint8)
        target = Target(self.dtype, sizes, rows, rows.__array_interface__["data"][0])
        reader = self._reader
        with reader.not_found_if_deleted():
            indexes = reader.indexes()
            plan = make_read_plan(indexes, [ReadRequest(key, box)], None)
            # buffers of its own: the threads of the save may wait while they have all of theirs
            workers = Workers(BufferPool(2 * BLOCK_SIZE), 1, check_time=reader.location.check_time)
            execute_read_plan(reader.location, plan, indexes, [target], workers)


class _Computed(Source):
    """A small array that is computed when it is written, such as the rows per bucket."""

    is_held = True

    def __init__(self, make: Callable[[], NDArray[Any]], dtype: str, length: int) -> None:
        self.dtype, self.shape, self._make = dtype, (length,), make

    def read_into(self, start: int, view: memoryview) -> None:
        view[:] = self._make().view(np.uint8)[start : start + len(view)].data


@dataclass(frozen=True)
class Part:
    """The part of one server of a segment that is written: the cut of its rows, and its buckets."""

    number: int
    cut: Cut
    buckets: range


def new_segment(
    columns: Mapping[str, Column], segment: Segment, parts: Sequence[Part]
) -> dict[str, Any]:
    """Return the tree of a segment to write."""
    tree: dict[str, Any] = {"slots": {}}
    starts = np.cumsum([0, *segment.rows]).tolist()
    for name, column in columns.items():
        dtype = str(column.dtype).removeprefix("torch.")
        tail = () if column.width is None else (column.width,)

        def make(part: Part, name: str = name, dtype: str = dtype, tail: Any = tail) -> Source:
            return CutColumn(part.cut.read, name, dtype, (segment.rows[part.number], *tail))

        leaf = _leaf(dtype, (starts[-1], *tail), starts, parts, make)
        set_name, _, slot = name.partition("/")
        (tree["slots"] if slot else tree)[slot or set_name] = leaf
    starts = np.cumsum([0, *segment.deleted]).tolist()
    tree["deleted"] = _leaf(
        "int64",
        (starts[-1],),
        starts,
        parts,
        lambda part: _Computed(lambda: part.cut.deleted, "int64", segment.deleted[part.number]),
    )
    for name in ("rows_per_bucket", "deleted_per_bucket"):

        def count(part: Part, name: str = name) -> Source:
            inside = slice(part.buckets.start, part.buckets.stop)
            make = lambda: getattr(part.cut, name)[inside]  # noqa: E731
            return _Computed(make, "int32", len(part.buckets))

        boxes = [(Box((part.buckets.start,), (len(part.buckets),)), count(part)) for part in parts]
        tree[name] = LocalBoxes((BUCKETS,), boxes, "int32")
    return tree


def _leaf(
    dtype: str,
    shape: tuple[int, ...],
    starts: Sequence[int],
    parts: Sequence[Part],
    make: Callable[[Part], Source],
) -> LocalBoxes:
    """Return an array of which this process has some parts."""
    made, tail = [(starts[part.number], make(part)) for part in parts], [0] * (len(shape) - 1)
    found = [(first, source) for first, source in made if source.shape[0] or not shape[0]]
    boxes = [(Box((first, *tail), source.shape), source) for first, source in found]
    return LocalBoxes(shape, boxes, dtype)


def carried_segment(
    saved: Mapping[str, Any], segment: Segment, parts: Sequence[tuple[int, range]]
) -> dict[str, Any]:
    """Return the tree of a segment that the base has: ``saved``, with a ``LeafView`` per leaf."""

    def carry(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: carry(inner, leaf) for inner, leaf in value.items()}
        boxes = []
        for number, buckets in parts:
            first, stop = buckets.start, buckets.stop
            if not name.endswith("_per_bucket"):
                lengths = segment.deleted if name == "deleted" else segment.rows
                first = sum(lengths[:number])
                stop = first + lengths[number]
            if stop > first or not value.shape[0]:
                sizes = (stop - first, *value.shape[1:])
                box = Box((first, *[0] * (len(sizes) - 1)), sizes)
                boxes.append((box, CarriedSource(value, first, stop)))
        return LocalBoxes(tuple(value.shape), boxes, value.dtype)

    return {name: carry(name, value) for name, value in saved.items()}


# -- reading ---------------------------------------------------------------------------------------


class StoredSegment:
    """A segment of a version. ``saved``: its tree, with a ``LeafView`` for each leaf."""

    def __init__(self, reader: SnapshotReader, key: str, saved: Mapping[str, Any]) -> None:
        self.reader, self.key = reader, key
        self.columns: dict[str, LeafView] = {
            **{name: saved[name] for name in ("ids", "values") if name in saved},
            **{f"slot/{name}": leaf for name, leaf in saved["slots"].items()},
            **{name: saved[name] for name in ("counts", "last_steps")},
        }
        self._deleted: LeafView = saved["deleted"]
        self.rows_per_bucket = self._counts(saved["rows_per_bucket"], self.columns["ids"])
        self.deleted_per_bucket = self._counts(saved["deleted_per_bucket"], self._deleted)
        lengths = {leaf.shape[0] for leaf in self.columns.values()}
        if len(lengths) > 1:
            self._fail("columns of one length", sorted(lengths))

    def _counts(self, leaf: LeafView, counted: LeafView) -> NDArray[np.int64]:
        counts = np.asarray(leaf.read(), np.int64)
        if counts.shape != (BUCKETS,) or counts.min() < 0 or counts.sum() != counted.shape[0]:
            self._fail(
                f"{BUCKETS} counts whose sum is {counted.shape[0]}", f"a sum of {counts.sum()}"
            )
        return counts

    def _fail(self, expected: object, found: object) -> None:
        raise ManifestInvalid(
            f"The segment {self.key} of {self.reader.url} is not valid",
            expected=str(expected),
            found=str(found),
            todo="Load another version. Report this as a bug: its digests are right",
            leaf=self.key,
        )

    def range_of(self, counts: NDArray[np.int64], buckets: range) -> tuple[int, int]:
        """Return the first row of some buckets, and the one after the last."""
        first = int(counts[: buckets.start].sum())
        return first, first + int(counts[buckets.start : buckets.stop].sum())

    def deleted(self, buckets: range) -> NDArray[np.int64]:
        """Return the deleted ids of some buckets, checked."""
        first, stop = self.range_of(self.deleted_per_bucket, buckets)
        ids = np.asarray(self._deleted[first:stop], np.int64)
        self._check(ids, self.deleted_per_bucket, first)
        return ids

    def _check(self, ids: NDArray[np.int64], counts: NDArray[np.int64], first: int) -> None:
        ends = np.clip(np.cumsum(counts), first, first + len(ids))
        expected = np.repeat(np.arange(BUCKETS, dtype=np.uint16), np.diff(ends, prepend=first))
        parts = [slice(n, n + MIB) for n in range(0, len(ids), MIB)]  # for small temporaries
        if not all(np.array_equal(bucket_of(ids[part]), expected[part]) for part in parts):
            self._fail("ids in the order of their buckets", "an id of another bucket")

    def read(
        self, names: Sequence[str], first: int, stop: int, into: Mapping[str, NDArray[Any]]
    ) -> None:
        """Read rows of some columns into contiguous memory, and check their digests."""
        requests, targets = [], []
        for name in names if stop > first else ():
            leaf, part = self.columns[name], into[name]
            sizes = (stop - first, *leaf.shape[1:])
            if part.nbytes != int(np.prod(sizes)) * DTYPES[leaf.dtype].itemsize:
                self._fail(f"{name} of {part.nbytes} bytes", f"{list(leaf.shape)} {leaf.dtype}")
            box = Box((first, *[0] * (len(sizes) - 1)), sizes)
            requests.append(ReadRequest(leaf.key, box))
            targets.append(Target(leaf.dtype, sizes, part, part.__array_interface__["data"][0]))
        if requests:
            self.reader.read(requests, targets, check_headers=False)
        if "ids" in names:
            self._check(into["ids"][: stop - first], self.rows_per_bucket, first)

    def blocks(
        self, names: Sequence[str], buckets: range
    ) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Yield the number of rows of each block of some buckets, and their columns, as bytes but
        for ids, in memory that the next block uses again."""
        first, stop = self.range_of(self.rows_per_bucket, buckets)
        widths = {name: self.row_bytes(self.columns[name]) for name in names}
        rows = max(1, min(stop - first, _READ_BYTES // max(widths.values())))
        memory = {name: np.empty((rows, width), np.uint8) for name, width in widths.items()}
        for start in range(first, stop, rows):
            count = min(rows, stop - start)
            views: dict[str, NDArray[Any]] = {name: a[:count] for name, a in memory.items()}
            if "ids" in views:
                views["ids"] = views["ids"].reshape(-1).view(np.int64)
            self.read(names, start, start + count, views)
            if "ids" in views and len(unique(views["ids"])[0]) < count:
                self._fail("distinct ids", "an id that occurs twice")
            yield count, views

    @staticmethod
    def row_bytes(leaf: LeafView) -> int:
        return DTYPES[leaf.dtype].itemsize * int(np.prod(leaf.shape[1:], dtype=int))


def stored_segments(
    reader: SnapshotReader, key: str, saved: Mapping[str, Any]
) -> dict[str, StoredSegment]:
    """Return the segments of a set of rows by name, oldest first."""
    return {
        name: StoredSegment(reader, join_key(key, name), segment) for name, segment in saved.items()
    }


def restore_rows(
    rows: Rows, segments: Sequence[StoredSegment], buckets: range, names: Sequence[str] = ()
) -> None:
    """Fill an empty set of rows from the segments of a version: those of some buckets, and some
    columns, by default all of ``rows``. The first segment is read into their memory, the others in
    blocks."""
    names = names or [*rows.columns]
    for n, segment in enumerate(segments):
        if n == 0:
            _adopt(rows, segment, names, buckets)
        else:
            with rows.lock:
                found = rows.find(segment.deleted(buckets))
                rows.delete(found[found >= 0])
            for count, columns in segment.blocks(names, buckets):
                with rows.lock:
                    put_rows(rows, count, columns)
    with rows.lock:
        rows.mark_stored()


def _adopt(rows: Rows, segment: StoredSegment, names: Sequence[str], buckets: range) -> None:
    first, stop = segment.range_of(segment.rows_per_bucket, buckets)
    with rows.lock:
        rows.reserve(stop - first)
        columns = ((name, rows.column(name, stop - first)) for name in names)
        into = {n: (c if n == "ids" else c.view(torch.uint8)).numpy() for n, c in columns}
        segment.read(["ids"], first, stop, into)
        others = partial(segment.read, [n for n in names if n != "ids"], first, stop, into)
        # the index is made while the other columns are read
        in_parallel([others, partial(rows.adopt, stop - first)], lambda work: work(), threads=2)
        into.clear()  # no view may live when the rows grow


def put_rows(rows: Rows, count: int, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write a block of ``StoredSegment.blocks`` into rows, under their lock."""
    ids = columns["ids"]
    numbers = rows.find(ids)
    absent = numbers < 0
    numbers[absent] = rows.insert(ids[absent])
    into = torch.from_numpy(numbers)
    for name, array in columns.items():
        if name != "ids":
            column = rows.columns[name]
            block = torch.from_numpy(array).view(column.dtype)
            shape = (count,) if column.width is None else (count, column.width)
            rows.column(name).index_copy_(0, into, block.reshape(shape))


def equal_ranges(count: int) -> list[range]:
    """Return ``count`` ranges with about equally many buckets."""
    return [range(BUCKETS * n // count, BUCKETS * (n + 1) // count) for n in range(count)]


def balanced_ranges(weights: NDArray[Any], count: int) -> list[range]:
    """Return ``count`` ranges of buckets, none empty, of about equal sums of ``weights``."""
    ends = np.cumsum(weights + weights.sum() / BUCKETS / 1000 + 1e-9)
    firsts = [0]
    for n in range(1, count):
        at = int(np.searchsorted(ends, ends[-1] * n / count))
        firsts.append(min(max(at, firsts[-1] + 1), BUCKETS - count + n))
    return [range(a, b) for a, b in zip(firsts, [*firsts[1:], BUCKETS])]
