"""Reshard: write a snapshot again with other shards.

Every byte is checked when it is read, and digested when it is written.

1. Lay out: put all leaves into one order, and assign the parts of each leaf to new shards.
2. Process that order in windows. For each window, read its bytes from the old shards, each chunk
   once, and write each new shard's part of them. There are two windows: one is read while the other
   is written. If the uploads of the store keep bytes in memory, there is one window, and as many
   shards are written at a time as the memory suffices for.
3. Write the new indexes, then the manifest.

Only a chunk at the boundary of two windows is read twice. The reason is that the windows follow the
leaves, not the new shards: a few large chunks may go to many small shards, or many small chunks to
a few large shards.

The first part of this module is arithmetic. It puts the leaves into one order, which the boxes
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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from limpet import events
from limpet.buffers import Buffer, BufferPool, shared_pool
from limpet.convert.copy import Advance, full_manifest
from limpet.format import names
from limpet.format.digest import digest
from limpet.format.index import LeafColumns
from limpet.format.manifest import Manifest, Shard
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.layout.shard_layout import (
    MAX_SHARED_CHUNK_BYTES,
    SMALL_BOX_BYTES,
    LeafBox,
)
from limpet.ragged import Ints, exclusive_cumsum, sorted_unique
from limpet.saving.commit import Receipt, check_receipts, put_manifest, raise_if_exists
from limpet.saving.image import Image, make_image
from limpet.saving.write import shard_key, write_index
from limpet.settings import read_settings
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.read import Target, execute_read_plan
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Traits, Upload, upload_memory
from limpet.threads import Workers, in_parallel, no_op
from limpet.types import ALIGNMENT, BLOCK_SIZE, DTYPES, MIB, Box
from limpet.version import __version__

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


# -- the recipe -----------------------------------------------------------------------------------

SPLITS = ("even", "none")

MAX_READ_BYTES = 32 * MIB
"""Largest size of the chunks that are read and checked concurrently, in bytes."""


def reshard(
    snapshot: SnapshotReader,
    location: Location,
    shards: int,
    split: str = "even",
    advance: Advance = no_op,
) -> SnapshotReader:
    """Write ``snapshot`` again at ``location`` as ``shards`` shards, and return the new snapshot
    once it is committed.

    ``split="even"`` cuts each leaf that has at least ``shards`` rows along dimension 0, as FSDP2
    does (``torch.chunk``: equal parts, rounded up; the last part may be shorter or missing). With
    ``shards`` ranks, rank r then restores from shard r. ``split="none"`` cuts no leaf. A leaf that
    is not cut goes to the shard that has the fewest bytes. The new snapshot is self-contained. It
    has the state, step, branch, parent, and metadata of the old one, and ``resharded`` in its
    metadata names the old snapshot.

    The memory use is at most 256 MiB, for any size of the snapshot, plus the indexes and 40 bytes
    per leaf of each index. ``advance(nbytes)`` is called from several threads as bytes of leaves
    are written. Raises ``AlreadyExists`` if ``location`` holds a snapshot, ``FormatError`` if
    ``snapshot`` is damaged, ``CommitError``, and ``StoreError``. If it raises, nothing was
    committed, unless the error's ``outcome`` is "unknown".
    """
    raise_if_exists(location)
    with snapshot.not_found_if_deleted():
        locations = locate_leaves(snapshot)
        leaves = order_leaves(snapshot, locations)
        reader = _LeafReader(snapshot, leaves, locations)
        assignment = assign_leaves(leaves, shards, split)
        numbers = group_by_shard(assignment, shards)
        attempt, receipts = names.random_id(), list[Receipt]()
        with snapshot.pin_while_reading(), pins.hold_pin(location, attempt):
            all_images = (
                make_shard_image(leaves, assignment, numbers[shard], shard, shards)
                for shard in range(shards)
            )
            for images in batch_shards(all_images, location.store.traits):
                batch = range(len(receipts), len(receipts) + len(images))
                shard_names = [names.shard_name(shard, shards, attempt) for shard in batch]
                digests = _write_shards(location, shard_names, images, reader, advance)
                for shard, name, image, chunk_digests in zip(
                    batch, shard_names, images, digests, strict=True
                ):
                    index_name = names.index_name(shard, shards, attempt)
                    entry = write_index(location, index_name, name, image, chunk_digests)
                    receipts.append(Receipt(shard, entry))
            manifest = _build_manifest(
                snapshot, attempt, check_receipts(location, receipts, shards)
            )
            # read the indexes back from the destination, as a load does
            SnapshotReader(location, manifest, "").read_indexes()
            resharded = put_manifest(location, manifest)
    events.emit(
        "resharded",
        url=snapshot.url,
        to=location.url,
        shards=shards,
        bytes=resharded.nbytes,
    )
    return resharded


def _build_manifest(snapshot: SnapshotReader, attempt: str, shards: Sequence[Shard]) -> Manifest:
    origin = {"from": snapshot.digest, "shards": len(snapshot.manifest.shards)}
    metadata = {**snapshot.manifest.metadata["dict"], "resharded": {"dict": origin}}
    return full_manifest(
        snapshot,
        attempt=attempt,
        writer=f"limpet {__version__}",
        shards=shards,
        metadata={"dict": metadata},
    )


# -- reading and writing --------------------------------------------------------------------------


class _LeafReader:
    """Reads any part of the old snapshot's leaves into memory, and checks it."""

    def __init__(
        self, snapshot: SnapshotReader, leaves: Sequence[OrderedLeaf], locations: LeafLocations
    ) -> None:
        self.leaves = leaves
        self._snapshot = snapshot
        self._indexes = snapshot.indexes()
        self._locations = locations
        longest = max((int(np.diff(i.cuts).max(initial=0)) for i in self._indexes), default=0)
        threads = min(read_settings().threads, MAX_READ_BYTES // max(BLOCK_SIZE, longest))
        self._workers = Workers(shared_pool(), max(1, threads))

    def read(self, spans: Sequence[LeafSpan], buffer: Buffer) -> None:
        """Read the spans into their positions in the buffer. Raises ``FormatError`` or
        ``StoreError``."""
        requests, targets = [], []
        for number, start, stop, at in spans:
            leaf = self.leaves[number]
            size = DTYPES[leaf.dtype].itemsize
            # opaque elements of the same size preserve every bit pattern of every dtype
            opaque = f"V{size}"
            for box in contiguous_boxes(leaf.shape, start // size, stop // size):
                into: Any = np.ndarray(box.sizes, opaque, buffer.view, at)
                requests.append(ReadRequest(leaf.key, box))
                targets.append(Target(opaque, box.sizes, into, buffer.address + at))
                at += box.numel * size
        rows = self._locations.rows
        keys = {self.leaves[span.leaf].key for span in spans}
        shards = sorted_unique(
            np.concatenate([self._locations.shard[rows[k]] for k in keys])
        ).tolist()
        indexes = [self._indexes[s] for s in shards]
        plan = make_read_plan(indexes, requests, self._snapshot.checked_headers)
        execute_read_plan(self._snapshot.location, plan, indexes, targets, self._workers)
        self._snapshot.checked_headers.update(plan.headers)


def _write_shards(
    location: Location,
    shard_names: Sequence[str],
    images: Sequence[Image],
    reader: _LeafReader,
    advance: Advance,
) -> list[list[str]]:
    """Write the shards concurrently, and return the digests of their chunks once the shards are
    durable."""
    read_lock = Lock()
    digests = [[digest(i.header), *[""] * (len(i.cuts) - 1)] for i in images]
    size, traits = window_size(images), location.store.traits
    count = 1 if traits.upload_memory else 2
    windows = Workers.create(BufferPool(count * size, size))
    if traits.ordered:  # what is written in order does not have to wait
        windows = replace(windows, threads=1)

    def copy_window(chunks: list[Chunk]) -> None:
        with windows.buffer() as buffer:
            spans, window_offsets = lay_out_window(chunks)
            with read_lock:
                reader.read(spans, buffer)

            def write(chunk: Chunk) -> None:
                views = []
                for span in chunk.spans:
                    at = window_offsets[span.leaf, span.start]
                    views.append(buffer.view[at : at + span.stop - span.start])
                data = views[0] if len(views) == 1 else memoryview(b"".join(views))
                digests[chunk.shard][chunk.number] = digest(data)
                uploads[chunk.shard].write_at(chunk.shard_offset, data)
                advance(chunk.nbytes)

            windows.each(chunks, write)

    with ExitStack() as stack:
        stack.callback(windows.pool.close)
        uploads: list[Upload] = []
        for name, image in zip(shard_names, images, strict=True):
            uploads.append(
                stack.enter_context(location.store.put(shard_key(location, name), image.length))
            )
            uploads[-1].write_at(0, memoryview(image.header))
        chunks = heapq.merge(
            *(iter_chunks(reader.leaves, n, image) for n, image in enumerate(images))
        )
        in_parallel(group_into_windows(chunks), copy_window, count)
        windows.each(uploads, _commit_upload)
    return digests


def _commit_upload(upload: Upload) -> None:
    upload.commit()
