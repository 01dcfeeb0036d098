"""A table in a version: plain values, and segments of rows in the order of their buckets.

A save adds one *segment*, of all rows or of those that changed since the last version, and carries
the earlier ones over. Each server writes and reads its own *part* of each: the rows of its buckets.
``docs/format.md`` describes the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limpet.buffers import BufferPool
from limpet.errors import ManifestInvalid
from limpet.format.names import join_key
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.chunks import Target
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays import LocalBoxes
from limpet.state.arrays.own import Source
from limpet.tables.ids import BUCKETS, bucket_of, unique
from limpet.tables.rows import Cut, Rows
from limpet.threads import Workers, in_parallel
from limpet.types import BLOCK_SIZE, DTYPES, MIB, Box

_READ_BYTES = 32 * MIB
"""The bytes of the widest column of a later segment that are read at once."""


Lengths = NDArray[np.int64]
"""The numbers of rows, and of deleted ids, in each server's part of a segment: ``[2, servers]``."""


def leaves_of(saved: Mapping[str, Any]) -> dict[str, LeafView]:
    """Return the leaves of a segment's tree by the name of their column: slots as ``slot/NAME``."""
    slots = {f"slot/{name}": leaf for name, leaf in saved["slots"].items()}
    return {name: leaf for name, leaf in saved.items() if name != "slots"} | slots


# -- saving ----------------------------------------------------------------------------------------


class RowsSource(Source):
    """Rows from ``first`` on of a column that ``read(first, stop, out)`` reads."""

    is_held = True

    def __init__(
        self, read: Callable[[int, int, memoryview], object], first: int, dtype: str, shape: Any
    ) -> None:
        self._read, self._first, self.dtype, self.shape = read, first, dtype, shape

    def read_into(self, start: int, view: memoryview) -> None:
        row = self.nbytes // self.shape[0]
        first, stop = start // row, -(-(start + len(view)) // row)
        is_whole = (stop - first) * row == len(view)
        out = view if is_whole else memoryview(bytearray((stop - first) * row))
        self._read(self._first + first, self._first + stop, out)
        if not is_whole:
            view[:] = out[start - first * row :][: len(view)]


class CarriedSource(RowsSource):
    """Rows ``first_row`` to ``stop_row`` of a leaf of the base of a save.

    A save that refers to the base does not read it if the rows are a box of the same leaf, at the
    same place, and the base has that box, too. Otherwise, the rows are read and checked.
    """

    def __init__(self, leaf: LeafView, first_row: int, stop_row: int) -> None:
        box = _rows_box(leaf.shape, first_row, stop_row)
        super().__init__(partial(self._read_leaf, leaf), first_row, leaf.dtype, box.sizes)
        self.carried = leaf._reader.digest, leaf._source_key, box.offsets

    @staticmethod
    def _read_leaf(leaf: LeafView, first: int, stop: int, out: memoryview) -> None:
        reader = leaf._reader
        request, target = _request(leaf, first, stop, np.frombuffer(out, np.uint8))
        # buffers of its own: the threads of the save may wait while they have all of theirs
        workers = Workers(BufferPool(2 * BLOCK_SIZE), 1, check_time=reader.location.check_time)
        reader.read([request], [target], check_headers=False, workers=workers)


def _rows_box(shape: tuple[int, ...], first: int, stop: int) -> Box:
    return Box((first, *[0] * (len(shape) - 1)), (stop - first, *shape[1:]))


def _request(
    leaf: LeafView, first: int, stop: int, into: NDArray[Any]
) -> tuple[ReadRequest, Target]:
    box, address = _rows_box(leaf.shape, first, stop), into.__array_interface__["data"][0]
    return ReadRequest(leaf._source_key, box), Target(leaf.dtype, box.sizes, into, address)


def segment_tree(
    lengths: Lengths, ranges: Sequence[range], cuts: Mapping[int, Cut], saved: Any
) -> dict[str, Any]:
    """Return the tree of a segment, of which this process has the parts of the servers whose
    numbers have cuts: a new one, or one of the base (``saved``, with a ``LeafView`` per leaf)."""
    leaves = {} if saved is None else leaves_of(saved)
    kinds = {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in leaves.items()}
    tree: dict[str, Any] = {"slots": {}}
    for name, (dtype, tail) in (kinds or next(iter(cuts.values())).kinds).items():
        is_per_bucket, boxes = name.endswith("_per_bucket"), []
        counts = [*map(len, ranges)] if is_per_bucket else lengths[int(name == "deleted")]
        starts = np.cumsum([0, *counts]).tolist()
        shape = starts[-1], *tail
        for number, cut in cuts.items():
            first, stop = starts[number : number + 2]
            if first < stop or not starts[-1]:
                box, at = _rows_box(shape, first, stop), first if is_per_bucket else 0
                new = RowsSource(partial(cut.read, name), at, dtype, box.sizes)
                boxes.append((box, CarriedSource(leaves[name], first, stop) if leaves else new))
        into, name = (tree["slots"], name[5:]) if name.startswith("slot/") else (tree, name)
        into[name] = LocalBoxes(shape, boxes, dtype)
    return tree


# -- reading ---------------------------------------------------------------------------------------


class StoredSegment:
    """A segment of a version. ``saved``: its tree, with a ``LeafView`` for each leaf."""

    def __init__(
        self, reader: SnapshotReader, set_key: str, name: str, saved: Mapping[str, Any]
    ) -> None:
        self.reader, self.name, self.key = reader, name, join_key(set_key, name)
        leaves = leaves_of(saved)
        per_bucket = leaves.pop("rows_per_bucket"), leaves.pop("deleted_per_bucket")
        self._deleted, self.columns = leaves.pop("deleted"), leaves
        self.rows_per_bucket = self._counts(per_bucket[0], self.columns["ids"])
        self.deleted_per_bucket = self._counts(per_bucket[1], self._deleted)
        lengths = {leaf.shape[0] for leaf in self.columns.values()}
        if len(lengths) > 1:
            self._fail("columns of one length", sorted(lengths))

    def _counts(self, leaf: LeafView, counted: LeafView) -> NDArray[np.int64]:
        counts, count = np.asarray(leaf.read(), np.int64), counted.shape[0]
        if counts.shape != (BUCKETS,) or counts.min() < 0 or counts.sum() != count:
            self._fail(f"{BUCKETS} counts whose sum is {count}", f"a sum of {counts.sum()}")
        return counts

    def _fail(self, expected: str, found: object) -> None:
        what = f"The segment {self.key} of {self.reader.url} is not valid"
        todo = "Load another version. Report this as a bug: its digests are right"
        raise ManifestInvalid(what, expected=expected, found=str(found), todo=todo, leaf=self.key)

    def range_of(self, counts: NDArray[np.int64], buckets: range) -> tuple[int, int]:
        """Return the first row of some buckets, and the one after the last."""
        first = int(counts[: buckets.start].sum())
        return first, first + int(counts[buckets.start : buckets.stop].sum())

    def deleted(self, buckets: range) -> NDArray[np.int64]:
        """Return the deleted ids of some buckets, checked."""
        first, stop = self.range_of(self.deleted_per_bucket, buckets)
        ids = np.asarray(self._deleted[first:stop], np.int64)
        self._require_distinct(ids)
        self._check(ids, self.deleted_per_bucket, first)
        return ids

    def _check(self, ids: NDArray[np.int64], counts: NDArray[np.int64], first: int) -> None:
        ends = np.clip(np.cumsum(counts), first, first + len(ids))
        expected = np.repeat(np.arange(BUCKETS, dtype=np.uint16), np.diff(ends, prepend=first))
        parts = [slice(n, n + MIB) for n in range(0, len(ids), MIB)]  # for small temporaries
        if not all(np.array_equal(bucket_of(ids[part]), expected[part]) for part in parts):
            self._fail("ids in the order of their buckets", "an id of another bucket")

    def _require_distinct(self, ids: NDArray[np.int64]) -> None:
        if len(unique(ids)[0]) < len(ids):
            self._fail("distinct ids", "an id that occurs twice")

    def read(
        self, names: Sequence[str], first: int, stop: int, into: Mapping[str, NDArray[Any]]
    ) -> None:
        """Read rows of some columns into contiguous memory, and check their digests."""
        parts = []
        for name in names if stop > first else ():
            leaf, part = self.columns[name], into[name]
            if part.nbytes != (stop - first) * row_bytes(leaf):
                self._fail(f"{name} of {part.nbytes} bytes", f"{list(leaf.shape)} {leaf.dtype}")
            parts.append(_request(leaf, first, stop, part))
        if parts:
            requests, targets = zip(*parts)
            self.reader.read(requests, targets, check_headers=False)
        if "ids" in names:
            self._check(into["ids"][: stop - first], self.rows_per_bucket, first)

    def blocks(self, names: Sequence[str], buckets: range) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield blocks of some buckets: columns (with ``ids``), as bytes ``[rows, width]`` but for
        ids."""
        first, stop = self.range_of(self.rows_per_bucket, buckets)
        widths = {name: row_bytes(self.columns[name]) for name in names}
        step = max(1, _READ_BYTES // max(widths.values()))
        for start in range(first, stop, step):
            end = min(stop, start + step)
            block: dict[str, NDArray[Any]] = {
                name: np.empty((end - start, width), np.uint8) for name, width in widths.items()
            }
            block["ids"] = block["ids"].reshape(-1).view(np.int64)
            self.read(names, start, end, block)
            self._require_distinct(block["ids"])
            yield block


def row_bytes(leaf: LeafView) -> int:
    return DTYPES[leaf.dtype].itemsize * int(np.prod(leaf.shape[1:], dtype=int))


def stored_segments(
    reader: SnapshotReader, key: str, saved: Mapping[str, Any]
) -> list[StoredSegment]:
    """Return the segments of a set of rows, oldest first."""
    return [StoredSegment(reader, key, name, segment) for name, segment in saved.items()]


def restore_rows(
    rows: Rows, segments: Sequence[StoredSegment], buckets: range, names: Sequence[str] = ()
) -> None:
    """Fill an empty set of rows from the segments of a version: some buckets, and some columns, by
    default all. The first segment is read into the memory of the rows, the others in blocks."""
    names = names or [*rows.columns]
    for segment in segments[:1]:
        _adopt(rows, segment, names, buckets)
    for segment in segments[1:]:
        apply(rows, segment.deleted(buckets), segment.blocks(names, buckets))
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


def apply(
    rows: Rows, deleted: NDArray[np.int64], blocks: Iterable[Mapping[str, NDArray[Any]]]
) -> None:
    """Delete ids, and write the blocks of a segment into rows."""
    with rows.lock:
        found = rows.find(deleted)
        rows.delete(found[found >= 0])
    for block in blocks:
        with rows.lock:
            _put(rows, block)


def _put(rows: Rows, block: Mapping[str, NDArray[Any]]) -> None:
    numbers = rows.find(block["ids"])
    absent = numbers < 0
    numbers[absent] = rows.insert(block["ids"][absent])
    for name in block.keys() - {"ids"}:
        column = rows.column(name)
        new = torch.from_numpy(block[name]).view(column.dtype).view(-1, *column.shape[1:])
        column.index_copy_(0, torch.from_numpy(numbers), new)


def ranges_from(first_buckets: Sequence[int]) -> list[range]:
    return [range(first, stop) for first, stop in pairwise([*first_buckets, BUCKETS])]


def equal_ranges(count: int) -> list[range]:
    """Return ``count`` ranges with about equally many buckets."""
    return ranges_from([BUCKETS * n // count for n in range(count)])


def balanced_ranges(weights: NDArray[Any], count: int) -> list[range]:
    """Return ``count`` ranges of buckets, none empty, of about equal sums of ``weights``."""
    ends = np.cumsum(weights + weights.sum() / BUCKETS / 1000 + 1e-9)
    firsts = [0]
    for n in range(1, count):
        at = int(np.searchsorted(ends, ends[-1] * n / count))
        firsts.append(min(max(at, firsts[-1] + 1), BUCKETS - count + n))
    return ranges_from(firsts)
