"""Shared reads: one rank of a host reads each chunk that several ranks of the host need.

The rank that reads a chunk checks it, and shares the chunk's bytes with the other ranks, which may
need different parts of them. A rank reads a chunk that only it needs by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

import numpy as np
import numpy.typing as npt

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.host_memory import (
    HostPeers,
    ReadAssignment,
    WindowSlice,
    assign_reads,
    connect_host_peers,
)
from holdfast.engine.planning.read_plan import (
    ReadItem,
    ReadPlan,
    ReadRequest,
    chunk_read_items,
    make_read_plan,
)
from holdfast.engine.snapshot.index_files import parse_index
from holdfast.engine.snapshot.read import (
    Target,
    copy_to_targets,
    execute_read_plan,
    increment_tensor_versions,
    read_chunks_into,
)
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import SchemaCache
from holdfast.threads import Workers, gc_paused, no_op
from holdfast.types import ALIGNMENT, BLOCK_SIZE

RankMasks = npt.NDArray[np.uint64]
"""Sets of ranks, one per chunk: bit ``r`` represents the ``r``-th rank of a host."""


@contextmanager
def open_shared_reader(
    snapshot: Snapshot, collective: Collective
) -> Iterator[Snapshot | SharedReader]:
    """Yield a reader with which the ranks of this host read the snapshot together. Yield the
    snapshot itself if this host has no other rank, or if its ranks cannot share memory."""
    with connect_host_peers(collective, snapshot.url) as peers:
        yield snapshot if peers is None else SharedReader(snapshot, peers)


class SharedReader:
    """A snapshot that several ranks of one host read together. All of them make the same calls in
    the same order."""

    def __init__(self, snapshot: Snapshot, peers: HostPeers) -> None:
        self._snapshot = snapshot
        self._peers = peers

    def indexes(self) -> list[ShardIndex]:
        """Return the indexes of all shards, as ``Snapshot.indexes`` does. One rank reads each block
        of an index file."""
        peers, snapshot, shards = self._peers, self._snapshot, self._snapshot.manifest.shards
        blocks = [
            (i, at, min(BLOCK_SIZE, shard.index.length - at))
            for i, shard in enumerate(shards)
            for at in range(0, max(1, shard.index.length), BLOCK_SIZE)
        ]
        block_counts = Counter(i for i, _, _ in blocks)
        received: list[dict[int, bytes]] = [{} for _ in shards]
        indexes: dict[int, ShardIndex] = {}
        lock, schema_cache = Lock(), SchemaCache()

        def fill(number: int, into: WindowSlice) -> None:
            i, at, size = blocks[number]
            key = snapshot.location.key(shards[i].index.name)
            snapshot.location.store.get_range(key, at, size, into.view)

        def consume(number: int, span: WindowSlice) -> None:
            i, at, size = blocks[number]
            with lock:
                received[i][at] = bytes(span.view[:size])
                is_last = len(received[i]) == block_counts[i]
            if is_last:
                raw = b"".join(block for _, block in sorted(received[i].items()))
                received[i].clear()
                indexes[i] = parse_index(snapshot.location, shards[i], raw, schema_cache)

        with snapshot.not_found_if_deleted(), gc_paused():
            snapshot.check_lengths(shards[peers.peer_index :: len(peers.ranks)])
            rounds = assign_reads([size for _, _, size in blocks], len(peers.ranks))
            peers.exchange(rounds, fill, consume)
            snapshot.set_indexes([indexes[i] for i in range(len(shards))])
        return snapshot.indexes()

    def read(
        self,
        requests: Sequence[ReadRequest],
        targets: Sequence[Target],
        advance: Callable[[], object] = no_op,
    ) -> None:
        """Read the requests into the targets, as ``Snapshot.read`` does. One rank reads each chunk
        that several ranks request."""
        location, indexes = self._snapshot.location, self._snapshot.indexes()
        with gc_paused():
            checked_headers = self._snapshot.checked_headers
            plan = make_read_plan(indexes, requests, checked_headers)
        keys = [(item.shard, item.first_chunk) for item in plan.items]

        def fill(number: int, into: WindowSlice) -> None:
            item, padding = shared_items[number], paddings[number]
            # bytes that the store's alignment makes the read include before the range
            extra = min(padding, _file_offset(indexes, item) % location.store.traits.alignment)
            view = into.view[padding - extra :]
            read_chunks_into(location, indexes[item.shard], item, extra, view)

        def consume(number: int, span: WindowSlice) -> None:
            item = shared_items[number]
            i = bisect_right(keys, (item.shard, item.first_chunk)) - 1
            if i >= 0 and plan.items[i].shard == item.shard:
                copies = _narrow(plan.items[i], item)
                copy_to_targets(copies, targets, span, item.start - paddings[number])

        with self._snapshot.not_found_if_deleted():
            shared_items, unshared = _split_shared(
                plan, indexes, self._wanting_ranks(plan, indexes)
            )
            # Ranges have the same alignment in a window as in their file, which allows direct I/O.
            paddings = [_file_offset(indexes, item) % ALIGNMENT for item in shared_items]
            sizes = [
                n + item.stop - item.start for n, item in zip(paddings, shared_items, strict=True)
            ]
            increment_tensor_versions(targets)
            self._peers.exchange(assign_reads(sizes, len(self._peers.ranks)), fill, consume)
            own_plan = ReadPlan(tuple(unshared))
            execute_read_plan(location, own_plan, indexes, targets, Workers.create(advance=advance))
        self._snapshot.checked_headers.update(plan.headers)

    def _wanting_ranks(self, plan: ReadPlan, indexes: Sequence[ShardIndex]) -> list[RankMasks]:
        """Return, for each shard, the ranks that need each of its chunks."""
        starts = np.cumsum([0, *(len(index.cuts) for index in indexes)])
        own_chunks = np.zeros(starts[-1], bool)
        for item in plan.items:
            start = starts[item.shard]
            own_chunks[start + item.first_chunk : start + item.end_chunk] = True
        packed = np.packbits(own_chunks).tobytes()
        chunks_by_rank = [np.zeros(0, np.uint64)] * len(self._peers.ranks)

        def fill(number: int, into: WindowSlice) -> None:
            into.view[: len(packed)] = packed

        def consume(number: int, span: WindowSlice) -> None:
            bits = np.frombuffer(span.view, np.uint8, len(packed))
            chunks_by_rank[number] = np.unpackbits(bits, count=len(own_chunks)).astype(np.uint64)

        assignments = [ReadAssignment(r, r, 0, len(packed)) for r in range(len(chunks_by_rank))]
        self._peers.exchange([assignments], fill, consume)
        masks = np.zeros(len(own_chunks), np.uint64)
        for number, chunks in enumerate(chunks_by_rank):
            masks |= chunks << np.uint64(number)
        return np.split(masks, starts[1:-1])


def _file_offset(indexes: Sequence[ShardIndex], item: ReadItem) -> int:
    """Return the offset of the item's bytes in their file."""
    return indexes[item.shard].locate_chunk(item.first_chunk)[1]


def _split_shared(
    plan: ReadPlan, indexes: Sequence[ShardIndex], wanting_ranks: Sequence[RankMasks]
) -> tuple[list[ReadItem], list[ReadItem]]:
    """Return the chunks that several ranks need, and the part of the plan that only this rank
    needs. The shared chunks are split into ranges of which each rank needs all or nothing."""
    is_shared = [masks & (masks - np.uint64(1)) != 0 for masks in wanting_ranks]
    shared_items: list[ReadItem] = []
    for shard, (index, masks, shared) in enumerate(
        zip(indexes, wanting_ranks, is_shared, strict=True)
    ):
        shard_items = (
            item
            for mask in np.unique(masks[shared])
            for item in chunk_read_items(
                shard, index.cuts, index.chunk_refs, np.flatnonzero(masks == mask)
            )
        )
        shared_items += sorted(shard_items, key=lambda item: item.first_chunk)
    unshared: list[ReadItem] = []
    for item in plan.items:
        chunks = item.first_chunk + np.flatnonzero(
            ~is_shared[item.shard][item.first_chunk : item.end_chunk]
        )
        if len(chunks) == item.end_chunk - item.first_chunk:
            unshared.append(item)
        elif len(chunks):
            index = indexes[item.shard]
            parts = chunk_read_items(item.shard, index.cuts, index.chunk_refs, chunks)
            unshared += [_narrow(item, part) for part in parts]
    return shared_items, unshared


def _narrow(item: ReadItem, part: ReadItem) -> ReadItem:
    """Return ``part``, some of the item's chunks, with the item's copies from these chunks."""
    request_id, offset, at, size = item.linear_copies.T
    start, stop = np.maximum(offset, part.start), np.minimum(offset + size, part.stop)
    rows = np.column_stack([request_id, start, at + start - offset, stop - start])[stop > start]
    strided = tuple(s for s in item.strided_copies if part.start <= s.file_offset < part.stop)
    return replace(part, linear_copies=rows, strided_copies=strided)
