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
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from limpet import events
from limpet.buffers import Buffer, BufferPool, shared_pool
from limpet.convert.copy import Advance, full_manifest
from limpet.convert.reshard_plan import (
    Chunk,
    LeafLocations,
    LeafSpan,
    OrderedLeaf,
    assign_leaves,
    batch_shards,
    group_by_shard,
    group_into_windows,
    iter_chunks,
    lay_out_window,
    locate_leaves,
    make_shard_image,
    order_leaves,
    window_size,
)
from limpet.format import names
from limpet.format.digest import digest
from limpet.format.manifest import Manifest, Shard
from limpet.layout.boxes import contiguous_boxes
from limpet.layout.read_plan import ReadRequest, make_read_plan
from limpet.ragged import sorted_unique
from limpet.saving.commit import Receipt, check_receipts, put_manifest, raise_if_exists
from limpet.saving.image import Image
from limpet.saving.write import shard_key, write_index
from limpet.settings import read_settings
from limpet.snapshot import pins
from limpet.snapshot.location import Location
from limpet.snapshot.read import Target, execute_read_plan
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import Upload
from limpet.threads import Workers, in_parallel, no_op
from limpet.types import BLOCK_SIZE, DTYPES, MIB
from limpet.version import __version__

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
