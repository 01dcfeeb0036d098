"""Who reads what: stored boxes and wanted boxes in, whole chunks to read and what to copy out.

Resharding is arithmetic here: any stored layout into any wanted one. A chunk is checked as a
whole, so it is read as a whole; from it the plan copies what is wanted, so that a reader
needs the memory of one item, whatever the sizes of the boxes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.engine.planning.boxes import contiguous_boxes, flat_range
from holdfast.engine.planning.cover_boxes import ShardCopies, StridedOverlap, cover_box
from holdfast.engine.planning.find_boxes import DAMAGED_ADVICE, OverlapSearch, summarize_names
from holdfast.errors import ManifestInvalid
from holdfast.format.chunk_refs import ChunkRefs
from holdfast.format.index import ShardIndex
from holdfast.ragged import Ints, ranges
from holdfast.types import BLOCK_SIZE, Box

ChunkMap = tuple[Ints, ChunkRefs | None]
"""The cuts of a shard's chunks, and where these lie if not all in the shard itself."""


class ReadRequest(NamedTuple):
    """A part of a leaf that the caller has room for: contiguous, row-major, in stored elements."""

    key: str
    box: Box


class StridedCopy(NamedTuple):
    """Copy a part of an array in the file into a part of a target.

    At ``file_offset`` lies a row-major array of ``shape`` with elements of ``itemsize`` bytes; its
    part ``source`` goes to the part ``target`` of the wanted box.
    """

    request_id: int
    file_offset: int
    itemsize: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadItem:
    """Chunks ``first`` to ``last`` (excluded) of a shard, bytes ``start`` to ``stop``, to read
    in one piece; and the copies to make from it once its chunks are checked.

    ``linear`` has a row (want, file offset, byte offset in the wanted box, bytes) for each copy
    that is one run of bytes on both sides; ``slabs`` are the others.
    """

    shard: int
    first_chunk: int
    end_chunk: int
    start: int
    stop: int
    linear_copies: Ints
    strided_copies: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read, by shard and then by offset.

    ``shards``: the names of all shards given, to which items refer by position, as copies do to
    the list of wants; ``nbytes``: the sum of the items' lengths.
    """

    shards: tuple[str, ...]
    items: tuple[ReadItem, ...]
    nbytes: int


def make_read_plan(
    shard_indexes: Iterable[ShardIndex], requests: Sequence[ReadRequest]
) -> ReadPlan:
    """The reads and copies that fill every wanted box.

    ``stored`` is gone through once, and of each shard only what is wanted is kept, so indexes
    may be decoded as they are asked for. Where stored boxes overlap, each element is read from
    one of them.

    Raises ``MissingLeaf`` naming all keys that are stored nowhere; ``ManifestInvalid`` naming
    all wanted parts that no stored box holds, or a leaf about which shards disagree;
    ``PlanError`` for a wanted box that is not within its leaf.
    """
    search = OverlapSearch(requests)
    names: list[str] = []
    tiles: dict[int, ChunkMap] = {}
    needs: dict[int, ShardCopies] = {}
    for number, shard in enumerate(shard_indexes):
        names.append(shard.shard)
        need = ShardCopies(array("q"), [])
        if search.scan_shard(number, shard, need):
            tiles[number], needs[number] = (shard.cuts, shard.chunk_refs), need
    search.check_requests()
    lacking: list[tuple[ReadRequest, Box]] = []
    for number in np.flatnonzero(~search.exact_matches).tolist():
        want = requests[number]
        missing = cover_box(number, want.box, search.pop_overlaps(number), needs)
        if missing is not None:
            lacking.append((want, missing))
    if lacking:
        raise _coverage_error(lacking)
    items: list[ReadItem] = []
    for number in list(needs):
        items += _make_items(number, tiles[number], needs.pop(number))
    return ReadPlan(tuple(names), tuple(items), sum(i.stop - i.start for i in items))


def chunk_read_items(
    shard: int, cuts: Ints, chunk_refs: ChunkRefs | None = None, only_chunks: Ints | None = None
) -> list[ReadItem]:
    """Items that read all of a shard, its header included, or the chunks of these numbers, and copy
    nothing."""
    none, chunks = (
        np.empty((0, 4), np.int64),
        np.arange(len(cuts)) if only_chunks is None else only_chunks,
    )
    return _ChunkRanges.merge_adjacent(chunks, (cuts, chunk_refs)).make_items(shard, none, {})


def _coverage_error(uncovered: list[tuple[ReadRequest, Box]]) -> ManifestInvalid:
    parts = [f"{w.key} (offsets {b.offsets}, sizes {b.sizes})" for w, b in uncovered]
    return ManifestInvalid(
        f"The shards lack parts of {len(uncovered)} wanted boxes",
        expected="stored boxes that cover every leaf",
        found="nothing for " + summarize_names(parts),
        todo=DAMAGED_ADVICE,
        leaves=tuple(w.key for w, _ in uncovered),
    )


def _make_items(shard: int, chunk_map: ChunkMap, shard_copies: ShardCopies) -> list[ReadItem]:
    """The items of one shard that give all that is needed of it."""
    cuts = chunk_map[0]
    linear = np.array(shard_copies.linear, np.int64).reshape(-1, 4)
    linear = linear[linear[:, 3] > 0]
    begin = linear[:, 1]
    end = begin + linear[:, 3]
    slabs = _strided_copies_by_chunk(shard_copies.strided, cuts)
    needed = np.zeros(len(cuts) + 1, np.int64)
    np.add.at(needed, np.searchsorted(cuts, begin, "right"), 1)
    np.add.at(needed, np.searchsorted(cuts, end, "left") + 1, -1)
    needed = np.cumsum(needed)
    needed[list(slabs)] += 1
    return _ChunkRanges.merge_adjacent(np.flatnonzero(needed), chunk_map).make_items(
        shard, linear, slabs
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRanges:
    """Runs of chunks to read in one piece each: columns of chunk numbers and of file offsets."""

    first_chunk: Ints
    end_chunk: Ints
    start: Ints
    stop: Ints

    @classmethod
    def merge_adjacent(cls, chunks: Ints, chunk_map: ChunkMap) -> _ChunkRanges:
        """Merge neighbours that lie one behind the other in their file, within one ``UNIT`` counted
        from the header's end, as it was written."""
        cuts, places = chunk_map
        start = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[chunks]
        stop = cuts[chunks]
        # A chunk across the border of two units (we write none) has a number of its own.
        unit = (start - cuts[0]) // BLOCK_SIZE + (stop - 1 - cuts[0]) // BLOCK_SIZE
        apart = (chunks[1:] != chunks[:-1] + 1) | (unit[1:] != unit[:-1])
        if places is not None:
            apart |= ~places.is_contiguous_with_next(cuts)[chunks[:-1]]
        end = np.ones(min(1, len(chunks)), bool)
        begins, ends = np.concatenate([end, apart]), np.concatenate([apart, end])
        return cls(chunks[begins], chunks[ends] + 1, start[begins], stop[ends])

    def make_items(
        self, shard: int, linear_copies: Ints, strided_copies: dict[int, list[StridedCopy]]
    ) -> list[ReadItem]:
        """The items, each with its copies. ``slabs`` are given by chunk."""
        linear_copies, limits = self._split_linear_copies(linear_copies)
        parts: list[list[StridedCopy]] = [[] for _ in self.first_chunk]
        for chunk, several in sorted(strided_copies.items()):
            parts[int(np.searchsorted(self.first_chunk, chunk, "right")) - 1] += several
        rows = np.column_stack([self.first_chunk, self.end_chunk, self.start, self.stop]).tolist()
        return [
            ReadItem(shard, a, b, c, d, linear_copies[limits[i] : limits[i + 1]], tuple(parts[i]))
            for i, (a, b, c, d) in enumerate(rows)
        ]

    def _split_linear_copies(self, linear_copies: Ints) -> tuple[Ints, list[int]]:
        """Linear copies cut where items end, by offset; and where the rows of each item begin."""
        begin = linear_copies[:, 1]
        end = begin + linear_copies[:, 3]
        first = np.searchsorted(self.stop, begin, "right")
        count = np.searchsorted(self.start, end, "left") - first
        row = np.repeat(np.arange(len(linear_copies)), count)
        item = ranges(first, count)
        low = np.maximum(begin[row], self.start[item])
        high = np.minimum(end[row], self.stop[item])
        into = linear_copies[row, 2] + low - begin[row]
        cut = np.column_stack([linear_copies[row, 0], low, into, high - low])
        cut = cut[np.argsort(low, kind="stable")]
        return cut, [*np.searchsorted(cut[:, 1], self.start).tolist(), len(cut)]


def _strided_copies_by_chunk(
    overlaps: Sequence[StridedOverlap], cuts: Ints
) -> dict[int, list[StridedCopy]]:
    """The copies that scattered parts need, by the chunk that they are made from."""
    slabs: dict[int, list[StridedCopy]] = {}
    for hit in overlaps:
        at, size = hit.stored.file_offset, hit.stored.itemsize
        first, last = flat_range(hit.overlap, hit.stored.box)
        stop = at + hit.stored.box.numel * size
        chunk = int(np.searchsorted(cuts, at + first * size, "right"))
        # All of the box that lies in the chunk: whole rows make fewer rectangles.
        begin = max(at, int(cuts[chunk - 1]))
        while begin < at + last * size:
            # The index was checked: chunks end between elements.
            end = min(stop, int(cuts[chunk]))
            several = list(_iter_strided_copies(hit, (begin - at) // size, (end - at) // size))
            if several:
                slabs.setdefault(chunk, []).extend(several)
            begin, chunk = end, chunk + 1
    return slabs


def _iter_strided_copies(
    strided_overlap: StridedOverlap, first: int, last: int
) -> Iterator[StridedCopy]:
    """What elements ``first`` to ``last`` of the stored box give to the wanted one."""
    box, size = strided_overlap.stored.box, strided_overlap.stored.itemsize
    at = strided_overlap.stored.file_offset + first * size
    for r in contiguous_boxes(box.sizes, first, last):
        offsets = tuple(o + z for o, z in zip(r.offsets, box.offsets, strict=True))
        part = Box(offsets, r.sizes).intersection(strided_overlap.overlap)
        if part is not None:
            source, target = (
                part.slices(offsets),
                part.slices(strided_overlap.requested_box.offsets),
            )
            yield StridedCopy(strided_overlap.request_id, at, size, r.sizes, source, target)
        at += r.numel * size
