"""Who reads what: stored boxes and wanted boxes in, whole chunks to read and what to copy out.

Resharding is arithmetic here: any stored layout into any wanted one. A chunk is checked as a
whole, so it is read as a whole; from it the plan copies what is wanted, so that a reader
needs the memory of one item, whatever the sizes of the boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.engine.layout import Ints, rectangles, span, subtract
from holdfast.errors import ManifestInvalid, MissingLeaf, PlanError
from holdfast.format.columns import BoxAt, Leaf
from holdfast.format.index import ShardIndex
from holdfast.format.places import Places
from holdfast.words import DTYPES, UNIT, Box

SHOWN = 20
"""Most leaves that one error message names."""

Tiles = tuple[Ints, Places | None]
"""The cuts of a shard's chunks, and where these lie if not all in the shard itself."""

_REFUSED = "Load another version; this one is damaged or was not written by a correct Holdfast"


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


class _Found(NamedTuple):
    """A stored box that touches a wanted one."""

    shard: int
    box: Box
    at: int
    itemsize: int


class _Hit(NamedTuple):
    """A part of a wanted box that one stored box gives, scattered in the file or in the target."""

    want: int
    target: Box
    part: Box
    found: _Found


class _Needs(NamedTuple):
    """What is wanted of one shard. ``linear`` is flat: four numbers for each row of an item's."""

    linear: list[int]
    scattered: list[_Hit]


def plan_read(stored: Iterable[ShardIndex], wanted: Sequence[Want]) -> ReadPlan:
    """The reads and copies that fill every wanted box.

    ``stored`` is gone through once, and of each shard only what is wanted is kept, so indexes
    may be decoded as they are asked for. Where stored boxes overlap, each element is read from
    one of them.

    Raises ``MissingLeaf`` naming all keys that are stored nowhere; ``ManifestInvalid`` naming
    all wanted parts that no stored box holds, or a leaf about which shards disagree;
    ``PlanError`` for a wanted box that is not within its leaf.
    """
    search = _Search(wanted)
    names: list[str] = []
    tiles: dict[int, Tiles] = {}
    needs: dict[int, _Needs] = {}
    for number, shard in enumerate(stored):
        names.append(shard.shard)
        need = _Needs([], [])
        if search.look(number, shard, need):
            tiles[number], needs[number] = (shard.cuts, shard.places), need
    search.check()
    lacking: list[tuple[Want, Box]] = []
    for number, want in enumerate(wanted):
        if not search.done[number]:
            missing = _cover(number, want.box, search.found.get(number, []), needs)
            if missing is not None:
                lacking.append((want, missing))
    if lacking:
        raise _not_covered(lacking)
    items: list[ReadItem] = []
    for number, need in needs.items():
        items += _items(number, tiles[number], need)
    return ReadPlan(tuple(names), tuple(items), sum(i.stop - i.start for i in items))


def whole_file(
    shard: int, cuts: Ints, places: Places | None = None, only: Ints | None = None
) -> list[ReadItem]:
    """Items that read all of a shard, its header included, or the chunks of these numbers, and copy
    nothing."""
    none, chunks = np.empty((0, 4), np.int64), np.arange(len(cuts)) if only is None else only
    return _Runs.of(chunks, (cuts, places)).items(shard, none, {})


class _Search:
    """Goes through the shards, once, for boxes that are wanted.

    ``done``: wants that a stored box fills exactly, as is usual: no geometry; ``found``: for the
    others the stored boxes that touch them; ``types``: of the leaves, as the first shard has it.
    """

    def __init__(self, wanted: Sequence[Want]) -> None:
        self.wanted = wanted
        self.done = [False] * len(wanted)
        self.found: dict[int, list[_Found]] = {}
        self.types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._by_key: dict[str, list[int]] = {}
        for number, want in enumerate(wanted):
            self._by_key.setdefault(want.key, []).append(number)

    def look(self, number: int, shard: ShardIndex, need: _Needs) -> bool:
        """Note what the shard has; in ``need`` what fills a want. Whether there was anything."""
        any_found = False
        for leaf in shard.leaves:
            numbers = self._by_key.get(leaf.key)
            if numbers is None:
                continue
            known = self.types.get(leaf.key)
            if known is None:
                self.types[leaf.key] = leaf.dtype, leaf.shape
            elif known != (leaf.dtype, leaf.shape):
                raise _two_types(leaf, known, shard.shard)
            size = DTYPES[leaf.dtype].itemsize
            for box in leaf.boxes:
                for n in numbers:
                    want = self.wanted[n].box
                    if self.done[n]:
                        continue
                    if box.sizes == want.sizes and box.offsets == want.offsets:
                        need.linear.extend((n, box.at, 0, prod(box.sizes) * size))
                        self.done[n] = any_found = True
                    elif _touch(box, want):
                        found = _Found(number, Box(box.offsets, box.sizes), box.at, size)
                        self.found.setdefault(n, []).append(found)
                        any_found = True
        return any_found

    def check(self) -> None:
        """Raise for wants of leaves that were not seen, or of what is not within its leaf."""
        missing = sorted(self._by_key.keys() - self.types.keys())
        if missing:
            raise MissingLeaf(
                f"The snapshot lacks {len(missing)} leaves that are wanted",
                expected=_some(missing),
                found="none of their boxes in any shard",
                todo="Leave them out, or load a version that has them",
                leaves=tuple(missing),
            )
        for want, done in zip(self.wanted, self.done, strict=True):
            shape = self.types[want.key][1]
            if not done and not want.box.inside(shape):
                raise PlanError(
                    f"A part of {want.key} is wanted that is not within the tensor",
                    expected=f"a part of {list(shape)}",
                    found=f"offsets {want.box.offsets}, sizes {want.box.sizes}",
                    todo="Ask for a part within the stored shape",
                    key=want.key,
                )


def _touch(a: BoxAt, b: Box) -> bool:
    for o, n, z, m in zip(a.offsets, a.sizes, b.offsets, b.sizes):
        if o >= z + m or z >= o + n:
            return False
    return True


def _two_types(leaf: Leaf, known: tuple[str, tuple[int, ...]], file: str) -> ManifestInvalid:
    return ManifestInvalid(
        f"Shards disagree about {leaf.key}",
        expected=f"{known[0]} {list(known[1])}",
        found=f"{leaf.dtype} {list(leaf.shape)} in {file}",
        todo=_REFUSED,
        file=file,
        leaf=leaf.key,
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _not_covered(lacking: list[tuple[Want, Box]]) -> ManifestInvalid:
    parts = [f"{w.key} (offsets {b.offsets}, sizes {b.sizes})" for w, b in lacking]
    return ManifestInvalid(
        f"The shards lack parts of {len(lacking)} wanted boxes",
        expected="stored boxes that cover every leaf",
        found="nothing for " + _some(parts),
        todo=_REFUSED,
        leaves=tuple(w.key for w, _ in lacking),
    )


def _cover(number: int, want: Box, found: list[_Found], needs: dict[int, _Needs]) -> Box | None:
    """Note what fills ``want`` in ``needs``; a part that nothing holds, or None."""
    if 0 in want.sizes:
        return None
    # In the order of their offsets, so that what is still missing stays in few pieces.
    missing = [want]
    for f in sorted(found, key=lambda f: f.box.offsets):
        left: list[Box] = []
        for piece in missing:
            part = piece.intersection(f.box)
            if part is None:
                left.append(piece)
                continue
            linear = _linear(number, part, want, f)
            if linear is None:
                needs[f.shard].scattered.append(_Hit(number, want, part, f))
            else:
                needs[f.shard].linear.extend(linear)
            left += subtract(piece, part)
        missing = left
        if not missing:
            return None
    return missing[0]


def _linear(number: int, part: Box, want: Box, found: _Found) -> tuple[int, int, int, int] | None:
    """The copy of ``part`` as one run of bytes, if it is one both in the file and in the target."""
    count, size = part.elements, found.itemsize
    first, last = span(part, found.box)
    if last - first != count:
        return None
    into, end = span(part, want)
    if end - into != count:
        return None
    return number, found.at + first * size, into * size, count * size


def _items(shard: int, tiles: Tiles, needs: _Needs) -> list[ReadItem]:
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
        item = np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)
        low = np.maximum(begin[row], self.start[item])
        high = np.minimum(end[row], self.stop[item])
        into = linear[row, 2] + low - begin[row]
        cut = np.column_stack([linear[row, 0], low, into, high - low])
        cut = cut[np.argsort(low, kind="stable")]
        return cut, [*np.searchsorted(cut[:, 1], self.start).tolist(), len(cut)]


def _slabs_by_chunk(hits: Sequence[_Hit], cuts: Ints) -> dict[int, list[Slab]]:
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


def _slabs(hit: _Hit, first: int, last: int) -> Iterator[Slab]:
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
