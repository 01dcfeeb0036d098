"""The shards of a reshard, and the windows through which all of them are written concurrently.

This module is arithmetic only and does no I/O. It puts the leaves into one order, which the boxes
in every new shard follow. The chunks of the new shards can therefore be sorted by their start in
that order, and the chunks in one window need bytes that are close together in the old shards.

Many old shards may each have small boxes of several leaves in one chunk. If all of these chunks
together are larger than a window, the leaves are processed in tiles: first the parts of all leaves
that are in the first old shards, then the parts in the next ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from limpet.format.index_columns import LeafColumns
from limpet.layout.shard_layout import (
    MAX_SHARED_CHUNK_BYTES,
    SMALL_BOX_BYTES,
    LeafBox,
)
from limpet.ragged import Ints, exclusive_cumsum, sorted_unique
from limpet.saving.image import Image, make_image
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Traits, upload_memory
from limpet.types import ALIGNMENT, DTYPES, MIB, Box

WINDOW_BYTES = 96 * MIB
"""Largest size of a window, in bytes of leaves. There are two windows, or one if the uploads keep
bytes in memory."""

MAX_UPLOAD_BYTES = 128 * MIB
"""Largest number of bytes that all unfinished uploads keep in memory, unless one needs more."""

MAX_PADDING = 1 * MIB
"""Largest number of bytes that a window may leave unused before large spans, which aligns them for
direct I/O."""

MAX_OPEN_SHARDS = 256
"""Largest number of shards that are written concurrently; each has two open files. With more
shards, or if each upload keeps bytes in memory, the leaves are read several times."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafLocations:
    """The locations of the leaves in the old shards.

    The columns have one row for each leaf and each shard that has boxes of that leaf, sorted by
    leaf and then by shard.

    ``rows``: the rows of each leaf, by key. The columns: ``shard``; ``offset``: the offset of the
    first of the boxes in the shard; ``nbytes``: the bytes of all of these boxes; ``first_row``:
    their smallest offset in dimension 0.
    """

    rows: dict[str, slice]
    shard: Ints
    offset: Ints
    nbytes: Ints
    first_row: Ints


class OrderedLeaf(NamedTuple):
    """A leaf, in the order that all new shards follow.

    ``group``: the number of the first leaf whose boxes share chunks with this leaf's boxes;
    ``tile_ends``: the byte offsets in the leaf at which its tiles end, except the last tile.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    group: int = 0
    tile_ends: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes per row."""
        return prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


def locate_leaves(snapshot: SnapshotReader) -> LeafLocations:
    """Find every leaf in the old shards."""
    numbers = {key: number for number, key in enumerate(snapshot.leaves)}
    tables = [_shard_table(shard, i.leaves, numbers) for shard, i in enumerate(snapshot.indexes())]
    table = np.concatenate(tables, axis=1) if tables else np.empty((5, 0), np.int64)
    table = table[:, np.argsort(table[0], kind="stable")]
    limits = np.searchsorted(table[0], np.arange(len(numbers) + 1)).tolist()
    rows = {key: slice(limits[n], limits[n + 1]) for key, n in numbers.items()}
    return LeafLocations(rows, *table[1:])


def _shard_table(shard: int, leaves: LeafColumns, numbers: Mapping[str, int]) -> Ints:
    """Return the rows of one shard: the leaf's number, and the columns of ``LeafLocations``."""
    schema, present = leaves.schema, np.flatnonzero(leaves.box_counts)
    first_boxes = exclusive_cumsum(leaves.box_counts)[present]
    first_rows = np.zeros(len(leaves.file_offsets), np.int64)
    has_dims = schema.ndims[leaves.leaf_numbers] > 0
    first_rows[has_dims] = leaves.offsets[leaves.dim_starts[has_dims]]
    return np.stack(
        [
            np.fromiter((numbers[key] for key in schema.keys), np.int64, len(schema.keys))[present],
            np.full(len(present), shard, np.int64),
            np.minimum.reduceat(leaves.file_offsets, first_boxes),
            (leaves.stored_numels() * schema.itemsizes)[present],
            np.minimum.reduceat(first_rows, first_boxes),
        ]
    )


def order_leaves(snapshot: SnapshotReader, locations: LeafLocations) -> list[OrderedLeaf]:
    """Return all leaves in the order that all new shards follow.

    Leaves with larger elements come first, so that every box is aligned. Leaves with the same first
    level in their keys stay together. Within these groups, the leaves have the order of the old
    shards.
    """
    indexes = snapshot.indexes()

    def old_position(leaf: OrderedLeaf) -> tuple[int, int]:
        rows = locations.rows[leaf.key]
        if rows.start == rows.stop:
            return 0, 0
        return int(locations.shard[rows.start]), int(locations.offset[rows.start])

    def old_chunk(leaf: OrderedLeaf) -> tuple[int, int]:
        shard, at = old_position(leaf)
        return shard, int(np.searchsorted(indexes[shard].cuts, at, "right"))

    leaves = [
        OrderedLeaf(key, dtype, shape, prod(shape) * DTYPES[dtype].itemsize)
        for key, (dtype, shape) in snapshot.leaves.items()
    ]
    leaves.sort(
        key=lambda leaf: (
            -DTYPES[leaf.dtype].itemsize,
            leaf.key.partition("/")[0],
            old_position(leaf),
            leaf,
        )
    )
    ordered: list[OrderedLeaf] = []
    for _, group in groupby(leaves, old_chunk):
        number = len(ordered)
        ordered += _split_tiles([leaf._replace(group=number) for leaf in group], locations)
    return ordered


def _split_tiles(group: list[OrderedLeaf], locations: LeafLocations) -> list[OrderedLeaf]:
    """Return the leaves of a group with their ``tile_ends``. A tile ends where the rows of an old
    shard begin, and this is the same old shard for all leaves."""
    tiles = -(-sum(leaf.nbytes for leaf in group) * 10 // (9 * WINDOW_BYTES))
    if tiles < 2:
        return group
    rows = np.r_[tuple(locations.rows[leaf.key] for leaf in group)]
    shards, shard_numbers = np.unique(locations.shard[rows], return_inverse=True)
    shard_bytes = np.zeros(len(shards), np.int64)
    np.add.at(shard_bytes, shard_numbers, locations.nbytes[rows])
    cumulative = np.cumsum(shard_bytes)
    ends = np.arange(1, tiles) * cumulative[-1] // tiles
    end_shards = np.array([*shards, shards[-1] + 1])[np.searchsorted(cumulative, ends, "right")]
    split = []
    for leaf in group:
        if leaf.shape:
            leaf_shards, starts = _first_rows(leaf, locations)
            tile_ends = starts[np.searchsorted(leaf_shards, end_shards)] * leaf.row_bytes
            leaf = leaf._replace(tile_ends=tuple(sorted_unique(tile_ends).tolist()))
        split.append(leaf)
    return split


def _first_rows(leaf: OrderedLeaf, locations: LeafLocations) -> tuple[Ints, Ints]:
    """Return the old shards that have parts of a leaf, and for each of them the first row that it
    or a later shard has. The second array has one more element: the leaf's number of rows."""
    rows = locations.rows[leaf.key]
    starts = np.append(locations.first_row[rows], leaf.shape[0])
    return locations.shard[rows], np.minimum.accumulate(starts[::-1])[::-1]


def assign_leaves(leaves: Sequence[OrderedLeaf], shards: int, split: str) -> list[int | None]:
    """Return, for each leaf, the new shard that gets the whole leaf, or None if the leaf's rows are
    split over all shards. A whole leaf goes to the shard with the fewest bytes."""
    assignment: list[int | None] = [None] * len(leaves)
    shard_bytes, whole = [0] * shards, []
    for number, leaf in enumerate(leaves):
        if split == "even" and leaf.nbytes and leaf.shape and leaf.shape[0] >= shards > 1:
            for shard in range(shards):
                first, end = _row_range(leaf, shard, shards)
                shard_bytes[shard] += (end - first) * leaf.row_bytes
        else:
            whole.append((-leaf.nbytes, number))
    heap = [(nbytes, shard) for shard, nbytes in enumerate(shard_bytes)]
    heapq.heapify(heap)
    for negative_nbytes, number in sorted(whole):  # largest first
        nbytes, shard = heap[0]
        heapq.heapreplace(heap, (nbytes - negative_nbytes, shard))
        assignment[number] = shard
    return assignment


def _row_range(leaf: OrderedLeaf, shard: int, shards: int) -> tuple[int, int]:
    """Return the first and the end row of a new shard's part of a split leaf."""
    rows = leaf.shape[0]
    step = -(-rows // shards)
    return min(shard * step, rows), min((shard + 1) * step, rows)


def group_by_shard(assignment: Sequence[int | None], shards: int) -> list[list[int]]:
    """Return, for each new shard, the numbers of the leaves of which it gets a part, in order."""
    numbers: list[list[int]] = [[] for _ in range(shards)]
    for number, assigned in enumerate(assignment):
        for of_shard in numbers if assigned is None else (numbers[assigned],):
            of_shard.append(number)
    return numbers


def make_shard_image(
    leaves: Sequence[OrderedLeaf],
    assignment: Sequence[int | None],
    numbers: Sequence[int],
    shard: int,
    shards: int,
) -> Image:
    """Return the image of a new shard, which gets parts of the leaves ``numbers``. Its ``sources``
    are, for each box, the number of the leaf and the first byte of the box in the leaf."""
    leaf_boxes, sources = [], []
    for number in numbers:
        leaf = leaves[number]
        box, first = Box.whole(leaf.shape), 0
        if assignment[number] is None:
            first, end = _row_range(leaf, shard, shards)
            if first == end:
                continue
            other_sizes = leaf.shape[1:]
            box = Box((first, *(0 for _ in other_sizes)), (end - first, *other_sizes))
        leaf_boxes.append(LeafBox(leaf.key, leaf.dtype, leaf.shape, box))
        sources.append((number, first * leaf.row_bytes))
    image = make_image(sources, leaf_boxes, range(len(leaf_boxes)))
    tile_cuts = [
        start + tile_end - first
        for (number, first), start, end in zip(
            sources, image.box_starts, image.box_ends, strict=True
        )
        for tile_end in leaves[number].tile_ends
        if first < tile_end < first + end - start
    ]
    starts = np.array(image.box_starts, np.int64)
    shared_cuts = _cuts_of_shared_chunks(starts, len(image.header), min(shards, MAX_OPEN_SHARDS))
    cuts = [image.cuts, shared_cuts, np.array(tile_cuts, np.int64)]
    return replace(image, cuts=sorted_unique(np.concatenate(cuts)))


def _cuts_of_shared_chunks(starts: Ints, header_length: int, shards: int) -> Ints:
    """Return the additional offsets, for many shards, at which chunks that small boxes share end:
    a window can then hold those of all shards for the same leaves."""
    max_bytes = max(1, WINDOW_BYTES // (4 * shards))
    if max_bytes >= MAX_SHARED_CHUNK_BYTES:
        return starts[:0]
    intervals = (starts - header_length) // max_bytes
    return starts[np.flatnonzero(np.diff(intervals)) + 1]


# -- windows --------------------------------------------------------------------------------------


class LeafSpan(NamedTuple):
    """Bytes ``start`` to ``stop`` of a leaf (by its number), which are at ``offset`` in a new shard
    or in a window."""

    leaf: int
    start: int
    stop: int
    offset: int


class Chunk(NamedTuple):
    """A chunk of a new shard.

    Chunks sort in the order in which a reshard processes them, by ``group``, ``tile``, ``leaf``,
    and ``start`` (the chunk's first byte in that leaf).
    """

    group: int
    tile: int
    leaf: int
    start: int
    shard: int
    number: int
    shard_offset: int
    nbytes: int
    spans: tuple[LeafSpan, ...]


def iter_chunks(leaves: Sequence[OrderedLeaf], shard: int, image: Image) -> Iterator[Chunk]:
    """Yield the chunks of a new shard except its header, in the order in which they are
    processed."""
    for _, group in groupby(_iter_in_file_order(leaves, shard, image), lambda chunk: chunk.group):
        yield from sorted(group)


def _iter_in_file_order(leaves: Sequence[OrderedLeaf], shard: int, image: Image) -> Iterator[Chunk]:
    i = 0
    for number, (start, stop) in enumerate(pairwise(image.cuts.tolist()), 1):
        spans = []
        while i < len(image.box_starts) and image.box_starts[i] < stop:
            box_start, box_end = image.box_starts[i], image.box_ends[i]
            leaf, first = image.sources[i]
            a, b = max(start, box_start), min(stop, box_end)
            if b > a:
                spans.append(LeafSpan(leaf, first + a - box_start, first + b - box_start, a))
            if box_end > stop:
                break
            i += 1
        leaf, first = spans[0].leaf, spans[0].start
        group, tile = leaves[leaf].group, bisect_right(leaves[leaf].tile_ends, first)
        yield Chunk(group, tile, leaf, first, shard, number, start, stop - start, tuple(spans))


def group_into_windows(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group the chunks into windows of at most ``WINDOW_BYTES``.

    A window ends at the end of a group of leaves or of a tile if it is then at least half full. No
    old chunk is read twice at such a boundary.
    """
    window: list[Chunk] = []
    # the last boundary of a group or tile in the window: its index, and the bytes before it
    used = boundary = bytes_before = 0
    for chunk in chunks:
        while window and used + chunk.nbytes > WINDOW_BYTES:
            if 2 * bytes_before < used:
                boundary, bytes_before = len(window), used
            yield window[:boundary]
            window, used = window[boundary:], used - bytes_before
            boundary = bytes_before = 0
        if window and window[-1][:2] != chunk[:2]:
            boundary, bytes_before = len(window), used
        window.append(chunk)
        used += chunk.nbytes
    if window:
        yield window


def batch_shards(images: Iterable[Image], traits: Traits) -> Iterator[list[Image]]:
    """Group the images of the new shards into batches that are written concurrently.

    ``traits``: of the store, whose uploads together keep at most ``MAX_UPLOAD_BYTES`` in memory.
    """
    batch: list[Image] = []
    used = 0
    for image in images:
        memory = upload_memory(traits, image.length)
        if batch and (len(batch) == MAX_OPEN_SHARDS or used + memory > MAX_UPLOAD_BYTES):
            yield batch
            batch, used = [], 0
        batch.append(image)
        used += memory
    if batch:
        yield batch


def window_size(images: Sequence[Image]) -> int:
    """Return the number of bytes of memory that a window needs."""
    longest = (int(np.diff(image.cuts).max(initial=0)) for image in images)
    return max(min(WINDOW_BYTES, sum(image.length for image in images)), *longest) + MAX_PADDING


def lay_out_window(chunks: Sequence[Chunk]) -> tuple[list[LeafSpan], dict[tuple[int, int], int]]:
    """Return the layout of a window: the spans to read, and the offset in the window of each span
    of a chunk, by leaf and first byte.

    The window holds the leaves in order, each in row-major order, so that it can be read in large
    pieces. A large span has the same alignment to pages in the window as in its file, which direct
    writes require, as long as the padding does not exceed ``MAX_PADDING``.
    """
    read_spans: list[LeafSpan] = []
    window_offsets: dict[tuple[int, int], int] = {}
    end, spare = 0, MAX_PADDING
    for span in sorted(span for chunk in chunks for span in chunk.spans):
        last = read_spans[-1] if read_spans else None
        if last is not None and (last.leaf, last.stop) == (span.leaf, span.start):
            read_spans[-1] = last._replace(stop=span.stop)
        else:
            padding = (span.offset - end) % ALIGNMENT
            if span.stop - span.start >= SMALL_BOX_BYTES and padding <= spare:
                end, spare = end + padding, spare - padding
            read_spans.append(span._replace(offset=end))
        window_offsets[span.leaf, span.start] = end
        end += span.stop - span.start
    return read_spans, window_offsets
