"""Resharding: a snapshot written anew with other shards, every byte checked on the way in and
digested on the way out.

1. Lay out: all leaves in one order, and which part of each goes to which new shard. 2. Go through
that order, a window at a time: read what is in the window from wherever it lies, each chunk once,
and write to every new shard what it gets of it. Two windows take turns: one is read while the other
is written. 3. The new indexes, then the manifest.

A chunk on the border of two windows is read twice. Going through the leaves instead of through the
new shards is what keeps it at that: few large chunks may go to many small shards, or many small
ones to a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any

import numpy as np
from msgspec.structs import replace as changed

from holdfast import events
from holdfast.buffers import Buffer, BufferPool, shared_pool
from holdfast.engine.planning.boxes import contiguous_boxes
from holdfast.engine.planning.read_plan import ReadRequest, make_read_plan
from holdfast.engine.saving.commit import Receipt, check_receipts, put_manifest, raise_if_exists
from holdfast.engine.saving.image import Image
from holdfast.engine.saving.write import write_index
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.read import Target, execute_read_plan
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.transform.reshard_plan import (
    MAX_OPEN_SHARDS,
    Chunk,
    LeafLocations,
    OrderedLeaf,
    WindowSpan,
    assign_leaves,
    group_into_windows,
    iter_chunks,
    lay_out_window,
    locate_leaves,
    make_shard_image,
    order_leaves,
    window_size,
)
from holdfast.format import names
from holdfast.format.digest import digest
from holdfast.format.manifest import IncrementalShard, Manifest, Shard
from holdfast.settings import read_settings
from holdfast.storage.store import Upload
from holdfast.threads import in_parallel
from holdfast.types import BLOCK_SIZE, DTYPES, MIB
from holdfast.version import __version__

SPLITS = ("even", "none")

MAX_READ_BYTES = 32 * MIB
"""Bytes of chunks that are being read and checked at a time."""

Advance = Callable[[int], None]


def reshard(
    snapshot: Snapshot,
    location: Location,
    shards: int,
    split: str = "even",
    advance: Advance | None = None,
) -> Snapshot:
    """Write ``snapshot`` anew at ``place`` as ``shards`` shards, and return it once committed.

    ``split``: "even" cuts each leaf with at least ``shards`` rows along dimension 0, as FSDP2 does
    (``torch.chunk``: equal parts, rounded up, the last may be shorter or missing), so that shard r
    holds what rank r of as many restores; "none" cuts no leaf. Leaves that are not cut go whole to
    whichever shard has least. The new snapshot refers to no other; state, step, branch, parent and
    metadata are those of the old one, and ``resharded`` in the metadata says what it was made from.

    Uses at most 256 MiB, whatever the sizes, besides the indexes and 40 bytes for each leaf of each
    of these. ``progress(nbytes)`` is called as bytes of leaves are written, from several threads.
    Raises ``AlreadyExists`` if there is a snapshot, ``FormatError`` if this one is damaged,
    ``CommitError`` and ``StoreError``; whenever it raises, nothing was committed, unless the
    error's ``outcome`` is "unknown".
    """
    raise_if_exists(location)
    with snapshot.not_found_if_deleted():
        stored = locate_leaves(snapshot)
        leaves = order_leaves(snapshot, stored)
        source = _SnapshotReader(snapshot, leaves, stored)
        home = assign_leaves(leaves, shards, split)
        attempt, receipts = names.new_attempt(), list[Receipt]()
        with snapshot.pin_while_reading(), pins.hold_pin(location, attempt):
            for first in range(0, shards, MAX_OPEN_SHARDS):
                several = range(first, min(first + MAX_OPEN_SHARDS, shards))
                images = [make_shard_image(leaves, home, shard, shards) for shard in several]
                made = [names.shard_name(shard, shards, attempt) for shard in several]
                digests = _write_shards(location, made, images, source, advance)
                for shard, name, image, found in zip(several, made, images, digests, strict=True):
                    file = names.index_name(shard, shards, attempt)
                    vouched = write_index(location, file, name, image, found)
                    full = IncrementalShard(name, image.length, vouched, [])
                    receipts.append(Receipt(shard, full, image.length))
            manifest = _build_manifest(
                snapshot, attempt, check_receipts(location, receipts, shards)
            )
            # back through the store they went to, as whoever loads them will
            Snapshot(location, manifest, "").read_indexes()
            copy = put_manifest(location, manifest)
    events.emit("resharded", url=snapshot.url, to=location.url, shards=shards, bytes=copy.nbytes)
    return copy


def _build_manifest(snapshot: Snapshot, attempt: str, shards: Sequence[Shard]) -> Manifest:
    fields = {f: getattr(snapshot.manifest, f) for f in Manifest.__struct_fields__}
    made_from = {"from": snapshot.digest, "shards": len(snapshot.manifest.shards)}
    about = {**snapshot.manifest.metadata["dict"], "resharded": {"dict": made_from}}
    return changed(
        Manifest(**fields),
        attempt=attempt,
        writer=f"holdfast {__version__}",
        shards=shards,
        metadata={"dict": about},
    )


# -- reading and writing --------------------------------------------------------------------------


class _SnapshotReader:
    """The leaves of the old snapshot, any part of which can be read into memory, checked."""

    def __init__(
        self, snapshot: Snapshot, leaves: Sequence[OrderedLeaf], locations: LeafLocations
    ) -> None:
        self.leaves = leaves
        self._location = snapshot.location
        self._indexes = snapshot.indexes()
        self._locations = locations
        longest = max((int(np.diff(i.cuts).max(initial=0)) for i in self._indexes), default=0)
        self._threads = max(
            1, min(read_settings().threads, MAX_READ_BYTES // max(BLOCK_SIZE, longest))
        )

    def read(self, spans: Sequence[WindowSpan], buffer: Buffer) -> None:
        """Fill the runs' places in the buffer. Raises ``FormatError``, ``StoreError``."""
        wants, targets = [], []
        for number, start, stop, at in spans:
            leaf = self.leaves[number]
            size = DTYPES[leaf.dtype].itemsize
            # as opaque elements of one size: every bit pattern of every dtype passes unchanged
            opaque = f"V{size}"
            for box in contiguous_boxes(leaf.shape, start // size, stop // size):
                into: np.ndarray[Any, np.dtype[np.void]]
                into = np.ndarray(box.sizes, opaque, buffer.view, at)
                wants.append(ReadRequest(leaf.key, box))
                targets.append(Target(opaque, box.sizes, into, buffer.address + at))
                at += box.numel * size
        rows = self._locations.rows
        keys = {self.leaves[run.leaf].key for run in spans}
        concerned = np.unique(
            np.concatenate([self._locations.shard[rows[k]] for k in keys])
        ).tolist()
        indexes = [self._indexes[s] for s in concerned]
        plan = make_read_plan(indexes, wants)
        execute_read_plan(self._location, plan, indexes, targets, shared_pool(), self._threads)


def _write_shards(
    location: Location,
    shard_names: Sequence[str],
    images: Sequence[Image],
    reader: _SnapshotReader,
    advance: Advance | None,
) -> list[list[str]]:
    """Write shards, all at the same time, and return the digests of their chunks once they are
    durable."""
    threads, reading = read_settings().threads, Lock()
    digests = [[digest(i.header), *[""] * (len(i.cuts) - 1)] for i in images]
    size = window_size(images)
    room = BufferPool(2 * size, size)

    def work(chunks: list[Chunk]) -> None:
        buffer = room.acquire()
        try:
            runs, spots = lay_out_window(chunks)
            with reading:
                reader.read(runs, buffer)

            def write(chunk: Chunk) -> None:
                views = []
                for part in chunk.spans:
                    at = spots[part.leaf, part.start]
                    views.append(buffer.view[at : at + part.stop - part.start])
                data = views[0] if len(views) == 1 else memoryview(b"".join(views))
                digests[chunk.shard][chunk.number] = digest(data)
                uploads[chunk.shard].write_at(chunk.shard_offset, data)
                if advance is not None:
                    advance(chunk.nbytes)

            in_parallel(chunks, write, min(threads, len(chunks)))
        finally:
            room.release(buffer)

    with ExitStack() as stack:
        stack.callback(room.close)
        uploads: list[Upload] = []
        for name, image in zip(shard_names, images, strict=True):
            uploads.append(
                stack.enter_context(location.store.put(location.key(name), image.length))
            )
            uploads[-1].write_at(0, memoryview(image.header))
        chunks = heapq.merge(
            *(iter_chunks(reader.leaves, n, image) for n, image in enumerate(images))
        )
        in_parallel(group_into_windows(chunks), work, 2)
        in_parallel(uploads, _commit_upload, min(threads, len(uploads)))
    return digests


def _commit_upload(upload: Upload) -> None:
    upload.commit()
