"""Plan which chunks to read and which bytes to copy from them to fill the requested boxes.

The plan converts any stored layout into any requested layout, so resharding is pure arithmetic. A
digest covers a whole chunk, so a reader reads whole chunks and copies the requested parts out of
them. A reader needs the memory of one item, whatever the sizes of the boxes.

A read of data also reads and checks the header of the shard: other programs find the tensors by it,
and must not see others than this one. Exempt are a slice of one leaf, which would need a second
read, and shards of earlier versions, of whose headers the index has no digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from limpet.errors import ManifestInvalid, MissingLeaf, PlanError
from limpet.format.index import ChunkRefs, LeafSchema, ShardIndex
from limpet.layout.boxes import contiguous_boxes, flat_range, subtract
from limpet.ragged import Ints, exclusive_cumsum, flatten_rows, int_array, ranges, row_products
from limpet.text import MAX_SHOWN, format_list
from limpet.types import BLOCK_SIZE, Box

# -- a requested box from stored boxes ------------------------------------------------------------
#
# A linear copy is one run of bytes both in the file and in the target. All others are strided.

VECTORIZE_ABOVE = 16
"""If more stored boxes than this overlap a requested box, NumPy operations process them at once."""


class StoredBox(NamedTuple):
    """A stored box that overlaps a requested box."""

    shard: int
    file_offset: int
    box: Box
    itemsize: int


class StridedOverlap(NamedTuple):
    """A part of a requested box, in one stored box, that is strided in the file or the target."""

    request_id: int
    requested_box: Box
    overlap: Box
    stored: StoredBox


class ShardCopies(NamedTuple):
    """The copies to make from one shard. ``linear`` is flat, with four numbers per copy: request
    ID, file offset, byte offset in the requested box, number of bytes."""

    linear: array[int]
    strided: list[StridedOverlap]


def cover_box(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> Box | None:
    """Add the copies that fill ``requested_box`` to ``copies``, and return a part that no stored
    box covers, or None. Rows of ``overlapping``: shard, file offset, itemsize, offsets, sizes."""
    if 0 in requested_box.sizes:
        return None
    if len(overlapping) > VECTORIZE_ABOVE and _try_cover_linear(
        request_id, requested_box, overlapping, copies
    ):
        return None
    dims = len(requested_box.sizes)
    stored_boxes = [
        StoredBox(shard, at, Box(tuple(box[:dims]), tuple(box[dims:])), size)
        for shard, at, size, *box in overlapping.tolist()
    ]
    # Sorting by offset keeps the number of missing pieces small.
    missing = [requested_box]
    for stored in sorted(stored_boxes, key=lambda stored: stored.box.offsets):
        uncovered: list[Box] = []
        for piece in missing:
            part = piece.intersection(stored.box)
            if part is None:
                uncovered.append(piece)
                continue
            linear = _linear_copy(request_id, part, requested_box, stored)
            if linear is None:
                copies[stored.shard].strided.append(
                    StridedOverlap(request_id, requested_box, part, stored)
                )
            else:
                copies[stored.shard].linear.extend(linear)
            uncovered += subtract(piece, part)
        missing = uncovered
        if not missing:
            return None
    return missing[0]


def _try_cover_linear(
    request_id: int, requested_box: Box, overlapping: Ints, copies: dict[int, ShardCopies]
) -> bool:
    """Return True after covering the box with linear copies only: possible if each stored box gives
    one run of bytes and the runs tile the box, as for rows in many shards."""
    dims, itemsize = len(requested_box.sizes), int(overlapping[0, 2])
    if requested_box.numel * itemsize >= 1 << 62:  # not exact in int64
        return False
    offsets, sizes = overlapping[:, 3 : 3 + dims], overlapping[:, 3 + dims :]
    first = np.maximum(offsets, requested_box.offsets)
    last = np.minimum(offsets + sizes, np.add(requested_box.offsets, requested_box.sizes)) - 1
    numels = (last - first + 1).prod(axis=1)
    target_begin, target_end = _flat_ranges(
        first, last, np.array(requested_box.offsets), np.array([requested_box.sizes])
    )
    source_begin, source_end = _flat_ranges(first, last, offsets, sizes)
    order = np.argsort(target_begin)
    bounds = np.append(target_begin[order], requested_box.numel)
    if (
        (numels < 1).any()
        or (target_end - target_begin != numels).any()
        or (source_end - source_begin != numels).any()
        or bounds[0] != 0
        or (target_end[order] != bounds[1:]).any()
    ):
        return False
    rows = np.column_stack(
        [overlapping[:, 1] + source_begin * itemsize, target_begin * itemsize, numels * itemsize]
    ).tolist()
    for shard, (at, into_byte, nbytes) in zip(overlapping[:, 0].tolist(), rows, strict=True):
        copies[shard].linear.extend((request_id, at, into_byte, nbytes))
    return True


def _flat_ranges(first: Ints, last: Ints, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Compute ``flat_range`` of many parts, given their first and last elements per dimension."""
    steps = np.ones_like(sizes)
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    begin: Ints = ((first - offsets) * steps).sum(axis=1)
    end: Ints = ((last - offsets) * steps).sum(axis=1) + 1
    return begin, end


def _linear_copy(
    request_id: int, overlap: Box, requested_box: Box, stored: StoredBox
) -> tuple[int, int, int, int] | None:
    """Return ``overlap`` as one linear copy, or None if it is strided in the file or the target."""
    numel, itemsize = overlap.numel, stored.itemsize
    source_begin, source_end = flat_range(overlap, stored.box)
    if source_end - source_begin != numel:
        return None
    target_begin, target_end = flat_range(overlap, requested_box)
    if target_end - target_begin != numel:
        return None
    return (
        request_id,
        stored.file_offset + source_begin * itemsize,
        target_begin * itemsize,
        numel * itemsize,
    )


_DAMAGED_ADVICE = (
    "Load another version; this one is damaged or was written by a faulty version of Limpet"
)

ChunkMap = tuple[Ints, ChunkRefs | None]
"""The ends of a shard's chunks, and their locations unless all are in the shard itself."""


class ReadRequest(NamedTuple):
    """A part of a leaf to read into a contiguous, row-major target of stored elements."""

    key: str
    box: Box


class StridedCopy(NamedTuple):
    """Copy the part ``source`` of a row-major array of ``shape`` at ``file_offset`` in the file to
    the part ``target`` of the requested box."""

    request_id: int
    file_offset: int
    itemsize: int
    shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadItem:
    """A range of chunks of a shard, bytes ``start`` to ``stop``, to read at once, and the copies to
    make once they are verified. Rows of ``linear_copies``: see ``ShardCopies``."""

    shard: int
    first_chunk: int
    end_chunk: int
    start: int
    stop: int
    linear_copies: Ints
    strided_copies: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The items to read, ordered by shard (an index into the given shards) and then by offset.
    ``headers``: the names of the shards whose header is read and checked."""

    items: tuple[ReadItem, ...]
    headers: tuple[str, ...] = ()


def make_read_plan(
    shard_indexes: Iterable[ShardIndex],
    requests: Sequence[ReadRequest],
    checked_headers: Collection[str] | None = None,
) -> ReadPlan:
    """Plan the reads and copies that fill every requested box, each element from one stored box.

    ``shard_indexes`` may be a generator that decodes one index at a time. The header of a shard's
    own file is read with its data unless ``checked_headers`` has its name or is None. Raises
    ``MissingLeaf`` with all keys that no shard has, ``ManifestInvalid`` with all boxes that are not
    covered, or a leaf whose type differs, and ``PlanError`` for a box that is not within its leaf.
    """
    search = _OverlapSearch(requests)
    chunk_maps: dict[int, ChunkMap] = {}
    copies: dict[int, ShardCopies] = {}
    unchecked_headers: dict[int, str] = {}
    for number, shard in enumerate(shard_indexes):
        shard_copies = ShardCopies(array("q"), [])
        if search.scan_shard(number, shard, shard_copies):
            chunk_maps[number], copies[number] = (shard.cuts, shard.chunk_refs), shard_copies
            if checked_headers is not None and shard.shard not in checked_headers:
                unchecked_headers[number] = shard.shard
    search.check_requests()
    uncovered: list[tuple[ReadRequest, Box]] = []
    for number in np.flatnonzero(~search.exact_matches).tolist():
        request = requests[number]
        missing = cover_box(number, request.box, search.pop_overlaps(number), copies)
        if missing is not None:
            uncovered.append((request, missing))
    if uncovered:
        raise _coverage_error(uncovered)
    items: list[ReadItem] = []
    headers: list[str] = []
    for number in list(copies):
        header = unchecked_headers.get(number)
        first = len(items)
        items += _make_items(number, chunk_maps[number], copies.pop(number), header is not None)
        if header is not None and items[first:] and not items[first].first_chunk:
            headers.append(header)
    return ReadPlan(tuple(items), tuple(headers))


def chunk_read_items(
    shard: int, cuts: Ints, chunk_refs: ChunkRefs | None = None, only_chunks: Ints | None = None
) -> list[ReadItem]:
    """Make items that read chunks of a shard, by default all and its header, and copy nothing."""
    chunks = np.arange(len(cuts)) if only_chunks is None else only_chunks
    chunk_ranges = _ChunkRanges.merge_adjacent(chunks, (cuts, chunk_refs))
    return chunk_ranges.make_items(shard, np.empty((0, 4), np.int64), {})


def _coverage_error(uncovered: list[tuple[ReadRequest, Box]]) -> ManifestInvalid:
    parts = [
        f"{request.key} (offsets {box.offsets}, sizes {box.sizes})" for request, box in uncovered
    ]
    return ManifestInvalid(
        f"The shards lack parts of {len(uncovered)} requested boxes",
        expected="stored boxes that cover every leaf",
        found="no stored data for " + format_list(parts, MAX_SHOWN),
        todo=_DAMAGED_ADVICE,
        leaves=tuple(request.key for request, _ in uncovered),
    )


def _make_items(
    shard: int, chunk_map: ChunkMap, shard_copies: ShardCopies, check_header: bool
) -> list[ReadItem]:
    """Make the items of one shard for all copies from it, and for its header if ``check_header``
    and if any of the other chunks is in the shard's own file."""
    cuts, chunk_refs = chunk_map
    linear = np.array(shard_copies.linear, np.int64).reshape(-1, 4)
    linear = linear[linear[:, 3] > 0]
    begin = linear[:, 1]
    end = begin + linear[:, 3]
    strided = _strided_copies_by_chunk(shard_copies.strided, cuts)
    needed = np.zeros(len(cuts) + 1, np.int64)
    np.add.at(needed, np.searchsorted(cuts, begin, "right"), 1)
    np.add.at(needed, np.searchsorted(cuts, end, "left") + 1, -1)
    needed = np.cumsum(needed)
    needed[list(strided)] += 1
    if check_header:
        needed[0] = needed[:-1][slice(None) if chunk_refs is None else chunk_refs.files == 0].any()
    return _ChunkRanges.merge_adjacent(np.flatnonzero(needed), chunk_map).make_items(
        shard, linear, strided
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRanges:
    """Ranges of chunks, each to read at once: columns of chunk numbers and file offsets."""

    first_chunk: Ints
    end_chunk: Ints
    start: Ints
    stop: Ints

    @classmethod
    def merge_adjacent(cls, chunks: Ints, chunk_map: ChunkMap) -> _ChunkRanges:
        """Merge chunks that are adjacent in their file and within one block of ``BLOCK_SIZE``
        bytes, counted from the end of the header. A short header is read with the first block."""
        cuts, chunk_refs = chunk_map
        start = np.concatenate([np.zeros(1, np.int64), cuts[:-1]])[chunks]
        stop = cuts[chunks]
        # A chunk that crosses a block boundary gets its own number. Limpet writes no such chunks.
        block = (start - cuts[0]) // BLOCK_SIZE + (stop - 1 - cuts[0]) // BLOCK_SIZE
        if cuts[0] <= BLOCK_SIZE:
            block[chunks == 0] = 0
        is_boundary = (chunks[1:] != chunks[:-1] + 1) | (block[1:] != block[:-1])
        if chunk_refs is not None:
            is_boundary |= ~chunk_refs.is_contiguous_with_next(cuts)[chunks[:-1]]
        edge = np.ones(min(1, len(chunks)), bool)
        begins, ends = np.concatenate([edge, is_boundary]), np.concatenate([is_boundary, edge])
        return cls(chunks[begins], chunks[ends] + 1, start[begins], stop[ends])

    def make_items(
        self, shard: int, linear_copies: Ints, strided_copies: dict[int, list[StridedCopy]]
    ) -> list[ReadItem]:
        """Make the items with their copies; ``strided_copies`` is keyed by chunk number."""
        # split the linear copies at the ends of items, and sort them by offset
        begin = linear_copies[:, 1]
        end = begin + linear_copies[:, 3]
        first = np.searchsorted(self.stop, begin, "right")
        count = np.searchsorted(self.start, end, "left") - first
        row = np.repeat(np.arange(len(linear_copies)), count)
        item = ranges(first, count)
        low = np.maximum(begin[row], self.start[item])
        high = np.minimum(end[row], self.stop[item])
        target_offset = linear_copies[row, 2] + low - begin[row]
        pieces = np.column_stack([linear_copies[row, 0], low, target_offset, high - low])
        pieces = pieces[np.argsort(low, kind="stable")]
        row_bounds = [*np.searchsorted(pieces[:, 1], self.start).tolist(), len(pieces)]
        strided_by_item: dict[int, list[StridedCopy]] = {}
        for chunk, copies in sorted(strided_copies.items()):
            i = int(np.searchsorted(self.first_chunk, chunk, "right")) - 1
            strided_by_item.setdefault(i, []).extend(copies)
        items: list[ReadItem] = []
        rows = np.column_stack([self.first_chunk, self.end_chunk, self.start, self.stop]).tolist()
        for i, (first_chunk, end_chunk, start, stop) in enumerate(rows):
            linear = pieces[row_bounds[i] : row_bounds[i + 1]]
            strided = tuple(strided_by_item.get(i, ()))
            items.append(ReadItem(shard, first_chunk, end_chunk, start, stop, linear, strided))
        return items


def _strided_copies_by_chunk(
    overlaps: Sequence[StridedOverlap], cuts: Ints
) -> dict[int, list[StridedCopy]]:
    """Make the strided copies for the overlaps, keyed by the number of the source chunk."""
    copies_by_chunk: dict[int, list[StridedCopy]] = {}
    for overlap in overlaps:
        at, itemsize = overlap.stored.file_offset, overlap.stored.itemsize
        first, last = flat_range(overlap.overlap, overlap.stored.box)
        stop = at + overlap.stored.box.numel * itemsize
        chunk = int(np.searchsorted(cuts, at + first * itemsize, "right"))
        # Use all of the box that is in the chunk: whole rows result in fewer boxes.
        begin = max(at, int(cuts[chunk - 1]))
        while begin < at + last * itemsize:
            # The index is validated, so chunks end between elements.
            end = min(stop, int(cuts[chunk]))
            copies = list(
                _iter_strided_copies(overlap, (begin - at) // itemsize, (end - at) // itemsize)
            )
            if copies:
                copies_by_chunk.setdefault(chunk, []).extend(copies)
            begin, chunk = end, chunk + 1
    return copies_by_chunk


def _iter_strided_copies(
    strided_overlap: StridedOverlap, first: int, last: int
) -> Iterator[StridedCopy]:
    """Yield copies from elements ``first`` to ``last`` of the stored box to the requested box."""
    box, itemsize = strided_overlap.stored.box, strided_overlap.stored.itemsize
    at = strided_overlap.stored.file_offset + first * itemsize
    for r in contiguous_boxes(box.sizes, first, last):
        offsets = tuple(o + z for o, z in zip(r.offsets, box.offsets, strict=True))
        overlap = Box(offsets, r.sizes).intersection(strided_overlap.overlap)
        if overlap is not None:
            yield StridedCopy(
                strided_overlap.request_id,
                at,
                itemsize,
                r.sizes,
                overlap.slices(offsets),
                overlap.slices(strided_overlap.requested_box.offsets),
            )
        at += r.numel * itemsize


# -- the stored boxes that overlap requests --------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _RequestColumns:
    """The requests for the leaves of a shard, one per row. Its box has the ``dims`` entries of
    ``offsets`` and ``sizes`` from index ``begins`` on."""

    leaf: Ints
    request_id: Ints
    itemsize: Ints
    dims: Ints
    begins: Ints
    offsets: Ints
    sizes: Ints


class _OverlapSearch:
    """Search all shards, each once, for stored boxes that overlap requested boxes. ``overlaps`` has
    them as in ``cover_box``, but for requests that equal one of them (``exact_matches``)."""

    def __init__(self, requests: Sequence[tuple[str, Box]]) -> None:
        self.requests = requests
        self.exact_matches = np.zeros(len(requests), bool)
        self.overlaps: dict[int, array[int]] = {}
        self.leaf_types: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._columns_by_schema: dict[LeafSchema, _RequestColumns] = {}
        self._requests_by_key: dict[str, list[int]] = {}
        for number, (key, _) in enumerate(requests):
            self._requests_by_key.setdefault(key, []).append(number)

    def scan_shard(
        self, shard_number: int, shard_index: ShardIndex, shard_copies: ShardCopies
    ) -> bool:
        """Record the boxes of a shard that overlap requests, with copies for exact matches, and
        return True if there are any. No Python loop visits boxes that are not requested."""
        columns = shard_index.leaves
        requested = self._columns_by_schema.get(columns.schema)
        if requested is None:
            requested = self._columns_by_schema[columns.schema] = self._request_columns(
                columns.schema, shard_index.shard
            )
        counts = columns.box_counts[requested.leaf]
        pair = np.repeat(np.arange(len(counts)), counts)
        box = ranges(exclusive_cumsum(columns.box_counts)[requested.leaf], counts)
        unmatched = ~self.exact_matches[requested.request_id[pair]]
        pair, box = pair[unmatched], box[unmatched]
        dims, begins = requested.dims[pair], columns.dim_starts[box]
        stored, wanted = ranges(begins, dims), ranges(requested.begins[pair], dims)
        o, n = columns.offsets[stored], columns.sizes[stored]
        z, m = requested.offsets[wanted], requested.sizes[wanted]
        equal = row_products((o == z) & (n == m), dims)
        hits = np.flatnonzero(equal | row_products((o < z + m) & (z < o + n), dims))
        if not len(hits):
            return False
        pair, box, begins = pair[hits], box[hits], begins[hits]
        dims, equal = dims[hits], equal[hits]
        request, at, size = (
            requested.request_id[pair],
            columns.file_offsets[box],
            requested.itemsize[pair],
        )
        stored = ranges(begins, dims)
        offsets, sizes = columns.offsets[stored], columns.sizes[stored]
        if equal.any():
            # If several boxes match a request, use the first.
            _, first = np.unique(request[equal], return_index=True)
            linear = (request, at, np.zeros_like(at), columns.numels[box] * size)
            copies = np.column_stack(linear)[equal][first]
            shard_copies.linear.frombytes(copies.tobytes())
            self.exact_matches[request[equal]] = True
        if not equal.all():
            o, n, stop = offsets.tolist(), sizes.tolist(), 0
            rows = (request, at, size, dims, self.exact_matches[request])
            for r, a, s, count, matched in zip(*(row.tolist() for row in rows), strict=True):
                start, stop = stop, stop + count
                if not matched:
                    known = self.overlaps.setdefault(r, array("q"))
                    known.extend((shard_number, a, s, *o[start:stop], *n[start:stop]))
        return True

    def _check_type(self, key: str, leaf_type: tuple[str, tuple[int, ...]], file: str) -> None:
        known_type = self.leaf_types.setdefault(key, leaf_type)
        if known_type != leaf_type:
            raise ManifestInvalid(
                f"Shards disagree about {key}",
                expected=f"{known_type[0]} {list(known_type[1])}",
                found=f"{leaf_type[0]} {list(leaf_type[1])} in {file}",
                todo=_DAMAGED_ADVICE,
                file=file,
                leaf=key,
            )

    def _request_columns(self, schema: LeafSchema, file: str) -> _RequestColumns:
        """Return the requests for the leaves of a schema. Raises ``ManifestInvalid`` if an earlier
        shard gives a leaf another dtype or shape."""
        leaves, request_ids = [], []
        # a read of one leaf of many looks only at that leaf
        common = self._requests_by_key.keys() & schema.numbers.keys()
        for leaf in sorted(map(schema.numbers.__getitem__, common)):
            key = schema.keys[leaf]
            matching = self._requests_by_key[key]
            self._check_type(key, (schema.dtypes[leaf], schema.shapes[leaf]), file)
            leaves += [leaf] * len(matching)
            request_ids += matching
        try:
            return self._build_columns(schema, leaves, request_ids)
        except (OverflowError, ValueError):  # ``check_requests`` reports boxes outside their leaf
            boxes = [self.requests[n][1] for n in request_ids]
            inside = [
                b.is_within(schema.shapes[leaf]) for b, leaf in zip(boxes, leaves, strict=True)
            ]
            return self._build_columns(
                schema, [*compress(leaves, inside)], [*compress(request_ids, inside)]
            )

    def _build_columns(
        self, schema: LeafSchema, leaves: list[int], request_ids: list[int]
    ) -> _RequestColumns:
        """Build the columns of these requests for these leaves. Raises ``ValueError`` for another
        number of dimensions, and ``OverflowError`` for a number beyond 64 bits."""
        leaf, request_id = int_array(leaves), int_array(request_ids)
        dims = schema.ndims[leaf]
        offsets, sizes = list[tuple[int, ...]](), list[tuple[int, ...]]()
        for number in request_ids:
            box = self.requests[number][1]
            offsets.append(box.offsets)
            sizes.append(box.sizes)
        if not [*map(len, offsets)] == [*map(len, sizes)] == dims.tolist():
            raise ValueError
        begins, itemsize = exclusive_cumsum(dims), schema.itemsizes[leaf]
        return _RequestColumns(
            leaf, request_id, itemsize, dims, begins, flatten_rows(offsets), flatten_rows(sizes)
        )

    def pop_overlaps(self, request_id: int) -> Ints:
        """Return the stored boxes that overlap a request, one per row, and forget them."""
        dims = len(self.requests[request_id][1].sizes)
        return np.array(self.overlaps.pop(request_id, ()), np.int64).reshape(-1, 3 + 2 * dims)

    def check_requests(self) -> None:
        """Raise ``MissingLeaf`` if no shard has a requested leaf, and ``PlanError`` if a requested
        box is not within its leaf."""
        missing = sorted(self._requests_by_key.keys() - self.leaf_types.keys())
        if missing:
            raise MissingLeaf(
                f"The snapshot lacks {len(missing)} of the requested leaves",
                expected=format_list(missing, MAX_SHOWN),
                found="none of their boxes in any shard",
                todo="Do not request these leaves, or load a version that has them",
                leaves=tuple(missing),
            )
        for (key, box), matched in zip(self.requests, self.exact_matches.tolist(), strict=True):
            shape = self.leaf_types[key][1]
            if not matched and not box.is_within(shape):
                raise PlanError(
                    f"The requested part of {key} is not within the stored tensor",
                    expected=f"a part of a tensor of shape {list(shape)}",
                    found=f"offsets {box.offsets}, sizes {box.sizes}",
                    todo="Request a part within the stored shape",
                    key=key,
                )
