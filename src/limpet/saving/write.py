"""Write a shard's image to a store. Several threads write pieces and compute digests on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from limpet.buffers import Buffer
from limpet.format import names
from limpet.format.digest import digest
from limpet.format.index import Index, encode_index
from limpet.format.index_columns import IndexBox, IndexLeaf
from limpet.format.manifest import FEWER_LEAVES, MAX_MANIFEST, FileEntry, Shard
from limpet.format.sealed import FORMAT, check_length
from limpet.saving.commit import Receipt
from limpet.saving.image import Image, Piece, release_buffers, split_into_pieces
from limpet.saving.incremental import (
    BaseVersion,
    IncrementalLayout,
    align_chunks,
    make_incremental_layout,
)
from limpet.saving.job import SaveJob
from limpet.saving.pack import PackedImage, digest_chunks
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import MappedUpload, Traits, Upload, part_length, put_mapped
from limpet.threads import Workers, gc_paused


def put_local_shard(job: SaveJob) -> MappedUpload | None:
    """Begin to write this rank's shard if the store is memory, so that it can be staged there.

    None: it is staged into buffers. An incremental save is: it may not need all that it stages.
    Raises ``StoreError``.
    """
    rank, size = job.collective.rank, job.collective.size
    if job.base is not None or (rank and not job.image.leaf_boxes):
        return None
    shard_name = names.shard_name(rank, size, job.partition.attempt)
    return put_mapped(job.location.store, shard_key(job.location, shard_name), job.image.length)


def shard_key(location: Location, name: str) -> str:
    """Return the key of a shard or an index that is written now."""
    return location.file_key(location.shard_path(name))


def write_local_shard(job: SaveJob, base: SnapshotReader | None) -> Receipt:
    """Write this rank's shard and index, and return the receipt.

    The shard is full, or holds only the chunks that ``base`` lacks. A rank other than rank 0 that
    has no boxes writes nothing. Raises ``StoreError``, or ``CommitError`` if the state changed.
    """
    location, collective, image = job.location, job.collective, job.image
    rank, pieces, workers = collective.rank, job.pieces, job.workers
    devices = job.device_map()
    if rank and not image.leaf_boxes:
        return Receipt(rank, None, devices=devices)
    shard_name = names.shard_name(rank, collective.size, job.partition.attempt)
    index_name = names.index_name(rank, collective.size, job.partition.attempt)
    data_bytes = image.length - len(image.header)
    layout = None
    base_version = None if base is None else BaseVersion.from_snapshot(base, collective)
    if base_version is not None and base_version.shards:
        aligned = align_chunks(image, base_version)
        digests = digest_chunks(aligned, pieces, workers)
        layout = make_incremental_layout(base_version, aligned, digests)
    if layout is None:
        digests = write_shard(location, shard_name, image, pieces, workers, job.upload)
        shard = write_index(location, index_name, shard_name, image, digests)
        return Receipt(rank, shard, data_bytes, devices)
    release_buffers(layout.unneeded_pieces(pieces), workers.pool)
    packed = PackedImage(location.url, layout, pieces)
    packed_pieces = split_into_pieces(len(layout.header), layout.length)
    digests = write_shard(location, shard_name, packed, packed_pieces, workers) + layout.digests[1:]
    shard = write_index(location, index_name, shard_name, layout.image, digests, layout)
    return Receipt(rank, shard, data_bytes, devices)


def write_shard(
    location: Location,
    name: str,
    image: Image | PackedImage,
    pieces: Sequence[Piece],
    workers: Workers,
    begun: Upload | None = None,
) -> list[str]:
    """Write all pieces, staged or not, in several threads. Return the digest of every chunk of the
    image once the shard is durable. ``begun``: the upload, if it has begun.

    Raises ``StoreError``, or what ``copy_piece`` raises; then no shard was created, and the pieces
    that were not yet written keep their buffers.
    """
    cuts = image.cuts.tolist()
    digests = [digest(image.header)] + [""] * (len(cuts) - 1)
    key, head, length = shard_key(location, name), len(image.header), pieces[-1].stop
    traits = location.store.traits

    def fill(piece: Piece, buffer: Buffer, is_staged: bool) -> memoryview:
        """Return the piece's bytes, and store the digests of its chunks."""
        start, stop = piece.start, piece.stop
        if not is_staged:
            image.copy_piece(piece, buffer)
        view = buffer.view[: stop - start]
        if start >= cuts[0]:
            # every multiple of BLOCK_SIZE is a cut, so no chunk crosses the end of a piece
            for c in range(bisect_right(cuts, start), bisect_right(cuts, stop)):
                digests[c] = digest(view[cuts[c - 1] - start : cuts[c] - start])
        return view

    def write(group: Sequence[Piece]) -> None:
        staged = [piece.buffer for piece in group]
        for piece in group:
            piece.buffer = None
        buffers = [buffer for buffer in staged if buffer is not None]
        try:
            unstaged = iter(workers.acquire(staged.count(None)))
            filled = [next(unstaged) if buffer is None else buffer for buffer in staged]
            buffers = filled
            views = [
                fill(piece, buffer, was_staged is not None)
                for piece, buffer, was_staged in zip(group, filled, staged, strict=True)
            ]
            upload.write_at(group[0].start, *views)
        finally:
            for buffer in buffers:
                workers.pool.release(buffer)

    most = workers.pool.budget // workers.pool.buffer_size
    if traits.connections:
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
    """Return the pieces of each part in which the store uploads them (see ``Store.put``).

    ``most``: the largest number of pieces in a group. A part of more pieces becomes several groups,
    which the store collects.
    """
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
    layout: IncrementalLayout | None = None,
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
    shard_name: str, image: Image, digests: list[str], layout: IncrementalLayout | None
) -> bytes:
    """Return the bytes of a shard's index."""
    header, length = (
        (image.header, image.length) if layout is None else (layout.header, layout.length)
    )
    # Offsets count from the start of the file, and the headers have different lengths.
    shift = len(header) - len(image.header)
    leaves: dict[str, IndexLeaf] = {}
    for leaf_box, at in zip(image.leaf_boxes, image.box_starts, strict=True):
        leaf = leaves.get(leaf_box.key)
        if leaf is None:
            leaf = leaves[leaf_box.key] = IndexLeaf(
                leaf_box.key, leaf_box.dtype, leaf_box.shape, []
            )
        leaf.boxes.append(IndexBox(leaf_box.box.offsets, leaf_box.box.sizes, at + shift))
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
