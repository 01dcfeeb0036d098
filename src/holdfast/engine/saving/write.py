"""A shard's image into a store: digests made on the way, pieces written by several threads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from holdfast.buffers import Pool
from holdfast.engine.saving.commit import Receipt
from holdfast.engine.saving.image import Image, Piece
from holdfast.engine.saving.incremental import Base, Packing, pack, recut
from holdfast.engine.saving.job import Draft
from holdfast.engine.saving.pack import digest_chunks, write_packed
from holdfast.engine.saving.staging import drop
from holdfast.engine.snapshot.location import Location
from holdfast.format import names
from holdfast.format.digest import digest
from holdfast.format.index import IncrementalIndex, Index, encode_index
from holdfast.format.index_columns import BoxAt, Leaf
from holdfast.format.manifest import File, Increment
from holdfast.settings import read_settings
from holdfast.threads import in_parallel


def write_part(draft: Draft, base: Base | None) -> Receipt:
    """Write this rank's shard and index, in full or what ``base`` lacks; nothing if there is
    nothing to write. Raises ``StoreError``."""
    place, meeting, image, attempt = draft.place, draft.meeting, draft.image, draft.attempt
    pieces, pool, threads = draft.pieces, draft.pool, read_settings().threads
    if meeting.rank and not image.holdings:
        return Receipt(meeting.rank, None)
    shard = names.shard_name(meeting.rank, meeting.size, attempt)
    index = names.index_name(meeting.rank, meeting.size, attempt)
    packing = None
    if base is not None and base.shards:
        cut = recut(image, base)
        digests = digest_chunks(cut, pieces, pool, threads, meeting.advance)
        packing = pack(base, cut, digests)
    if packing is None:
        digests = write_shard(place, shard, image, pieces, pool, threads, meeting.advance)
        vouched = write_index(place, index, shard, image, digests)
        return Receipt(meeting.rank, Increment(shard, image.length, vouched, []), image.length)
    drop(packing.unneeded(pieces), pool)
    write_packed(place, shard, packing, pieces, pool, threads, meeting.advance)
    vouched = write_index(place, index, shard, packing.image, packing.digests, packing)
    increment = Increment(shard, packing.length, vouched, packing.refers)
    return Receipt(meeting.rank, increment, packing.length)


def write_shard(
    place: Location,
    name: str,
    image: Image,
    pieces: list[Piece],
    pool: Pool,
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
                image.fill(piece, buffer)
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

    with place.store.put(place.key(name), image.length) as upload:
        in_parallel(pieces, write, min(threads, len(pieces)), advance)
        upload.commit()
        advance()
    return digests


def write_index(
    place: Location,
    name: str,
    shard: str,
    image: Image,
    digests: list[str],
    packing: Packing | None = None,
) -> File:
    """Write the index of a shard, durably; with a ``packing`` one of number 2. Raises
    ``StoreError``."""
    header = image.header if packing is None else packing.header
    # boxes and cuts are counted from the beginning of the file, headers have lengths of their own
    shift = len(header) - len(image.header)
    leaves: dict[str, Leaf] = {}
    for h, at in zip(image.holdings, image.begins, strict=True):
        leaf = leaves.get(h.key)
        if leaf is None:
            leaf = leaves[h.key] = Leaf(h.key, h.dtype, h.shape, [])
        leaf.boxes.append(BoxAt(h.box.offsets, h.box.sizes, at + shift))
    fields: dict[str, Any] = {
        "shard": shard,
        "header": len(header),
        "leaves": list(leaves.values()),
        "cuts": (image.cuts + shift).tolist(),
    }
    index: Index
    if packing is None:
        index = Index(format=1, length=image.length, digests=digests, **fields)
    else:
        index = IncrementalIndex(
            format=2,
            length=packing.length,
            digests=[digest(header), *digests[1:]],
            runs=packing.runs,
            **fields,
        )
    raw = encode_index(index)
    place.store.put_if_absent(place.key(name), raw)
    return File(name, len(raw), digest(raw))
