"""The shards of a reshard, and the windows through which all of them are written side by side.

Arithmetic only: nothing here does I/O. The leaves are put into one order, which the boxes in every
new shard follow. So their chunks can be sorted by where in that order they begin, and as many of
them as fit into a window need what lies close together in the old shards.

Where many old shards have small boxes of several leaves in one chunk each, and all of these
chunks together are more than a window holds, the leaves are gone through in tiles: first what all
of them have in the first old shards, then in the next ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.engine.planning.shard_layout import (
    MAX_SHARED_CHUNK_BYTES,
    SMALL_BOX_BYTES,
    LeafBox,
    chunk_cuts,
    full_shard_entries,
)
from holdfast.engine.saving.image import Image
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index_columns import LeafColumns
from holdfast.format.safetensors import build_header
from holdfast.ragged import Ints, exclusive_cumsum
from holdfast.types import ALIGNMENT, DTYPES, MIB, Box

WINDOW_BYTES = 96 * MIB
"""Bytes of leaves that are read, and then written, at a time; there are two windows."""

MAX_PADDING = 1 * MIB
"""What a window may leave free before large parts, so that they can be written past the page
cache."""

MAX_OPEN_SHARDS = 256
"""Most shards that are written at a time; each has two files open. With more, the leaves are gone
through several times."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafLocations:
    """What the old shards have of the leaves: a row for each leaf and each shard that has boxes of
    it, by leaf and then by shard.

    ``rows``: where those of a leaf are, by key; ``at``: where in the shard the first of the boxes
    begins; ``nbytes``: of all of them; ``first``: the least offset of theirs in dimension 0.
    """

    rows: dict[str, slice]
    shard: Ints
    offset: Ints
    nbytes: Ints
    first_row: Ints


class OrderedLeaf(NamedTuple):
    """A leaf, in the order that all new shards follow.

    ``group``: the number of the first leaf whose boxes share chunks with this one's; ``edges``: at
    which bytes of it its tiles end, but for the last.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    group: int = 0
    tile_ends: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


def locate_leaves(snapshot: Snapshot) -> LeafLocations:
    """Where each leaf is."""
    numbers = {key: number for number, key in enumerate(snapshot.leaves)}
    tables = [_shard_table(shard, i.leaves, numbers) for shard, i in enumerate(snapshot.indexes())]
    table = np.concatenate(tables, axis=1) if tables else np.empty((5, 0), np.int64)
    table = table[:, np.argsort(table[0], kind="stable")]
    limits = np.searchsorted(table[0], np.arange(len(numbers) + 1)).tolist()
    rows = {key: slice(limits[n], limits[n + 1]) for key, n in numbers.items()}
    return LeafLocations(rows, *table[1:])


def _shard_table(shard: int, leaves: LeafColumns, numbers: Mapping[str, int]) -> Ints:
    """The rows of one shard: the leaf's number, and the columns of ``Stored``."""
    kinds, some = leaves.schema, np.flatnonzero(leaves.box_counts)
    begin = exclusive_cumsum(leaves.box_counts)[some]
    offset = np.zeros(len(leaves.file_offsets), np.int64)
    shaped = kinds.ndims[leaves.leaf_numbers] > 0
    offset[shaped] = leaves.offsets[leaves.dim_starts[shaped]]
    return np.stack(
        [
            np.fromiter((numbers[key] for key in kinds.keys), np.int64, len(kinds.keys))[some],
            np.full(len(some), shard, np.int64),
            np.minimum.reduceat(leaves.file_offsets, begin),
            (leaves.stored_numels() * kinds.itemsizes)[some],
            np.minimum.reduceat(offset, begin),
        ]
    )


def order_leaves(snapshot: Snapshot, locations: LeafLocations) -> list[OrderedLeaf]:
    """All leaves: larger elements first, so that every box begins aligned; then those together that
    have the top of their keys in common; then as they lie in the old shards."""
    indexes = snapshot.indexes()

    def place(leaf: OrderedLeaf) -> tuple[int, int]:
        rows = locations.rows[leaf.key]
        first = rows.start
        return (
            (int(locations.shard[first]), int(locations.offset[first]))
            if first < rows.stop
            else (0, 0)
        )

    def kind(leaf: OrderedLeaf) -> tuple[int, str]:
        return -DTYPES[leaf.dtype].itemsize, leaf.key.partition("/")[0]

    leaves = [
        OrderedLeaf(key, dtype, shape, prod(shape) * DTYPES[dtype].itemsize)
        for key, (dtype, shape) in snapshot.leaves.items()
    ]
    rows = sorted((kind(leaf), place(leaf), leaf) for leaf in leaves)

    def chunk(row: tuple[tuple[int, str], tuple[int, int], OrderedLeaf]) -> tuple[int, int]:
        shard, at = row[1]
        return shard, int(np.searchsorted(indexes[shard].cuts, at, "right"))

    made: list[OrderedLeaf] = []
    for _, several in groupby(rows, chunk):
        made += _split_tiles([row[2]._replace(group=len(made)) for row in several], locations)
    return made


def _split_tiles(group: list[OrderedLeaf], locations: LeafLocations) -> list[OrderedLeaf]:
    """The leaves of a group with their ``edges``: these lie where an old shard's rows begin, the
    same one for all leaves."""
    tiles = -(-sum(leaf.nbytes for leaf in group) * 10 // (9 * WINDOW_BYTES))
    if tiles < 2:
        return group
    rows = np.r_[tuple(locations.rows[leaf.key] for leaf in group)]
    shards, which = np.unique(locations.shard[rows], return_inverse=True)
    load = np.zeros(len(shards), np.int64)
    np.add.at(load, which, locations.nbytes[rows])
    loaded = np.cumsum(load)
    ends = np.arange(1, tiles) * loaded[-1] // tiles
    limits = np.array([*shards, shards[-1] + 1])[np.searchsorted(loaded, ends, "right")]
    made = []
    for leaf in group:
        if leaf.shape:
            having, starts = _first_rows(leaf, locations)
            edges = starts[np.searchsorted(having, limits)] * leaf.row_bytes
            leaf = leaf._replace(tile_ends=tuple(np.unique(edges).tolist()))
        made.append(leaf)
    return made


def _first_rows(leaf: OrderedLeaf, locations: LeafLocations) -> tuple[Ints, Ints]:
    """The old shards that have parts of a leaf, and the first row that each or a later one has;
    behind the last one, the number of rows."""
    rows = locations.rows[leaf.key]
    starts = np.append(locations.first_row[rows], leaf.shape[0])
    return locations.shard[rows], np.minimum.accumulate(starts[::-1])[::-1]


def assign_leaves(leaves: Sequence[OrderedLeaf], shards: int, split: str) -> list[int | None]:
    """For each leaf the shard that gets it whole, or None if all get rows of it."""
    home: list[int | None] = [None] * len(leaves)
    load, whole = [0] * shards, []
    for number, leaf in enumerate(leaves):
        if split == "even" and leaf.nbytes and leaf.shape and leaf.shape[0] >= shards > 1:
            for shard in range(shards):
                first, last = _row_range(leaf, shard, shards)
                load[shard] += (last - first) * leaf.row_bytes
        else:
            whole.append((-leaf.nbytes, number))
    heap = [(nbytes, shard) for shard, nbytes in enumerate(load)]
    heapq.heapify(heap)
    for less, number in sorted(whole):
        nbytes, shard = heap[0]
        heapq.heapreplace(heap, (nbytes - less, shard))
        home[number] = shard
    return home


def _row_range(leaf: OrderedLeaf, shard: int, shards: int) -> tuple[int, int]:
    """First and past-the-last row of a leaf that is cut which a shard gets."""
    rows = leaf.shape[0]
    step = -(-rows // shards)
    return min(shard * step, rows), min((shard + 1) * step, rows)


def make_shard_image(
    leaves: Sequence[OrderedLeaf], assignment: Sequence[int | None], shard: int, shards: int
) -> Image:
    """A new shard. Its ``sources``: for each box the number of the leaf, and from which byte of it
    on."""
    holdings, sources = [], []
    for number, leaf in enumerate(leaves):
        box, first = Box.whole(leaf.shape), 0
        if assignment[number] is None:
            first, last = _row_range(leaf, shard, shards)
            if first == last:
                continue
            others = leaf.shape[1:]
            box = Box((first, *(0 for _ in others)), (last - first, *others))
        elif assignment[number] != shard:
            continue
        holdings.append(LeafBox(leaf.key, leaf.dtype, leaf.shape, box))
        sources.append((number, first * leaf.row_bytes))
    header = build_header(full_shard_entries(holdings))
    lengths = np.array([h.nbytes for h in holdings], np.int64)
    ends = np.cumsum(lengths) + len(header)
    begins = ends - lengths
    cuts = _shard_cuts(len(header), lengths, begins, min(shards, MAX_OPEN_SHARDS))
    edges = [
        int(begin) + edge - first
        for (number, first), begin, length in zip(sources, begins, lengths, strict=True)
        for edge in leaves[number].tile_ends
        if first < edge < first + length
    ]
    cuts = np.union1d(cuts, np.array(edges, np.int64))
    return Image(header, holdings, sources, begins.tolist(), ends.tolist(), cuts)


def _shard_cuts(header: int, lengths: Ints, begins: Ints, shards: int) -> Ints:
    """Where the chunks of a shard end: as those of a save; but of many shards the chunks that small
    boxes share are shorter, so that a window has room for those of all shards that go on with the
    same leaves."""
    cuts = chunk_cuts(header, lengths)
    most = max(1, WINDOW_BYTES // (4 * shards))
    if most < MAX_SHARED_CHUNK_BYTES:
        window = (begins - header) // most
        cuts = np.union1d(cuts, begins[1:][window[1:] != window[:-1]])
    return cuts


# -- windows --------------------------------------------------------------------------------------


class ShardSpan(NamedTuple):
    """Bytes ``start`` to ``stop`` of the n-th leaf, which go to ``at`` in a new shard."""

    leaf: int
    start: int
    stop: int
    shard_offset: int


class Chunk(NamedTuple):
    """A chunk of a new shard: first of all, where it begins in the order in which all is gone
    through."""

    group: int
    tile: int
    leaf: int
    start: int
    shard: int
    number: int
    shard_offset: int
    nbytes: int
    spans: tuple[ShardSpan, ...]


class WindowSpan(NamedTuple):
    """Bytes ``start`` to ``stop`` of the n-th leaf, at byte ``at`` of a window."""

    leaf: int
    start: int
    stop: int
    window_offset: int


def iter_chunks(leaves: Sequence[OrderedLeaf], shard: int, image: Image) -> Iterator[Chunk]:
    """The chunks of a new shard but for its header, tile by tile."""
    for _, several in groupby(_iter_in_file_order(leaves, shard, image), lambda chunk: chunk.group):
        yield from sorted(several)


def _iter_in_file_order(leaves: Sequence[OrderedLeaf], shard: int, image: Image) -> Iterator[Chunk]:
    i = 0
    for number, (start, stop) in enumerate(pairwise(image.cuts.tolist()), 1):
        parts = []
        while i < len(image.box_starts) and image.box_starts[i] < stop:
            begin, end = image.box_starts[i], image.box_ends[i]
            leaf, first = image.sources[i]
            a, b = max(start, begin), min(stop, end)
            if b > a:
                parts.append(ShardSpan(leaf, first + a - begin, first + b - begin, a))
            if end > stop:
                break
            i += 1
        leaf, first = parts[0].leaf, parts[0].start
        group, tile = leaves[leaf].group, bisect_right(leaves[leaf].tile_ends, first)
        yield Chunk(group, tile, leaf, first, shard, number, start, stop - start, tuple(parts))


def group_into_windows(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """As many chunks at a time as fit into a window. It ends where a group of leaves or a tile
    ends, if that leaves it at least half full: then nothing of it is read twice."""
    window: list[Chunk] = []
    used = border = before = 0
    for chunk in chunks:
        while window and used + chunk.nbytes > WINDOW_BYTES:
            if 2 * before < used:
                border, before = len(window), used
            yield window[:border]
            window, used = window[border:], used - before
            border = before = 0
        if window and window[-1][:2] != chunk[:2]:
            border, before = len(window), used
        window.append(chunk)
        used += chunk.nbytes
    if window:
        yield window


def window_size(images: Sequence[Image]) -> int:
    """Bytes of memory that a window needs."""
    longest = (int(np.diff(image.cuts).max(initial=0)) for image in images)
    return max(min(WINDOW_BYTES, sum(image.length for image in images)), *longest) + MAX_PADDING


def lay_out_window(chunks: Sequence[Chunk]) -> tuple[list[WindowSpan], dict[tuple[int, int], int]]:
    """Where in a window everything goes: leaf by leaf, row-major, so that it can be read in large
    pieces; and for each part of a chunk, by leaf and first byte, at which byte it is.

    A large part lies as far from a page's beginning as it will in its file, which direct writes ask
    for, while ``SPARE`` lasts.
    """
    runs: list[WindowSpan] = []
    spots: dict[tuple[int, int], int] = {}
    end, spare = 0, MAX_PADDING
    for part in sorted(part for chunk in chunks for part in chunk.spans):
        last = runs[-1] if runs else None
        if last is not None and (last.leaf, last.stop) == (part.leaf, part.start):
            runs[-1] = last._replace(stop=part.stop)
        else:
            skip = (part.shard_offset - end) % ALIGNMENT
            if part.stop - part.start >= SMALL_BOX_BYTES and skip <= spare:
                end, spare = end + skip, spare - skip
            runs.append(WindowSpan(part.leaf, part.start, part.stop, end))
        spots[part.leaf, part.start] = end
        end += part.stop - part.start
    return runs, spots
