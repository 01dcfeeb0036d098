"""Incremental saves: find the chunks of an image that an earlier version, the base, already holds.

The save refers to a chunk of the base if that chunk has the same bytes (by digest) at the same
offset of the same box of the same leaf, with the same dtype. It writes every other chunk. A
reference names the file that holds the bytes; references never form chains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limpet import events
from limpet.errors import FormatError, ManifestInvalid, NotFound
from limpet.format import names
from limpet.format.index import ChunkRefs, ShardIndex, expand_runs
from limpet.format.manifest import Shard, ShardReference
from limpet.format.safetensors import build_header
from limpet.layout import shard_layout
from limpet.layout.shard_layout import ImageSpan, partial_shard_entries
from limpet.ragged import Ints, exclusive_cumsum, ranges, sorted_unique
from limpet.ranks.collective import Collective
from limpet.saving.image import Image, Piece, has_sources
from limpet.snapshot.index_files import read_index
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.threads import gc_paused
from limpet.types import ALIGNMENT, DTYPES

MIN_BASE_FRACTION = 0.1
"""Smallest fraction of a shard's data that the base must hold. Below it, the save writes a full
shard, which costs few additional bytes and depends on no other version."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """What one rank may refer to of an earlier version: its folder, and some or all shards."""

    digest: str
    folder: str
    shards: Sequence[Shard]
    indexes: Sequence[ShardIndex]

    @classmethod
    def from_snapshot(cls, snapshot: SnapshotReader, collective: Collective) -> BaseVersion:
        """Return the shards that this rank wrote, or all for the only rank. No other shard can hold
        its chunks, unless the layout has changed: then, one save is full."""
        shards, indexes = snapshot.manifest.shards, list[ShardIndex]()
        try:
            if collective.size == 1:
                indexes = snapshot.indexes()
            else:
                own = names.shard_name(collective.rank, collective.size, "")
                shards = [s for s in shards if s.name.startswith(own.removesuffix(".safetensors"))]
                indexes = [read_index(snapshot.location, s) for s in shards]
        except (FormatError, NotFound) as e:
            events.emit("skipped", version=str(snapshot.version), error=e)
            shards = []
        return cls(snapshot.digest, snapshot.location.folder.rpartition("/")[2], shards, indexes)

    def find_boxes(self, keys: Collection[str]) -> dict[Any, tuple[ShardIndex, int, Any]]:
        """Return index, offset, and sizes of the boxes of some leaves, by key, dtype, offsets."""
        return {
            (leaf.key, leaf.dtype, box.offsets): (index, box.at, box.sizes)
            for index in self.indexes
            for leaf in index.leaves
            if leaf.key in keys
            for box in leaf.boxes
        }


def as_sibling(location: Location, base: SnapshotReader) -> SnapshotReader | None:
    """Return the base as a snapshot in the store of ``location``, or None if the base is not
    another version of the same run."""
    base_run, _, base_folder = base.location.folder.rpartition("/")
    run, _, folder = location.folder.rpartition("/")
    try:
        _ = base.version
    except ManifestInvalid:
        return None
    is_other_version = folder and base_run == run and base_folder != folder
    if not is_other_version or base.location.store.url != location.store.url:
        return None
    sibling = replace(location, folder=base.location.folder)
    if base.location.store is location.store:
        return base
    if base.location.store is not location.unlimited:
        return SnapshotReader(sibling, base.manifest, base.digest)
    same = copy(base)  # with what it has read
    same.location = sibling
    return same


@dataclass(frozen=True, slots=True, eq=False)
class IncrementalLayout:
    """The chunks of an image that a shard holds, and references for the others. ``digests`` and
    ``written`` (is it held) are by chunk; ``runs`` and ``refers``: of index and manifest."""

    image: Image
    header: bytes
    digests: list[str]
    written: NDArray[np.bool_]
    spans: list[ImageSpan]
    length: int
    runs: list[tuple[int, int, int]]
    refers: list[ShardReference]

    def unneeded_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the image's pieces of which the shard has no bytes; its header is in some."""
        written = np.cumsum(self.written)
        first = np.searchsorted(self.image.cuts, [p.start for p in pieces], "right")
        last = np.searchsorted(self.image.cuts, [p.stop for p in pieces], "left")
        unneeded = written[last] == written[np.maximum(first, 1) - 1]
        return [p for p, is_unneeded in zip(pieces, unneeded.tolist(), strict=True) if is_unneeded]


@gc_paused
def align_chunks(image: Image, base: BaseVersion) -> Image:
    """Return the image with large boxes cut into the same chunks as in the base. With cuts at
    multiples of ``BLOCK_SIZE``, one leaf of another size would change all chunks behind it."""
    data_cuts = image.cuts - len(image.header)
    if any(np.array_equal(index.cuts - index.header, data_cuts) for index in base.indexes):
        return image
    lengths = np.array(image.box_ends) - np.array(image.box_starts)
    carried = {i for i, place in enumerate(_carried_places(image)) if place is not None}
    large = sorted(carried.union(np.flatnonzero(lengths >= shard_layout.SMALL_BOX_BYTES).tolist()))
    base_boxes = base.find_boxes({image.leaf_boxes[i].key for i in large})
    keep = np.ones(len(image.cuts), bool)
    aligned_cuts = []
    for i in large:
        leaf_box, start, end = image.leaf_boxes[i], image.box_starts[i], image.box_ends[i]
        base_box = base_boxes.get((leaf_box.key, leaf_box.dtype, leaf_box.box.offsets))
        if base_box is not None:
            index, at, sizes = base_box
            nbytes = DTYPES[leaf_box.dtype].itemsize * prod(sizes)
            inside = _cuts_between(index.cuts, at, at + min(nbytes, end - start))
            aligned_cuts.append(index.cuts[inside] - at + start)
            keep[_cuts_between(image.cuts, start, end)] = False
    cuts = sorted_unique(np.concatenate([image.cuts[keep], *aligned_cuts]))
    # a leaf may have grown, or the writer of the base may use longer chunks
    return replace(image, cuts=shard_layout.split_long_chunks(cuts))


def _cuts_between(cuts: Ints, low: int, high: int) -> slice:
    """Return where in ``cuts`` those strictly between two offsets are."""
    return slice(*np.searchsorted(cuts, [low + 1, high]).tolist())


def _carried_places(image: Image) -> list[Any]:
    """Return ``carried`` of each source, None for other parts; nothing if there are no sources."""
    is_needed = has_sources(image.sources)
    return [getattr(source, "carried", None) for source in image.sources] if is_needed else []


def carried_digests(base: BaseVersion, image: Image) -> dict[int, str]:
    """Return the digests of chunks of ``carried`` sources, as the indexes of the base have them.
    This compares keys and offsets, not hashes of them, because nothing compares the bytes."""
    places = _carried_places(image)
    base_boxes = base.find_boxes({place[1] for place in places if place is not None})
    digests: dict[int, str] = {}
    for i, place in enumerate(places):
        leaf_box, start = image.leaf_boxes[i], image.box_starts[i]
        found = base_boxes.get((leaf_box.key, leaf_box.dtype, leaf_box.box.offsets))
        if found is None or place != (base.digest, leaf_box.key, leaf_box.box.offsets):
            continue
        index, at, sizes = found
        first, last = np.searchsorted(image.cuts, [start, image.box_ends[i] + 1]).tolist()
        for c in range(first + 1, last if sizes == leaf_box.box.sizes else 0):
            ends = image.cuts[c - 1 : c + 1] - start + at
            n = int(np.searchsorted(index.cuts, ends[1]))
            if np.array_equal(index.cuts[n - 1 : n + 1], ends):
                digests[c] = index.chunk_digest(n)
    return digests


@gc_paused
def make_incremental_layout(
    base: BaseVersion, image: Image, digests: list[str]
) -> IncrementalLayout | None:
    """Return the chunks to write and the chunks to refer to, or None if the base holds less than
    ``MIN_BASE_FRACTION`` of the image's data."""
    cuts, lengths = image.cuts, np.diff(image.cuts, prepend=0)
    matches = _find_in_base(base, image, digests)
    written = np.array([match is None for match in matches])
    if int(lengths[~written].sum()) < max(1, MIN_BASE_FRACTION * int(cuts[-1] - cuts[0])):
        return None
    # for each chunk, the file that holds it (0: this shard) and its offset there
    files: dict[tuple[str, int], int] = {}
    chunk_files = np.zeros(len(cuts), np.int64)
    chunk_offsets = np.zeros(len(cuts), np.int64)
    used_bytes: dict[int, int] = {}
    for c, match in enumerate(matches):
        if match is not None:
            number = files.setdefault(match[:2], len(files) + 1)
            chunk_files[c], chunk_offsets[c] = number, match[2]
            used_bytes[number] = used_bytes.get(number, 0) + int(lengths[c])
    spans = _written_spans(written, cuts)
    header = build_header(partial_shard_entries(image.leaf_boxes, image.box_starts, spans))
    for start, stop, offset in spans:
        first, last = np.searchsorted(cuts, [start, stop])
        chunk_offsets[first + 1 : last + 1] = cuts[first:last] - start + offset + len(header)
    is_joined = ChunkRefs(chunk_files, chunk_offsets).is_contiguous_with_next(cuts)[1:]
    firsts = [1, *(np.flatnonzero(~is_joined) + 2).tolist()]
    layout = IncrementalLayout(
        image=image,
        header=header,
        digests=digests,
        written=written,
        spans=spans,
        length=len(header) + sum(stop - start for start, stop, _ in spans),
        runs=[*zip(firsts, chunk_files[firsts].tolist(), chunk_offsets[firsts].tolist())],
        refers=[ShardReference(path, n, used_bytes[i]) for (path, n), i in files.items()],
    )
    # do not commit an index that a reader would reject
    expand_runs(
        layout.runs,
        cuts + (len(header) - len(image.header)),
        layout.length,
        layout.refers,
        lambda expected, found: ManifestInvalid(
            "The save made an invalid incremental index", expected=expected, found=str(found)
        ),
    )
    return layout


def _written_spans(written: NDArray[np.bool_], cuts: Ints) -> list[ImageSpan]:
    """Return the spans of consecutive written chunks. Spans of whole pages come first, so that
    direct I/O covers as many bytes as possible."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], written[1:], [False]]).astype(np.int8)))
    starts, stops = cuts[edges[::2]], cuts[edges[1::2]]
    order = np.argsort((stops - starts) % ALIGNMENT != 0, kind="stable")
    table = starts[order], stops[order], exclusive_cumsum((stops - starts)[order])
    return [(a, b, offset) for a, b, offset in np.stack(table, axis=1).tolist()]


def _find_in_base(
    base: BaseVersion, image: Image, digests: list[str]
) -> list[tuple[str, int, int] | None]:
    """Return, for each chunk of the image, the path and length of the file that already holds it,
    and its offset in that file; None for a chunk that the base lacks, and for the header."""
    base_chunks: dict[tuple[int, str], tuple[str, int, int]] = {}
    for index, shard in zip(base.indexes, base.shards, strict=True):
        rows = [
            (hash((f.key, f.dtype, b.offsets)), b.at, DTYPES[f.dtype].itemsize * prod(b.sizes))
            for f in index.leaves
            for b in f.boxes
        ]
        files = {r.path: (r.path, r.length) for r in shard.refers}
        files[shard.path] = names.reference_path(base.folder, shard.path), shard.length
        for c, layout_hash in enumerate(_chunk_layout_hashes(rows, index.cuts), 1):
            path, at = index.locate_chunk(c)
            base_chunks[layout_hash, index.chunk_digest(c)] = (*files[path], at)
    boxes = zip(image.leaf_boxes, image.box_starts, image.box_ends, strict=True)
    rows = [(hash((b.key, b.dtype, b.box.offsets)), start, end - start) for b, start, end in boxes]
    layout_hashes = enumerate(_chunk_layout_hashes(rows, image.cuts), 1)
    return [None, *(base_chunks.get((h, digests[c])) for c, h in layout_hashes)]


def _chunk_layout_hashes(rows: list[tuple[int, int, int]], cuts: Ints) -> list[int]:
    """Return a hash of the layout of each chunk but the header: its length, and which bytes of
    which boxes. ``rows``: the hash, file offset, and bytes of each box."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    table = table[table[:, 2] > 0]
    table = table[np.argsort(table[:, 1])]
    box_hashes, box_starts, box_stops = table[:, 0], table[:, 1], table[:, 1] + table[:, 2]
    starts, ends = cuts[:-1], cuts[1:]
    first = np.searchsorted(box_stops, starts, "right")
    counts = np.searchsorted(box_starts, ends, "left") - first
    chunk = np.repeat(np.arange(len(starts)), counts)
    row = ranges(first, counts)
    sums = (ends - starts).astype(np.uint64)
    np.add.at(sums, chunk, _mix_hash(box_hashes[row], box_starts[row] - starts[chunk]))
    layout_hashes: list[int] = sums.tolist()
    return layout_hashes


def _mix_hash(box_hash: Ints, offset: Ints) -> Hashes:
    """Return a hash of a box at an offset; a chunk's sum of them says which it has, and where."""
    mixed = box_hash.astype(np.uint64) + offset.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return mixed
