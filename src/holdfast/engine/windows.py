"""The shards of a reshard, and the windows through which all of them are written side by side.

Arithmetic only: nothing here does I/O. The leaves are put into one order, which the boxes in every
new shard follow. So their chunks can be sorted by where in that order they begin, and as many of
them as fit into a window need what lies close together in the old shards.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.engine.entries import whole_entries
from holdfast.engine.layout import GROUP, SMALL, Holding, Ints, chunk_cuts
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.stage import Image
from holdfast.format.tensorfile import build_header
from holdfast.words import ALIGNMENT, DTYPES, MIB, Box

WINDOW = 90 * MIB
"""Bytes of leaves that are read, and then written, at a time; there are two windows."""

OPEN = 256
"""Most shards that are written at a time; each has two files open. With more, the leaves are gone
through several times."""


class Ordered(NamedTuple):
    """A leaf, in the order that all new shards follow."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


def in_order(snapshot: Snapshot) -> list[Ordered]:
    """All leaves: larger elements first, so that every box begins aligned; then those together that
    have the top of their keys in common; then as they lie in the old shards."""
    found: dict[str, tuple[int, int]] = {}
    for number, index in enumerate(snapshot.indexes()):
        for leaf in index.leaves:
            for box in leaf.boxes:
                found[leaf.key] = min(found.get(leaf.key, (number, box.at)), (number, box.at))
    leaves = [
        Ordered(key, dtype, shape, prod(shape) * DTYPES[dtype].itemsize)
        for key, (dtype, shape) in snapshot.leaves.items()
    ]

    def rank(leaf: Ordered) -> tuple[int, str, tuple[int, int], str]:
        size = DTYPES[leaf.dtype].itemsize
        return -size, leaf.key.partition("/")[0], found.get(leaf.key, (0, 0)), leaf.key

    return sorted(leaves, key=rank)


def deal_out(leaves: Sequence[Ordered], shards: int, split: str) -> list[int | None]:
    """For each leaf the shard that gets it whole, or None if all get rows of it."""
    home: list[int | None] = [None] * len(leaves)
    load, whole = [0] * shards, []
    for number, leaf in enumerate(leaves):
        if split == "even" and leaf.nbytes and leaf.shape and leaf.shape[0] >= shards > 1:
            for shard in range(shards):
                first, last = _rows(leaf, shard, shards)
                load[shard] += (last - first) * leaf.row
        else:
            whole.append((-leaf.nbytes, number))
    heap = [(nbytes, shard) for shard, nbytes in enumerate(load)]
    heapq.heapify(heap)
    for less, number in sorted(whole):
        nbytes, shard = heap[0]
        heapq.heapreplace(heap, (nbytes - less, shard))
        home[number] = shard
    return home


def _rows(leaf: Ordered, shard: int, shards: int) -> tuple[int, int]:
    """First and past-the-last row of a leaf that is cut which a shard gets."""
    rows = leaf.shape[0]
    step = -(-rows // shards)
    return min(shard * step, rows), min((shard + 1) * step, rows)


def new_image(
    leaves: Sequence[Ordered], home: Sequence[int | None], shard: int, shards: int
) -> Image:
    """A new shard. Its ``sources``: for each box the number of the leaf, and from which byte of it
    on."""
    holdings, sources = [], []
    for number, leaf in enumerate(leaves):
        box, first = Box.whole(leaf.shape), 0
        if home[number] is None:
            first, last = _rows(leaf, shard, shards)
            if first == last:
                continue
            others = leaf.shape[1:]
            box = Box((first, *(0 for _ in others)), (last - first, *others))
        elif home[number] != shard:
            continue
        holdings.append(Holding(leaf.key, leaf.dtype, leaf.shape, box))
        sources.append((number, first * leaf.row))
    header = build_header(whole_entries(holdings))
    lengths = np.array([h.nbytes for h in holdings], np.int64)
    ends = np.cumsum(lengths) + len(header)
    begins = ends - lengths
    cuts = _cuts(len(header), lengths, begins, min(shards, OPEN))
    return Image(header, holdings, sources, begins.tolist(), ends.tolist(), cuts)


def _cuts(header: int, lengths: Ints, begins: Ints, shards: int) -> Ints:
    """Where the chunks of a shard end: as those of a save; but of many shards the chunks that small
    boxes share are shorter, so that a window has room for those of all shards that go on with the
    same leaves."""
    cuts = chunk_cuts(header, lengths)
    most = max(1, WINDOW // (4 * shards))
    if most < GROUP:
        window = (begins - header) // most
        cuts = np.union1d(cuts, begins[1:][window[1:] != window[:-1]])
    return cuts


# -- windows --------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of the n-th leaf, which go to ``at`` in a new shard."""

    leaf: int
    start: int
    stop: int
    at: int


class Chunk(NamedTuple):
    """A chunk of a new shard: first of all, where in the order of all leaves it begins."""

    leaf: int
    start: int
    shard: int
    number: int
    at: int
    nbytes: int
    parts: tuple[Part, ...]


class Run(NamedTuple):
    """Bytes ``start`` to ``stop`` of the n-th leaf, at byte ``at`` of a window."""

    leaf: int
    start: int
    stop: int
    at: int


def chunks_of(shard: int, image: Image) -> Iterator[Chunk]:
    """The chunks of a new shard but for its header, in their order."""
    cuts, i = image.cuts.tolist(), 0
    for number in range(1, len(cuts)):
        start, stop, parts = cuts[number - 1], cuts[number], []
        while i < len(image.begins) and image.begins[i] < stop:
            begin, end = image.begins[i], image.ends[i]
            leaf, first = image.sources[i]
            a, b = max(start, begin), min(stop, end)
            if b > a:
                parts.append(Part(leaf, first + a - begin, first + b - begin, a))
            if end > stop:
                break
            i += 1
        first_part = parts[0]
        yield Chunk(
            first_part.leaf, first_part.start, shard, number, start, stop - start, tuple(parts)
        )


def windows(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """As many chunks at a time as fit into a window. It ends where a leaf ends, if that leaves it
    at least half full: then nothing of that leaf is read twice, however it lies."""
    window: list[Chunk] = []
    used = border = before = 0
    for chunk in chunks:
        while window and used + chunk.nbytes > WINDOW:
            if 2 * before < used:
                border, before = len(window), used
            yield window[:border]
            window, used = window[border:], used - before
            border = before = 0
        if chunk.start == 0:
            border, before = len(window), used
        window.append(chunk)
        used += chunk.nbytes
    if window:
        yield window


def window_size(images: Sequence[Image]) -> int:
    """Bytes of a window, with what ``settle`` may leave free before large parts."""
    longest = (int(np.diff(image.cuts).max(initial=0)) for image in images)
    size = max(min(WINDOW, sum(image.length for image in images)), *longest)
    return size + (size // SMALL + 1) * ALIGNMENT


def settle(chunks: Sequence[Chunk]) -> tuple[list[Run], dict[tuple[int, int], int]]:
    """Where in a window everything goes: leaf by leaf, row-major, so that it can be read in large
    pieces; and for each part of a chunk, by leaf and first byte, at which byte it is.

    A large part lies as far from a page's beginning as it will in its file: then it can be written
    past the page cache.
    """
    runs: list[Run] = []
    spots: dict[tuple[int, int], int] = {}
    end = 0
    for part in sorted(part for chunk in chunks for part in chunk.parts):
        last = runs[-1] if runs else None
        if last is not None and (last.leaf, last.stop) == (part.leaf, part.start):
            runs[-1] = last._replace(stop=part.stop)
        else:
            if part.stop - part.start >= SMALL:
                end += (part.at - end) % ALIGNMENT
            runs.append(Run(part.leaf, part.start, part.stop, end))
        spots[part.leaf, part.start] = end
        end += part.stop - part.start
    return runs, spots
