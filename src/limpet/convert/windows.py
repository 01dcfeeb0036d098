"""Write the leaves of a snapshot to other files, window by window: for a reshard and an export.

All new files follow one order of the leaves, which is processed in windows: each reads its bytes
from the old shards and writes each new file's part of them. One window is read while the other is
written (one alone, if uploads keep bytes in memory). Every byte is checked and digested. Only a
chunk between two windows is read twice, whatever the numbers and sizes of old and new files.

Many old shards may each have small boxes of several leaves in one chunk. If these chunks together
are larger than a window, the leaves are processed in tiles: first the parts of all leaves that are
in the first old shards, then those in the next ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from limpet.buffers import Buffer, BufferPool, shared_pool
from limpet.format.digest import digest
from limpet.format.index import LeafColumns
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.layout.shard_layout import MAX_SHARED_CHUNK_BYTES, SMALL_BOX_BYTES
from limpet.ragged import Ints, exclusive_cumsum, sorted_unique
from limpet.saving.image import Image
from limpet.settings import read_settings
from limpet.snapshot.chunks import Target, execute_read_plan
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays.own import Source
from limpet.storage.store import Store, Upload
from limpet.threads import Workers, in_parallel
from limpet.types import ALIGNMENT, BLOCK_SIZE, DTYPES, MIB, Advance

WINDOW_BYTES = 48 * MIB
"""Largest size of a window, in bytes of leaves."""

MAX_PADDING = 1 * MIB
"""Largest number of bytes that a window leaves unused, to align large spans for direct I/O."""

MAX_READ_BYTES = 32 * MIB
"""Largest size of the chunks that are read and checked concurrently, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafLocations:
    """The locations of the leaves in the old shards. The columns have a row for each leaf and each
    shard with boxes of it, sorted by both: their first offset and bytes, and smallest row."""

    rows: dict[str, slice]
    shard: Ints
    offset: Ints
    nbytes: Ints
    first_row: Ints

    def first_box(self, key: str) -> tuple[int, int]:
        """Return the first shard that has boxes of a leaf, and the offset of these boxes."""
        rows = self.rows[key]
        if rows.start == rows.stop:
            return 0, 0
        return int(self.shard[rows.start]), int(self.offset[rows.start])


class OrderedLeaf(NamedTuple):
    """A leaf, in the order of all new files. ``group``: the number of the first leaf that shares
    chunks with it; ``tile_ends``: where its tiles end, in bytes, except the last. ``source``: read
    this by one thread instead."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    group: int = 0
    tile_ends: tuple[int, ...] = ()
    source: Source | None = None

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
    _, shard, offset, nbytes, first_row = table
    return LeafLocations(rows, shard=shard, offset=offset, nbytes=nbytes, first_row=first_row)


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


def group_leaves(
    snapshot: SnapshotReader, leaves: list[OrderedLeaf], locations: LeafLocations
) -> list[OrderedLeaf]:
    """Return the leaves, which are in order, with their groups and tiles."""
    if sum(leaf.nbytes for leaf in leaves) <= WINDOW_BYTES or any(leaf.source for leaf in leaves):
        return leaves  # all of them are in one window, or some in no chunk
    indexes = snapshot.indexes()

    def old_chunk(leaf: OrderedLeaf) -> tuple[int, int]:
        shard, at = locations.first_box(leaf.key)
        return shard, int(np.searchsorted(indexes[shard].cuts, at, "right"))

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


def add_cuts(image: Image, leaves: Sequence[OrderedLeaf], images: int = 1) -> Image:
    """Return an image whose chunks end where tiles end, and are short if there are many images. A
    box has as its source the number of the leaf, and the box's first byte in it."""
    tile_cuts = [
        start + tile_end - first
        for (number, first), start, end in zip(
            image.sources, image.box_starts, image.box_ends, strict=True
        )
        for tile_end in leaves[number].tile_ends
        if first < tile_end < first + end - start
    ]
    starts = np.array(image.box_starts, np.int64)
    shared_cuts = _cuts_of_shared_chunks(starts, len(image.header), images)
    cuts = [image.cuts, shared_cuts, np.array(tile_cuts, np.int64)]
    return replace(image, cuts=sorted_unique(np.concatenate(cuts)))


def _cuts_of_shared_chunks(starts: Ints, header_length: int, images: int) -> Ints:
    """Return the additional offsets, for many images, at which chunks that small boxes share end:
    a window can then hold those of all images for the same leaves."""
    max_bytes = max(1, WINDOW_BYTES // (4 * images))
    if max_bytes >= MAX_SHARED_CHUNK_BYTES:
        return starts[:0]
    return starts[np.flatnonzero(np.diff((starts - header_length) // max_bytes)) + 1]


class LeafSpan(NamedTuple):
    """Bytes ``start`` to ``stop`` of a leaf (by number), at ``offset`` in a file or a window."""

    leaf: int
    start: int
    stop: int
    offset: int


class Chunk(NamedTuple):
    """Chunk ``number`` of a new file. Chunks sort in the order in which they are processed;
    ``start`` is the first byte in the leaf."""

    group: int
    tile: int
    leaf: int
    start: int
    image: int
    number: int
    offset: int
    nbytes: int
    spans: tuple[LeafSpan, ...]


def iter_chunks(leaves: Sequence[OrderedLeaf], number: int, image: Image) -> Iterator[Chunk]:
    """Yield image ``number``'s chunks but the header, in the order in which they are processed."""
    for _, group in groupby(_iter_in_file_order(leaves, number, image), lambda chunk: chunk.group):
        yield from sorted(group)


def _iter_in_file_order(
    leaves: Sequence[OrderedLeaf], number: int, image: Image
) -> Iterator[Chunk]:
    i = 0
    for n, (start, stop) in enumerate(pairwise(image.cuts.tolist()), 1):
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
        yield Chunk(group, tile, leaf, first, number, n, start, stop - start, tuple(spans))


def group_into_windows(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group chunks into windows of at most ``WINDOW_BYTES``. One ends with a group of leaves or a
    tile if it is at least half full: no old chunk is read twice there."""
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


def lay_out_window(chunks: Sequence[Chunk]) -> tuple[list[LeafSpan], dict[tuple[int, int], int]]:
    """Return the spans to read, and each chunk's spans' offsets in the window, by leaf and byte.

    The window holds the leaves in order, in row-major order, to be read in large pieces. A large
    span is aligned to pages as in its file, for direct writes, within ``MAX_PADDING``.
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


ReadSpans = Callable[[Sequence[LeafSpan], Buffer], None]
"""Reads spans into their positions in a buffer. Raises ``FormatError`` or ``StoreError``."""


def make_reader(
    snapshot: SnapshotReader, leaves: Sequence[OrderedLeaf], locations: LeafLocations
) -> ReadSpans:
    """Return the function that reads any part of the leaves of a snapshot, and checks it."""
    indexes = snapshot.indexes()
    longest = max((int(np.diff(i.cuts).max(initial=0)) for i in indexes), default=0)
    threads = min(read_settings().threads, MAX_READ_BYTES // max(BLOCK_SIZE, longest))
    workers = Workers(shared_pool(), max(1, threads))

    def read(spans: Sequence[LeafSpan], buffer: Buffer) -> None:
        requests, targets = [], []
        for number, start, stop, at in spans:
            leaf = leaves[number]
            if leaf.source is not None:
                leaf.source.read_into(start, buffer.view[at : at + stop - start])
                continue
            size = DTYPES[leaf.dtype].itemsize
            # opaque elements of the same size preserve every bit pattern of every dtype
            opaque = f"V{size}"
            for box in contiguous_boxes(leaf.shape, start // size, stop // size):
                into: Any = np.ndarray(box.sizes, opaque, buffer.view, at)
                requests.append(ReadRequest(leaf.key, box))
                targets.append(Target(opaque, box.sizes, into, buffer.address + at))
                at += box.numel * size
        rows = [slice(0), *(locations.rows[key] for key in {request.key for request in requests})]
        shards = sorted_unique(np.concatenate([locations.shard[r] for r in rows])).tolist()
        used = [indexes[s] for s in shards]
        plan = make_read_plan(used, requests, snapshot.checked_headers)
        execute_read_plan(snapshot.location, plan, used, targets, workers)
        snapshot.checked_headers.update(plan.headers)

    return read


def write_images(
    store: Store,
    keys: Sequence[str],
    images: Sequence[Image],
    leaves: Sequence[OrderedLeaf],
    read: ReadSpans,
    advance: Advance,
) -> list[list[str]]:
    """Write each image to its key, concurrently; return the chunks' digests once durable."""
    read_lock = Lock()
    digests = [[digest(i.header), *[""] * (len(i.cuts) - 1)] for i in images]
    longest = max(int(np.diff(image.cuts).max(initial=0)) for image in images)
    size = max(longest, min(WINDOW_BYTES, sum(image.length for image in images))) + MAX_PADDING
    traits = store.traits
    count = 1 if traits.upload_memory or traits.ordered else 2
    windows = Workers.create(BufferPool(count * size, size))
    if traits.ordered:  # what is written in order does not have to wait
        windows = replace(windows, threads=1)

    def copy_window(chunks: list[Chunk]) -> None:
        with windows.buffer() as buffer:
            spans, window_offsets = lay_out_window(chunks)
            with read_lock:
                read(spans, buffer)

            def write(chunk: Chunk) -> None:
                views = []
                for span in chunk.spans:
                    at = window_offsets[span.leaf, span.start]
                    views.append(buffer.view[at : at + span.stop - span.start])
                data = views[0] if len(views) == 1 else memoryview(b"".join(views))
                digests[chunk.image][chunk.number] = digest(data)
                uploads[chunk.image].write_at(chunk.offset, data)
                advance(chunk.nbytes)

            windows.each(chunks, write)

    with ExitStack() as stack:
        stack.callback(windows.pool.close)
        uploads: list[Upload] = []
        for key, image in zip(keys, images, strict=True):
            uploads.append(stack.enter_context(store.put(key, image.length)))
            uploads[-1].write_at(0, memoryview(image.header))
        chunks = heapq.merge(*(iter_chunks(leaves, n, image) for n, image in enumerate(images)))
        in_parallel(group_into_windows(chunks), copy_window, count)
        windows.each(uploads, lambda upload: upload.commit())
    return digests
