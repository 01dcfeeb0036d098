"""Write a shard's image to a store. Several threads write pieces and compute digests on the way."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter

import numpy as np

from limpet.buffers import Buffer
from limpet.errors import CommitError
from limpet.format import names
from limpet.format.digest import digest, digest_parts
from limpet.format.index import Index, IndexBox, IndexLeaf, encode_index
from limpet.format.manifest import FEWER_LEAVES, MAX_MANIFEST, FileEntry, Shard
from limpet.format.sealed import FORMAT, check_length
from limpet.layout.devices import make_device_map
from limpet.saving import incremental
from limpet.saving.commit import Receipt, SaveJob
from limpet.saving.image import Image, Piece, release_buffers, split_into_pieces
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import MappedUpload, Traits, Upload, part_length, put_mapped
from limpet.threads import Workers, gc_paused
from limpet.types import BLOCK_SIZE


def put_local_shard(job: SaveJob) -> MappedUpload | None:
    """Begin to write this rank's shard if the store is memory, to stage it there; else None, also
    if the save is incremental: it may not need all that it stages."""
    rank, size = job.collective.rank, job.collective.size
    if job.base is not None or (rank and not job.image.leaf_boxes):
        return None
    shard_name = names.shard_name(rank, size, job.partition.attempt)
    return put_mapped(job.location.store, shard_key(job.location, shard_name), job.image.length)


def shard_key(location: Location, name: str) -> str:
    """Return the key of a shard or an index that is written now."""
    return location.file_key(location.shard_path(name))


def write_local_shard(job: SaveJob, base: SnapshotReader | None) -> Receipt:
    """Write this rank's shard, or the chunks that ``base`` lacks, and its index. Ranks without
    boxes, but for rank 0, write nothing. Raises ``CommitError`` if the state changed."""
    location, collective, image = job.location, job.collective, job.image
    rank, pieces, workers = collective.rank, job.pieces, job.workers
    devices = make_device_map(job.devices)
    if rank and not image.leaf_boxes:
        return Receipt(rank, None, devices=devices)
    shard_name = names.shard_name(rank, collective.size, job.partition.attempt)
    index_name = names.index_name(rank, collective.size, job.partition.attempt)
    data_bytes = image.length - len(image.header)
    layout = None
    base_version = None if base is None else incremental.BaseVersion.from_snapshot(base, collective)
    if base_version is not None and base_version.shards:
        aligned = incremental.align_chunks(image, base_version)
        known = incremental.carried_digests(base_version, aligned)
        digests = digest_chunks(aligned, pieces, workers, known)
        layout = incremental.make_incremental_layout(base_version, aligned, digests)
    if layout is None:
        digests = write_shard(location, shard_name, image, pieces, workers, job.upload)
    else:
        release_buffers(layout.unneeded_pieces(pieces), workers.pool)
        packed, image = PackedImage(location.url, layout, pieces), layout.image
        packed_pieces = split_into_pieces(len(layout.header), layout.length)
        digests = write_shard(location, shard_name, packed, packed_pieces, workers)
        digests += layout.digests[1:]
    shard = write_index(location, index_name, shard_name, image, digests, layout)
    return Receipt(rank, shard, data_bytes, devices)


def write_shard(
    location: Location,
    name: str,
    image: Image | PackedImage,
    pieces: Sequence[Piece],
    workers: Workers,
    begun: Upload | None = None,
) -> list[str]:
    """Write all pieces, staged or not, in threads; return the digest of every chunk once the shard
    is durable. If this raises, there is no shard, and unwritten pieces keep their buffers."""
    cuts = image.cuts.tolist()
    digests = [digest(image.header)] + [""] * (len(cuts) - 1)
    key, head, length = shard_key(location, name), len(image.header), pieces[-1].stop
    traits = location.store.traits

    def write(group: Sequence[Piece]) -> None:
        """Write pieces that follow one another, and store the digests of their chunks."""
        acquired: list[Buffer] = []
        views: list[memoryview] = []
        try:
            # all at once: threads that each wait for one more buffer could wait forever
            acquired = workers.acquire([*map(attrgetter("buffer"), group)].count(None))
            for piece in group:
                start, stop, buffer = piece.start, piece.stop, piece.buffer
                if buffer is None:
                    buffer = piece.buffer = acquired.pop()
                    image.copy_piece(piece, buffer)
                view = buffer.view[: stop - start]
                if start >= cuts[0]:
                    # every multiple of BLOCK_SIZE is a cut, so no chunk crosses the end of a piece
                    for c in range(bisect_right(cuts, start), bisect_right(cuts, stop)):
                        digests[c] = digest(view[cuts[c - 1] - start : cuts[c] - start])
                views.append(view)
            upload.write_at(group[0].start, *views)
        finally:
            release_buffers(group, workers.pool)
            for buffer in acquired:
                workers.pool.release(buffer)

    most = workers.pool.budget // workers.pool.buffer_size
    if traits.connections and None in map(attrgetter("buffer"), pieces):
        workers = replace(workers, threads=min(workers.threads, traits.connections))
    groups = group_into_parts(pieces, head, traits, most)
    arguments = [head] if traits.part_size else []
    with begun or location.store.put(key, length, *arguments) as upload:
        workers.each(groups, write, 0 if traits.ordered else length)  # 0: on this thread
        upload.commit()
        workers.advance()
    return digests


def group_into_parts(
    pieces: Sequence[Piece], head: int, traits: Traits, most: int
) -> list[Sequence[Piece]]:
    """Return the pieces of each part in which the store uploads them (see ``Store.put``). A part of
    over ``most`` pieces becomes several groups, which the store collects."""
    if not traits.part_size:
        return [[piece] for piece in pieces]
    length = part_length(traits, pieces[-1].stop)
    parts = groupby(pieces, lambda piece: max(0, piece.start - head) // length)
    whole = ([*part] for _, part in parts)
    return [part[i : i + most] for part in whole for i in range(0, len(part), most)]


def write_index(
    location: Location,
    name: str,
    shard_name: str,
    image: Image,
    digests: list[str],
    layout: incremental.IncrementalLayout | None = None,
) -> Shard:
    """Write the index of a shard durably, and return the shard as the manifest lists it. Raises
    ``StoreError``, and ``Unsupported`` if the index is too long."""
    raw = _encode_image_index(shard_name, image, digests, layout)
    key = shard_key(location, name)
    check_length(key, raw, MAX_MANIFEST, FEWER_LEAVES)
    location.store.put_if_absent(key, raw)
    entry = FileEntry(name, len(raw), digest(raw))
    path = location.shard_path(shard_name)
    if layout is None:
        return Shard(path, image.length, entry, refers=[])
    return Shard(path, layout.length, entry, layout.refers)


@gc_paused  # it creates several objects per box
def _encode_image_index(
    shard_name: str, image: Image, digests: list[str], layout: incremental.IncrementalLayout | None
) -> bytes:
    """Return the bytes of a shard's index."""
    written = image if layout is None else layout
    header, length = written.header, written.length
    # Offsets count from the start of the file, and the headers have different lengths.
    shift = len(header) - len(image.header)
    leaves: dict[str, IndexLeaf] = {}
    for b, at in zip(image.leaf_boxes, image.box_starts, strict=True):
        leaf = leaves.get(b.key)
        if leaf is None:
            leaf = leaves[b.key] = IndexLeaf(b.key, b.dtype, b.shape, [])
        leaf.boxes.append(IndexBox(b.box.offsets, b.box.sizes, at + shift))
    return encode_index(
        Index(
            limpet=FORMAT,
            shard=shard_name,
            length=length,
            header=len(header),
            leaves=list(leaves.values()),
            cuts=(image.cuts + shift).tolist(),
            digests=digests,
            runs=[] if layout is None else layout.runs,
        )
    )


# -- an incremental shard: the chunks that the base lacks, whose digests are checked again --------


class ImageChunks:
    """The chunks of an image. A chunk is either in staged pieces (it may touch two of them), or
    still in the live state."""

    def __init__(self, image: Image, pieces: Sequence[Piece]) -> None:
        self.image = image
        self.cuts = image.cuts.tolist()
        self._pieces = pieces
        self._piece_starts = [p.start for p in pieces]

    def staged_spans(self, chunk: int, first: int, last: int) -> list[tuple[Buffer, int, int]]:
        """Return the buffers that hold bytes ``first`` to ``last`` of a chunk, in order, each with
        the start and stop offsets in it. The list is empty if the chunk is not staged."""
        start, stop = self.cuts[chunk - 1] + first, self.cuts[chunk - 1] + last
        spans = []
        for i in range(bisect_right(self._piece_starts, start) - 1, len(self._pieces)):
            piece = self._pieces[i]
            if start >= stop or piece.buffer is None:
                break
            end = min(stop, piece.stop)
            spans.append((piece.buffer, start - piece.start, end - piece.start))
            start = end
        return spans

    def length(self, chunk: int) -> int:
        """Return the length of a chunk, in bytes."""
        return int(self.cuts[chunk] - self.cuts[chunk - 1])

    def copy_live(self, chunk: int, buffer: Buffer, buffer_offset: int) -> memoryview:
        """Copy a chunk from the live state to ``buffer_offset``, and return its bytes there."""
        self.image.copy_range(self.cuts[chunk - 1], self.cuts[chunk], buffer, buffer_offset)
        return buffer.view[buffer_offset : buffer_offset + self.length(chunk)]


def digest_chunks(
    image: Image, pieces: Sequence[Piece], workers: Workers, known: Mapping[int, str]
) -> list[str]:
    """Return the digest of every chunk: ``known``, of what is staged, or of a temporary copy."""
    chunks = ImageChunks(image, pieces)
    digests = [digest(image.header)] + [known.get(c, "") for c in range(1, len(chunks.cuts))]

    def digest_chunk(chunk: int) -> None:
        staged = chunks.staged_spans(chunk, 0, chunks.length(chunk))
        if staged:
            digests[chunk] = digest_parts(b.view[first:last] for b, first, last in staged)
        else:
            with workers.buffer() as buffer:
                digests[chunk] = digest(chunks.copy_live(chunk, buffer, 0))

    workers.each([c for c, found in enumerate(digests) if not found], digest_chunk, image.length)
    return digests


class PackedImage:
    """An incremental shard to be written: chunks of the complete image, in the order of the shard.
    Their digests are known, so the end of the header is the only cut."""

    def __init__(
        self, url: str, layout: incremental.IncrementalLayout, pieces: Sequence[Piece]
    ) -> None:
        self._url = url
        self._layout = layout
        self.header = layout.header
        self.cuts = np.array([len(layout.header)])
        self._chunks = ImageChunks(layout.image, pieces)
        self._verified = bytearray(len(layout.digests))
        self._spare_buffers: list[Buffer] = []

    def copy_piece(self, piece: Piece, buffer: Buffer) -> None:
        """Copy a piece to the buffer; ``CommitError`` if the state changed after its digests."""
        start, stop = piece.start, piece.stop
        if start < len(self.header):
            buffer.view[: stop - start] = self.header[start:stop]
        else:
            for chunk, first, last, at in self._chunk_spans(start, stop):
                self._copy_chunk(chunk, first, last, buffer, at - start)

    def _chunk_spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of chunks in bytes ``start`` to ``stop`` of the shard: the number of the
        chunk, the first byte and the end in the chunk, and the offset in the shard."""
        spans, cuts = self._layout.spans, self._chunks.cuts
        first_span = bisect_right(spans, start - len(self.header), key=itemgetter(2)) - 1
        for i in range(first_span, len(spans)):
            span_start, span_stop, data_offset = spans[i]
            shift = len(self.header) + data_offset - span_start
            a, b = max(start - shift, span_start), min(stop - shift, span_stop)
            if a >= b:
                break
            for c in range(bisect_right(cuts, a), bisect_left(cuts, b) + 1):
                first, last = max(a, cuts[c - 1]), min(b, cuts[c])
                yield c, first - cuts[c - 1], last - cuts[c - 1], first + shift

    def _copy_chunk(
        self, chunk: int, first: int, last: int, buffer: Buffer, buffer_offset: int
    ) -> None:
        """Copy bytes ``first`` to ``last`` of a chunk into the buffer at ``buffer_offset``. Check
        the digest of the whole chunk, even if its other bytes belong elsewhere."""
        chunks, length = self._chunks, self._chunks.length(chunk)
        staged = chunks.staged_spans(chunk, first, last)
        if staged:
            if not self._verified[chunk]:  # staged bytes do not change, so one check is enough
                spans = chunks.staged_spans(chunk, 0, length)
                self._check_digest(chunk, digest_parts(b.view[i:j] for b, i, j in spans))
                self._verified[chunk] = 1
            for source, i, j in staged:
                ctypes.memmove(buffer.address + buffer_offset, source.address + i, j - i)
                buffer_offset += j - i
        elif last - first == length:
            self._check_digest(chunk, digest(chunks.copy_live(chunk, buffer, buffer_offset)))
        else:
            try:
                spare = self._spare_buffers.pop()
            except IndexError:
                spare = Buffer(BLOCK_SIZE)  # no chunk of an image is longer
            self._check_digest(chunk, digest(chunks.copy_live(chunk, spare, 0)))
            ctypes.memmove(buffer.address + buffer_offset, spare.address + first, last - first)
            self._spare_buffers.append(spare)

    def _check_digest(self, chunk: int, found: str) -> None:
        expected = self._layout.digests[chunk]
        if found != expected:
            image = self._layout.image
            start = self._chunks.cuts[chunk - 1]
            key = image.leaf_boxes[bisect_right(image.box_starts, start) - 1].key
            raise CommitError(
                f"Nothing was committed to {self._url}: {key} changed while it was saved",
                expected=f"digest {expected}",
                found=found,
                todo="Do not change the state until the save returns. If nothing changed it, test"
                " the machine's memory",
                leaf=key,
            )
