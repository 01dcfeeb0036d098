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

from holdfast.engine.planning.boxes import rectangles, span
from holdfast.engine.planning.cover_boxes import Hit, Needs, cover
from holdfast.engine.planning.find_boxes import REFUSED, Search, some
from holdfast.errors import ManifestInvalid
from holdfast.format.chunk_refs import Places
from holdfast.format.index import ShardIndex
from holdfast.ragged import Ints, within
from holdfast.types import UNIT, Box

Tiles = tuple[Ints, Places | None]
"""The cuts of a shard's chunks, and where these lie if not all in the shard itself."""


class Want(NamedTuple):
    """A part of a leaf that the caller has room for: contiguous, row-major, in stored elements."""

    key: str
    box: Box


class Slab(NamedTuple):
    """Copy a part of an array in the file into a part of a target.

    At ``file_offset`` lies a row-major array of ``shape`` with elements of ``itemsize`` bytes; its
    part ``source`` goes to the part ``target`` of the wanted box.
    """

    want: int
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
    first: int
    last: int
    start: int
    stop: int
    linear: Ints
    slabs: tuple[Slab, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read, by shard and then by offset.

    ``shards``: the names of all shards given, to which items refer by position, as copies do to
    the list of wants; ``nbytes``: the sum of the items' lengths.
    """

    shards: tuple[str, ...]
    items: tuple[ReadItem, ...]
    nbytes: int


def plan_read(stored: Iterable[ShardIndex], wanted: Sequence[Want]) -> ReadPlan:
    """The reads and copies that fill every wanted box.

    ``stored`` is gone through once, and of each shard only what is wanted is kept, so indexes
    may be decoded as they are asked for. Where stored boxes overlap, each element is read from
    one of them.

    Raises ``MissingLeaf`` naming all keys that are stored nowhere; ``ManifestInvalid`` naming
    all wanted parts that no stored box holds, or a leaf about which shards disagree;
    ``PlanError`` for a wanted box that is not within its leaf.
    """
    search = Search(wanted)
    names: list[str] = []
    tiles: dict[int, Tiles] = {}
    needs: dict[int, Needs] = {}
    for number, shard in enumerate(stored):
        names.append(shard.shard)
        need = Needs(array("q"), [])
        if search.look(number, shard, need):
            tiles[number], needs[number] = (shard.cuts, shard.places), need
    search.check()
    lacking: list[tuple[Want, Box]] = []
    for number in np.flatnonzero(~search.done).tolist():
        want = wanted[number]
        missing = cover(number, want.box, search.touching(number), needs)
        if missing is not None:
            lacking.append((want, missing))
    if lacking:
        raise _not_covered(lacking)
    items: list[ReadItem] = []
    for number in list(needs):
        items += _items(number, tiles[number], needs.pop(number))
    return ReadPlan(tuple(names), tuple(items), sum(i.stop - i.start for i in items))


def whole_file(
    shard: int, cuts: Ints, places: Places | None = None, only: Ints | None = None
) -> list[ReadItem]:
    """Items that read all of a shard, its header included, or the chunks of these numbers, and copy
    nothing."""
    none, chunks = np.empty((0, 4), np.int64), np.arange(len(cuts)) if only is None else only
    return _Runs.of(chunks, (cuts, places)).items(shard, none, {})


def _not_covered(lacking: list[tuple[Want, Box]]) -> ManifestInvalid:
    parts = [f"{w.key} (offsets {b.offsets}, sizes {b.sizes})" for w, b in lacking]
    return ManifestInvalid(
        f"The shards lack parts of {len(lacking)} wanted boxes",
        expected="stored boxes that cover every leaf",
        found="nothing for " + some(parts),
        todo=REFUSED,
        leaves=tuple(w.key for w, _ in lacking),
    )


def _items(shard: int, tiles: Tiles, needs: Needs) -> list[ReadItem]:
    """The items of one shard that give all that is needed of it."""
    cuts = tiles[0]
    linear = np.array(needs.linear, np.int64).reshape(-1, 4)
    linear = linear[linear[:, 3] > 0]
    begin = linear[:, 1]
    end = begin + linear[:, 3]
    slabs = _slabs_by_chunk(needs.scattered, cuts)
    needed = np.zeros(len(cuts) + 1, np.int64)
    np.add.at(needed, np.searchsorted(cuts, begin, "right"), 1)
    np.add.at(needed, np.searchsorted(cuts, end, "left") + 1, -1)
    needed = np.cumsum(needed)
    needed[list(slabs)] += 1
    return _Runs.of(np.flatnonzero(needed), tiles).items(shard, linear, slabs)


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Runs of chunks to read in one piece each: columns of chunk numbers and of file offsets."""

    first: Ints
    last: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, chunks: Ints, tiles: Tiles) -> _Runs:
        """Merge neighbours that lie one behind the other in their file, within one ``UNIT`` counted
        from the header's end, as it was written."""
        cuts, places = tiles
        start = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[chunks]
        stop = cuts[chunks]
        # A chunk across the border of two units (we write none) has a number of its own.
        unit = (start - cuts[0]) // UNIT + (stop - 1 - cuts[0]) // UNIT
        apart = (chunks[1:] != chunks[:-1] + 1) | (unit[1:] != unit[:-1])
        if places is not None:
            apart |= ~places.joined(cuts)[chunks[:-1]]
        end = np.ones(min(1, len(chunks)), bool)
        begins, ends = np.concatenate([end, apart]), np.concatenate([apart, end])
        return cls(chunks[begins], chunks[ends] + 1, start[begins], stop[ends])

    def items(self, shard: int, linear: Ints, slabs: dict[int, list[Slab]]) -> list[ReadItem]:
        """The items, each with its copies. ``slabs`` are given by chunk."""
        linear, limits = self._clip(linear)
        parts: list[list[Slab]] = [[] for _ in self.first]
        for chunk, several in sorted(slabs.items()):
            parts[int(np.searchsorted(self.first, chunk, "right")) - 1] += several
        rows = np.column_stack([self.first, self.last, self.start, self.stop]).tolist()
        return [
            ReadItem(shard, a, b, c, d, linear[limits[i] : limits[i + 1]], tuple(parts[i]))
            for i, (a, b, c, d) in enumerate(rows)
        ]

    def _clip(self, linear: Ints) -> tuple[Ints, list[int]]:
        """Linear copies cut where items end, by offset; and where the rows of each item begin."""
        begin = linear[:, 1]
        end = begin + linear[:, 3]
        first = np.searchsorted(self.stop, begin, "right")
        count = np.searchsorted(self.start, end, "left") - first
        row = np.repeat(np.arange(len(linear)), count)
        item = within(first, count)
        low = np.maximum(begin[row], self.start[item])
        high = np.minimum(end[row], self.stop[item])
        into = linear[row, 2] + low - begin[row]
        cut = np.column_stack([linear[row, 0], low, into, high - low])
        cut = cut[np.argsort(low, kind="stable")]
        return cut, [*np.searchsorted(cut[:, 1], self.start).tolist(), len(cut)]


def _slabs_by_chunk(hits: Sequence[Hit], cuts: Ints) -> dict[int, list[Slab]]:
    """The copies that scattered parts need, by the chunk that they are made from."""
    slabs: dict[int, list[Slab]] = {}
    for hit in hits:
        at, size = hit.found.at, hit.found.itemsize
        first, last = span(hit.part, hit.found.box)
        stop = at + hit.found.box.elements * size
        chunk = int(np.searchsorted(cuts, at + first * size, "right"))
        # All of the box that lies in the chunk: whole rows make fewer rectangles.
        begin = max(at, int(cuts[chunk - 1]))
        while begin < at + last * size:
            # The index was checked: chunks end between elements.
            end = min(stop, int(cuts[chunk]))
            several = list(_slabs(hit, (begin - at) // size, (end - at) // size))
            if several:
                slabs.setdefault(chunk, []).extend(several)
            begin, chunk = end, chunk + 1
    return slabs


def _slabs(hit: Hit, first: int, last: int) -> Iterator[Slab]:
    """What elements ``first`` to ``last`` of the stored box give to the wanted one."""
    box, size = hit.found.box, hit.found.itemsize
    at = hit.found.at + first * size
    for r in rectangles(box.sizes, first, last):
        offsets = tuple(o + z for o, z in zip(r.offsets, box.offsets, strict=True))
        part = Box(offsets, r.sizes).intersection(hit.part)
        if part is not None:
            source, target = part.slices(offsets), part.slices(hit.target.offsets)
            yield Slab(hit.want, at, size, r.sizes, source, target)
        at += r.elements * size
