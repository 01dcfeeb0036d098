"""A shard's image into a store: digests made on the way, pieces written by several threads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from holdfast.buffers import BufferPool
from holdfast.engine.saving.commit import Receipt
from holdfast.engine.saving.image import Image, Piece
from holdfast.engine.saving.incremental import (
    BaseVersion,
    IncrementalLayout,
    align_chunks,
    make_incremental_layout,
)
from holdfast.engine.saving.job import SaveJob
from holdfast.engine.saving.pack import digest_chunks, write_incremental_shard
from holdfast.engine.saving.staging import release_buffers
from holdfast.engine.snapshot.location import Location
from holdfast.format import names
from holdfast.format.digest import digest
from holdfast.format.index import IncrementalIndex, Index, encode_index
from holdfast.format.index_columns import IndexBox, IndexLeaf
from holdfast.format.manifest import FileEntry, IncrementalShard
from holdfast.settings import read_settings
from holdfast.threads import in_parallel


def write_local_shard(job: SaveJob, base: BaseVersion | None) -> Receipt:
    """Write this rank's shard and index, in full or what ``base`` lacks; nothing if there is
    nothing to write. Raises ``StoreError``."""
    place, meeting, image, attempt = job.location, job.collective, job.image, job.attempt
    pieces, pool, threads = job.pieces, job.pool, read_settings().threads
    if meeting.rank and not image.leaf_boxes:
        return Receipt(meeting.rank, None)
    shard = names.shard_name(meeting.rank, meeting.size, attempt)
    index = names.index_name(meeting.rank, meeting.size, attempt)
    packing = None
    if base is not None and base.shards:
        cut = align_chunks(image, base)
        digests = digest_chunks(cut, pieces, pool, threads, meeting.advance)
        packing = make_incremental_layout(base, cut, digests)
    if packing is None:
        digests = write_shard(place, shard, image, pieces, pool, threads, meeting.advance)
        vouched = write_index(place, index, shard, image, digests)
        return Receipt(
            meeting.rank, IncrementalShard(shard, image.length, vouched, []), image.length
        )
    release_buffers(packing.unneeded_pieces(pieces), pool)
    write_incremental_shard(place, shard, packing, pieces, pool, threads, meeting.advance)
    vouched = write_index(place, index, shard, packing.image, packing.digests, packing)
    increment = IncrementalShard(shard, packing.length, vouched, packing.refers)
    return Receipt(meeting.rank, increment, packing.length)


def write_shard(
    location: Location,
    name: str,
    image: Image,
    pieces: list[Piece],
    pool: BufferPool,
    threads: int,
    advance: Callable[[], object] = bool,
) -> list[str]:
    """Write all pieces, staged or not, and return the digest of every chunk once the shard is
    durable. ``advance`` is called after each piece. Raises ``StoreError``; then there is no such
    shard, and pieces that were not reached still have their buffers."""
    cuts = image.cuts.tolist()
    digests = [digest(image.header)] + [""] * (len(cuts) - 1)

    def write(piece: Piece) -> None:
        buffer, piece.buffer = piece.buffer, None
        staged = buffer is not None
        if buffer is None:
            buffer = pool.acquire()
        try:
            if not staged:
                image.copy_piece(piece, buffer)
            view = buffer.view[: piece.stop - piece.start]
            if piece.start >= cuts[0]:
                # every multiple of UNIT is a cut, so chunks begin and end with their piece
                first, last = bisect_right(cuts, piece.start), bisect_left(cuts, piece.stop)
                for c in range(first, last + 1):
                    a, b = cuts[c - 1] - piece.start, cuts[c] - piece.start
                    digests[c] = digest(view[a:b])
            upload.write_at(piece.start, view)
        finally:
            pool.release(buffer)

    with location.store.put(location.key(name), image.length) as upload:
        in_parallel(pieces, write, min(threads, len(pieces)), advance)
        upload.commit()
        advance()
    return digests


def write_index(
    location: Location,
    name: str,
    shard_name: str,
    image: Image,
    digests: list[str],
    layout: IncrementalLayout | None = None,
) -> FileEntry:
    """Write the index of a shard, durably; with a ``packing`` one of number 2. Raises
    ``StoreError``."""
    header = image.header if layout is None else layout.header
    # boxes and cuts are counted from the beginning of the file, headers have lengths of their own
    shift = len(header) - len(image.header)
    leaves: dict[str, IndexLeaf] = {}
    for h, at in zip(image.leaf_boxes, image.box_starts, strict=True):
        leaf = leaves.get(h.key)
        if leaf is None:
            leaf = leaves[h.key] = IndexLeaf(h.key, h.dtype, h.shape, [])
        leaf.boxes.append(IndexBox(h.box.offsets, h.box.sizes, at + shift))
    fields: dict[str, Any] = {
        "shard": shard_name,
        "header": len(header),
        "leaves": list(leaves.values()),
        "cuts": (image.cuts + shift).tolist(),
    }
    index: Index
    if layout is None:
        index = Index(format=1, length=image.length, digests=digests, **fields)
    else:
        index = IncrementalIndex(
            format=2,
            length=layout.length,
            digests=[digest(header), *digests[1:]],
            runs=layout.runs,
            **fields,
        )
    raw = encode_index(index)
    location.store.put_if_absent(location.key(name), raw)
    return FileEntry(name, len(raw), digest(raw))
