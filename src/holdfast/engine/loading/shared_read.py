"""Shared reads: one rank of a host reads each chunk that several ranks of the host need.

The rank that reads a chunk checks it, and shares the chunk's bytes with the other ranks, which may
need different parts of them. A rank reads a chunk that only it needs by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import Lock

import numpy as np
import numpy.typing as npt

from holdfast.buffers import address_of
from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.host_exchange import HostPeers
from holdfast.engine.distributed.host_memory import (
    MemorySlice,
    assign_readers,
    connect_host_peers,
    max_item_size,
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
    read_group,
)
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.index import ShardIndex
from holdfast.format.index_columns import SchemaCache
from holdfast.ragged import sorted_unique
from holdfast.threads import Workers, gc_paused, no_op
from holdfast.types import BLOCK_SIZE, MIB

RankMasks = npt.NDArray[np.uint64]
"""Sets of ranks, one per chunk: bit ``r`` represents the ``r``-th rank of a host."""


MIN_SHARED_BYTES = 16 * MIB
"""Each rank reads a snapshot with fewer bytes by itself, which takes less time than to connect."""


def is_worth_sharing(snapshot: Snapshot) -> bool:
    """Return True if ranks of one host should read the snapshot together."""
    return snapshot.nbytes + snapshot.referred_bytes >= MIN_SHARED_BYTES


@contextmanager
def open_shared_reader(
    snapshot: Snapshot, collective: Collective
) -> Iterator[Snapshot | SharedReader]:
    """Yield a reader with which the ranks of this host read the snapshot together. Yield the
    snapshot itself if this host has no other rank, or if its ranks cannot share memory."""
    with connect_host_peers(collective, snapshot.url) as memory:
        if memory is None:
            yield snapshot
        else:
            yield SharedReader(snapshot, HostPeers(collective, memory))


class SharedReader:
    """A snapshot that several ranks of one host read together. All of them make the same calls in
    the same order."""

    def __init__(self, snapshot: Snapshot, peers: HostPeers) -> None:
        self._snapshot = snapshot
        self._peers = peers

    @gc_paused
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

        def read(number: int) -> AbstractContextManager[MemorySlice]:
            i, at, size = blocks[number]
            raw = memoryview(bytearray(size))
            snapshot.location.store.get_range(
                snapshot.location.key(shards[i].index.name), at, size, raw
            )
            return nullcontext(MemorySlice(raw, address_of(raw)))

        def consume(number: int, span: MemorySlice) -> None:
            i, at, size = blocks[number]
            with lock:
                received[i][at] = bytes(span.view[:size])
                is_last = len(received[i]) == block_counts[i]
            if is_last:
                raw = b"".join(block for _, block in sorted(received[i].items()))
                received[i].clear()
                indexes[i] = parse_index(snapshot.location, shards[i], raw, schema_cache)

        with snapshot.not_found_if_deleted():
            snapshot.check_lengths(shards[peers.peer_index :: len(peers.ranks)])
            sizes = [size for _, _, size in blocks]
            if peers.exchange(sizes, assign_readers(sizes, len(peers.ranks)), read, consume):
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
        checked_headers = self._snapshot.checked_headers
        plan = gc_paused(make_read_plan)(indexes, requests, checked_headers)
        keys = [(item.shard, item.first_chunk) for item in plan.items]

        @contextmanager
        def read(number: int) -> Iterator[MemorySlice]:
            item = shared_items[number]
            index = indexes[item.shard]
            with read_group(location, index, [item], workers.pool) as verified:
                for _, buffer, base in verified:
                    start, stop = item.start - base, item.stop - base
                    yield MemorySlice(buffer.view[start:stop], buffer.address + start)

        def consume(number: int, span: MemorySlice) -> None:
            item = shared_items[number]
            i = bisect_right(keys, (item.shard, item.first_chunk)) - 1
            if i >= 0 and plan.items[i].shard == item.shard:
                copy_to_targets(_narrow(plan.items[i], item), targets, span, item.start)

        workers = Workers.create(advance=advance)
        with self._snapshot.not_found_if_deleted():
            masks = self._wanting_ranks(plan, indexes)
            max_length = max_item_size(len(self._peers.ranks))
            shared_items, unshared = _split_shared(plan, indexes, masks, max_length)
            sizes = [item.stop - item.start for item in shared_items]
            readers = assign_readers(sizes, len(self._peers.ranks))
            increment_tensor_versions(targets)
            is_shared = self._peers.exchange(sizes, readers, read, consume)
            own_plan = ReadPlan(tuple(unshared)) if is_shared else plan
            execute_read_plan(location, own_plan, indexes, targets, workers)
        self._snapshot.checked_headers.update(plan.headers)

    def _wanting_ranks(self, plan: ReadPlan, indexes: Sequence[ShardIndex]) -> list[RankMasks]:
        """Return, for each shard, the ranks that need each of its chunks."""
        starts = np.cumsum([0, *(len(index.cuts) for index in indexes)])
        own_chunks = np.zeros(starts[-1], bool)
        for item in plan.items:
            start = starts[item.shard]
            own_chunks[start + item.first_chunk : start + item.end_chunk] = True
        packed = np.packbits(own_chunks).tobytes()
        chunks_by_rank = [np.zeros(len(own_chunks), np.uint64)] * len(self._peers.ranks)

        def read(number: int) -> AbstractContextManager[MemorySlice]:
            return nullcontext(MemorySlice(memoryview(packed), address_of(memoryview(packed))))

        def consume(number: int, span: MemorySlice) -> None:
            bits = np.frombuffer(span.view, np.uint8, len(packed))
            chunks_by_rank[number] = np.unpackbits(bits, count=len(own_chunks)).astype(np.uint64)

        every_rank = range(len(chunks_by_rank))
        self._peers.exchange([len(packed)] * len(every_rank), every_rank, read, consume)
        masks = np.zeros(len(own_chunks), np.uint64)
        for number, chunks in enumerate(chunks_by_rank):
            masks |= chunks << np.uint64(number)
        return np.split(masks, starts[1:-1])


def _split_shared(
    plan: ReadPlan,
    indexes: Sequence[ShardIndex],
    wanting_ranks: Sequence[RankMasks],
    max_length: int,
) -> tuple[list[ReadItem], list[ReadItem]]:
    """Return the chunks that several ranks need, and the part of the plan that only this rank
    needs. The shared chunks are split into ranges of which each rank needs all or nothing. A chunk
    of more than ``max_length`` bytes is not shared."""
    is_shared = [
        (masks & (masks - np.uint64(1)) != 0) & (np.diff(index.cuts, prepend=0) <= max_length)
        for index, masks in zip(indexes, wanting_ranks, strict=True)
    ]
    shared_items: list[ReadItem] = []
    for shard, (index, masks, shared) in enumerate(
        zip(indexes, wanting_ranks, is_shared, strict=True)
    ):
        shard_items = (
            item
            for mask in sorted_unique(masks[shared])
            for item in chunk_read_items(
                shard, index.cuts, index.chunk_refs, np.flatnonzero((masks == mask) & shared)
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
